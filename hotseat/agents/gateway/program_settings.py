"""Settings of programs as agents, which need nothing of the gateway itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotseat.agents.conversation import History
from hotseat.agents.environments.families import EnvironmentSettings

OwnSampling = Literal["override", "refuse", "untrained"]


@dataclass(frozen=True)
class ProgramSettings:
    """Settings of programs. command: None if the program is a function. bind, advertise_url: of the gateway.

    sampling: what becomes of a client's own temperature and the like. chat_template: instead of the tokenizer's.
    tool_parser: family of models whose tool calls are parsed, as the package `renderers` names it.

    passed_on: names of variables of our environment that a command gets. containers: the command that removes the
    containers of an episode, such as podman. environment: what plays in processes of its own, instead of a command or a
    function.
    """

    command: tuple[str, ...] | None = None
    sampling: OwnSampling = "override"
    history: History = "append"
    chat_template: str | None = None
    tool_parser: str | None = None
    bind: str = "127.0.0.1"
    advertise_url: str | None = None
    passed_on: tuple[str, ...] = ()
    containers: str | None = None
    run_seed: int = 0
    environment: EnvironmentSettings | None = None
