"""Games of TextArena, in which the policy has one seat.

name: a game, such as `GuessTheNumber-v0`. Numbers are the seeds of `reset`. arguments: of `textarena.make`; and

    num_players   1
    seat          of the policy, 0
    opponent      of the other seats: `FILE.py:function`, which answers an observation, or `self`, the policy itself
    system        a text before the game's

The reward is that of the policy's seat, so only its answers are learned from: an opponent `self` samples with the same
weights, each seat in a conversation of its own. A game that the run's bounds cut short has no reward: it counts 0.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import textarena

_LOCK = threading.Lock()  # games draw from the module `random` as they begin

NEEDS_NAME = "textarena needs the name of a game, such as GuessTheNumber-v0"


class TextarenaTasks:
    def __init__(self, name: str, arguments: dict[str, Any]):
        self._name = name
        arguments = dict(arguments)
        self._num_players = int(arguments.pop("num_players", 1))
        self._seat = int(arguments.pop("seat", 0))
        self._system = arguments.pop("system", None)
        opponent = arguments.pop("opponent", None)
        self._opponent = None if opponent in (None, "self") else _function(opponent)
        self._arguments = arguments
        if not 0 <= self._seat < self._num_players:
            raise ValueError(
                f"{name}: seat {self._seat}, but {self._num_players} players have 0 to {self._num_players - 1}"
            )
        if self._num_players > 1 and opponent is None:
            raise ValueError(
                f"{name} with {self._num_players} players needs the argument opponent for the other seats:"
                " FILE.py:function, or self"
            )
        textarena.make(name, **arguments)

    def prompt(self, number: int) -> str:
        """Return what the policy reads first, or where that depends on its own moves, what the first player reads."""
        game = self._begin(number)
        while self._opponent is not None and (seen := game.get_observation())[0] != self._seat:
            if game.step(str(self._opponent(seen[1])))[0]:
                break
        return str(game.get_observation()[1]).strip()

    def play(self, number: int, policy: Any) -> dict[str, Any]:
        game = self._begin(number)
        players: dict[int, _Player] = {}
        num_moves, is_over = 0, False
        while not is_over:
            seat, seen = game.get_observation()
            if seat == self._seat or self._opponent is None:
                player = players.setdefault(seat, _Player(policy, self._system, is_learned=seat == self._seat))
                move = player.move(str(seen))
                if move is None:
                    break
                num_moves += player.is_learned
            else:
                move = str(self._opponent(seen))
            is_over = game.step(move)[0]
        rewards, _ = game.close()
        reward = (rewards or {}).get(self._seat, 0.0) if is_over else 0.0
        return {"reward": float(reward), "extra": {"num_moves": num_moves, "finished": float(is_over)}}

    def _begin(self, number: int) -> Any:
        game = textarena.make(self._name, **self._arguments)
        with _LOCK:
            random.seed(number)
            game.reset(num_players=self._num_players, seed=number)
        return game


class _Player:
    """A seat that the policy plays, with its conversation."""

    def __init__(self, policy: Any, system: str | None, *, is_learned: bool):
        self.is_learned = is_learned
        self._policy = policy
        self._messages = sys.modules["hotseat_worker"].opening(system)
        self._seen = ""

    def move(self, seen: str) -> str | None:
        """Return the answer to an observation; None if the episode may have no more turns or tokens."""
        before, self._seen = self._seen, seen
        # Many games show all that was said so far: the policy has read it.
        new = seen[len(before) :] if seen.startswith(before) else seen
        self._messages.append({"role": "user", "content": new.strip()})
        answer = self._policy.ask(self._messages, **({} if self.is_learned else {"learn": False}))
        self._messages.append({"role": "assistant", "content": answer})
        return answer


def _function(name: str) -> Callable[[str], Any]:
    file, _, function = name.rpartition(":")
    return getattr(sys.modules["hotseat_worker"].module_of(file), function)
