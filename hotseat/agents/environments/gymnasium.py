"""Environments of gymnasium with text to read, and text or a number to answer.

name: as `gymnasium.make` takes it, such as `module:Echo-v0`, or of a file that registers it, as `games.py:Echo-v0`.
arguments: of `gymnasium.make`; and `system`, a text before the first observation. Numbers are the seeds of `reset`.

Observations are of the space Text, or of any other, which is written by Python's `str`. Actions are of the space Text
or Discrete. An answer that is no action costs nothing: the policy is told, and answers again.
"""

from __future__ import annotations

import re
import sys
from contextlib import closing
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

NEEDS_NAME = "gymnasium needs the name of an environment, as gymnasium.make takes it"


class GymnasiumTasks:
    def __init__(self, name: str, arguments: dict[str, Any]):
        file = re.fullmatch(r"(.+\.py):(.+)", name)
        if file is not None:
            sys.modules["hotseat_worker"].module_of(file[1])  # registers its environments
        arguments = dict(arguments)
        self._system = arguments.pop("system", None)
        self._name = name if file is None else file[2]
        self._arguments = arguments
        with closing(self._make()) as environment:
            if not isinstance(environment.action_space, Text | Discrete):
                raise ValueError(f"{name}: its actions are {environment.action_space}; policies write Text or Discrete")

    def prompt(self, number: int) -> str:
        with closing(self._make()) as environment:
            return str(environment.reset(seed=number)[0])

    def play(self, number: int, policy: Any) -> dict[str, Any]:
        with closing(self._make()) as environment:

            def act(answer: str) -> tuple[str | None, float | None]:
                action = _action(environment.action_space, answer)
                if action is None:
                    return f"This is no action. Actions are {environment.action_space}", None
                observation, reward, is_terminated, is_truncated, _ = environment.step(action)
                return None if is_terminated or is_truncated else str(observation), float(reward)

            return policy.converse(self._system, str(environment.reset(seed=number)[0]), act)

    def _make(self) -> Any:
        return gymnasium.make(self._name, **self._arguments)


def _action(space: Any, answer: str) -> Any:
    if isinstance(space, Text):
        return answer if space.contains(answer) else None
    number = re.search(r"-?\d{1,9}", answer)
    return int(number[0]) if number is not None and space.contains(int(number[0])) else None
