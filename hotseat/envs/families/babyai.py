"""BabyAI and MiniGrid (package `minigrid`): the view of the agent in words, one for each cell.

The words are those of `WORDS`, so a tokenizer made of them has one token per cell.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotseat.envs.families.gym import GymSimulator
from hotseat.envs.simulator import Seen

KINDS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
STATES = ("open", "closed", "locked")
_COLOURED = ("floor", "door", "key", "ball", "box", "goal")
ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")

WORDS = (
    *(kind for kind in KINDS if kind not in _COLOURED),
    *(f"{colour}-{kind}" for kind in _COLOURED if kind != "door" for colour in COLOURS),
    *(f"{colour}-{state}-door" for colour in COLOURS for state in STATES),
)


def make(tasks: Sequence[str], max_steps: int | None = None, **kwargs: Any) -> GymSimulator:
    """Make a simulator of environments such as BabyAI-GoToRedBallGrey-v0. kwargs: of `gymnasium.make`."""
    return BabyAi(tasks, max_steps, kwargs)


class BabyAi(GymSimulator):
    """MiniGrid's environments. Their own time limit depends on the level; `max_steps` replaces it."""

    def __init__(self, tasks: Sequence[str], max_steps: int | None, kwargs: dict[str, Any]):
        limit = {} if max_steps is None else {"max_steps": max_steps}
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(tasks, None, {"imports": ["minigrid"], **limit, **kwargs}, describe)

    def reset(self, task: int, seed: int) -> Seen:
        with contextlib.redirect_stdout(io.StringIO()):  # levels print the positions that they reject
            return super().reset(task, seed)

    def expert(self) -> Any:
        """Return BabyAI's bot for the episode that was just begun: `bot.replan(last action)` is the next action."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        return BabyAIBot(self.environments[self._current])


def describe(environment: Any, observation: Any) -> Seen:
    """Return the mission and the view: row by row from the agent outwards, each cell a word."""
    view = np.asarray(observation["image"])  # [width, height, 3]: kind, colour, state; the agent is below the middle
    cells = [_word(*view[x, y]) for y in reversed(range(view.shape[1])) for x in range(view.shape[0])]
    carried = environment.unwrapped.carrying
    if carried is not None:
        cells.append(f"{carried.color}-{carried.type}")
    return Seen(instruction=str(observation["mission"]), text=" ".join(cells))


def _word(kind: int, colour: int, state: int) -> str:
    name = KINDS[kind]
    if name == "door":
        return f"{COLOURS[colour]}-{STATES[state]}-door"
    return f"{COLOURS[colour]}-{name}" if name in _COLOURED else name
