"""Games of TextArena, in which the policy has one seat.

name: a game, such as `GuessTheNumber-v0`. Numbers are the seeds of `reset`. arguments: of `textarena.make`; and

    num_players   1
    seat          of the policy, 0
    opponent      `FILE.py:function`, which answers the observations of the other seats
    system        a text before the game's

The reward is that of the policy's seat. A game that the run's bounds cut short has none: it counts 0.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import textarena

_LOCK = threading.Lock()  # games draw from the module `random` as they begin


class Tasks:
    def __init__(self, name: str, arguments: dict[str, Any]):
        self._name = name
        arguments = dict(arguments)
        self._num_players = int(arguments.pop("num_players", 1))
        self._seat = int(arguments.pop("seat", 0))
        self._system = arguments.pop("system", None)
        opponent = arguments.pop("opponent", None)
        self._opponent = None if opponent is None else _function(opponent)
        self._arguments = arguments
        if self._num_players > 1 and self._opponent is None:
            raise ValueError(
                f"{name} with {self._num_players} players needs the argument opponent, FILE.py:function, for the other"
                " seats: the policy has one"
            )
        textarena.make(name, **arguments)

    def prompt(self, number: int) -> str:
        game = self._begin(number)
        self._wait_for_turn(game)
        return str(game.get_observation()[1]).strip()

    def play(self, number: int, policy: Any) -> dict[str, Any]:
        game = self._begin(number)
        is_over = self._wait_for_turn(game)
        seen = str(game.get_observation()[1])
        num_moves = 0

        def act(answer: str) -> str | None:
            nonlocal is_over, seen, num_moves
            num_moves += 1
            is_over = game.step(answer)[0] or self._wait_for_turn(game)
            if is_over:
                return None
            before, seen = seen, str(game.get_observation()[1])
            # Many games show all that was said so far: the policy has read it.
            return seen[len(before) :].strip() if seen.startswith(before) else seen.strip()

        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        if not is_over:
            is_over = policy.converse([*messages, {"role": "user", "content": seen.strip()}], act)
        rewards, _ = game.close()
        reward = (rewards or {}).get(self._seat, 0.0) if is_over else 0.0
        return {"reward": float(reward), "extra": {"num_moves": num_moves, "finished": float(is_over)}}

    def _begin(self, number: int) -> Any:
        game = textarena.make(self._name, **self._arguments)
        with _LOCK:
            random.seed(number)
            game.reset(num_players=self._num_players, seed=number)
        return game

    def _wait_for_turn(self, game: Any) -> bool:
        """Let the other seats move until it is the policy's turn; True if the game is over before."""
        while (seen := game.get_observation())[0] != self._seat:
            assert self._opponent is not None
            if game.step(str(self._opponent(seen[1])))[0]:
                return True
        return False


def _function(name: str) -> Callable[[str], Any]:
    file, _, function = name.rpartition(":")
    return getattr(sys.modules["hotseat_worker"].module_of(file), function)


def load(name: str | None, arguments: dict[str, Any]) -> Tasks:
    if name is None:
        raise ValueError("textarena needs the name of a game, such as GuessTheNumber-v0")
    return Tasks(name, arguments)
