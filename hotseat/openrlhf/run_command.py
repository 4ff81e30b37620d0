"""The four commands: translate, then print the config or start the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from hotseat import clock, interrupts
from hotseat.cli.ending import OK, leave, reported, show
from hotseat.errors import UserError
from hotseat.openmp import wait_passively
from hotseat.openrlhf.argv import hide_secrets
from hotseat.openrlhf.flags import TASKS

if TYPE_CHECKING:
    from hotseat.config import Config
    from hotseat.openrlhf.translate import FlagTranslation

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def entry(command: str) -> None:
    """Run a command with this process's arguments, after hiding secrets in sys.argv, which other code may log."""
    interrupts.handle_until_exit()
    wait_passively()
    argv = sys.argv[1:]
    sys.argv[1:] = hide_secrets(command, argv)
    leave(main(command, argv, start=_start))


def main(
    command: str,
    argv: Sequence[str],
    env: MutableMapping[str, str] | None = None,
    start: Callable[..., Any] | None = None,
) -> int:
    """Run a command and return its exit code. start: starts a run, by default `hotseat.loop.start.start`."""
    clock.begin()
    return reported(command, lambda: _run(command, argv, os.environ if env is None else env, start))


def _run(command: str, argv: Sequence[str], env: MutableMapping[str, str], start: Callable[..., Any] | None) -> int:
    if any(token in ("-h", "--help") for token in argv):
        from hotseat.openrlhf.help import render_help

        show(render_help(command) + "\n")
        return OK
    from hotseat.openrlhf.translate import translate

    translation = translate(command, argv, env)
    launched = is_launched(command, env, translation.line["--local_rank"])
    speaks = not launched or _rank(env, translation.line["--local_rank"]) == 0
    if speaks:
        translation.show_no_effect()
    if translation.line.print_config:
        if speaks:
            show(translation.yaml)
        return OK
    translation.check_prerequisites()
    begin(translation, env, launched, start or _start)
    return OK


def begin(
    translation: FlagTranslation, env: MutableMapping[str, str], launched: bool, start: Callable[..., Any]
) -> None:
    """Start the run. Secrets are passed in the environment."""
    env.update(translation.secrets)
    try:
        start(translation.config, launched=launched)
    except UserError as error:
        raise UserError(translation.rename_keys(str(error))) from error


def _start(config: Config, launched: bool) -> None:
    from hotseat.loop import start

    start.start(config, launched=launched)


def is_launched(command: str, env: Mapping[str, str], local_rank: int = -1) -> bool:
    """Return whether torchrun or deepspeed started this process as one of several ranks. RL starts its own ranks."""
    return TASKS[command] != "rl" and (local_rank >= 0 or all(env.get(name) for name in LAUNCHER_VARIABLES))


def _rank(env: Mapping[str, str], local_rank: int) -> int:
    text = env.get("RANK", "")
    return int(text) if text.isdecimal() else max(local_rank, 0)
