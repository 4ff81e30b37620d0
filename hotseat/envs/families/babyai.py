"""BabyAI and MiniGrid (package `minigrid`): the view of the agent in words or in pixels.

Either the objects in view are listed with their places (`view: objects`), or every cell is named, row by row
(`view: cells`), or the view is an image (`view: pixels`), in which a cell has `TILE` by `TILE` pixels. The words are
those of `WORDS`, so a tokenizer made of them has one token for each.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hotseat.envs.families.gym import GymSimulator
from hotseat.envs.simulator import Observation
from hotseat.errors import UserError

KINDS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
STATES = ("open", "closed", "locked")
_COLOURED = ("floor", "door", "key", "ball", "box", "goal")
ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")

TILE = 8  # pixels of a cell, in both directions
REACH = 7  # cells of a view, to the front and from side to side
PLACES = (
    "middle",
    *(f"{side}-{far}" for side in ("left", "right") for far in range(1, REACH // 2 + 1)),
    *(f"ahead-{far}" for far in range(REACH)),
)
WORDS = (
    *PLACES,
    "front",
    "carries",
    *(kind for kind in KINDS if kind not in _COLOURED),
    *(f"{colour}-{kind}" for kind in _COLOURED if kind != "door" for colour in COLOURS),
    *(f"{colour}-{state}-door" for colour in COLOURS for state in STATES),
)


class BabyAi(GymSimulator):
    """MiniGrid's environments, such as BabyAI-GoToRedBallGrey-v0, with a view: objects, cells or pixels.

    Their own time limit depends on the level; `max_steps` replaces it.
    """

    def __init__(self, tasks: Sequence[str], max_steps: int | None = None, view: str = "objects", **kwargs: Any):
        limit = {} if max_steps is None else {"max_steps": max_steps}
        if view not in VIEWS:
            raise UserError(f"env.kwargs.view is {view!r}: set it to {', '.join(VIEWS)}")
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(tasks, describe=VIEWS[view], **{"imports": ["minigrid"], **limit, **kwargs})

    def reset(self, task: int, seed: int) -> Observation:
        with contextlib.redirect_stdout(io.StringIO()):  # levels print the positions that they reject
            return super().reset(task, seed)

    def _success(self, info: Mapping[str, Any], terminated: bool, reward: float) -> bool | None:
        """Tell whether the mission is accomplished: it is rewarded then, and in no other case."""
        return terminated and reward > 0

    def expert(self) -> Any:
        """Return BabyAI's bot for the episode that was just begun: `bot.replan(last action)` is the next action."""
        from minigrid.utils.baby_ai_bot import BabyAIBot

        return BabyAIBot(self.environments[self._current])


make = BabyAi


def cells(environment: Any, observation: Any) -> Observation:
    """Return the mission and the view: row by row from the agent outwards, each cell a word."""
    view = np.asarray(observation["image"])  # [width, height, 3]: kind, colour, state; the agent is below the middle
    words = [_word(*view[x, y]) for y in reversed(range(view.shape[1])) for x in range(view.shape[0])]
    return _seen(environment, observation, words)


def objects(environment: Any, observation: Any) -> Observation:
    """Return the mission, what is in front of the agent, and the objects in view with their places, near ones first."""
    view = np.asarray(observation["image"])
    middle, last = view.shape[0] // 2, view.shape[1] - 1
    words = ["front", _word(*view[middle, last - 1])]
    for y in reversed(range(last + 1)):
        for x in sorted(range(view.shape[0]), key=lambda x: (abs(x - middle), x)):
            kind = KINDS[view[x, y, 0]]
            if kind in ("unseen", "empty", "wall", "agent") or (kind == "floor") or (x, y) == (middle, last):
                continue
            side = "middle" if x == middle else f"{'left' if x < middle else 'right'}-{abs(x - middle)}"
            words += [_word(*view[x, y]), f"ahead-{last - y}", side]
    return _seen(environment, observation, words)


def pixels(environment: Any, observation: Any) -> Observation:
    """Return the mission and the view as MiniGrid draws it, with the agent below the middle: [7 TILE, 7 TILE, 3]."""
    view = np.asarray(observation["image"]).astype(np.int64)
    agent = (view.shape[0] // 2, view.shape[1] - 1)
    rows = [
        np.concatenate([_tile(*view[x, y], (x, y) == agent) for x in range(view.shape[0])], axis=1)
        for y in range(view.shape[1])
    ]
    return Observation(instruction=str(observation["mission"]), image=np.concatenate(rows))


@lru_cache(maxsize=4096)
def _tile(kind: int, colour: int, state: int, has_agent: bool) -> np.ndarray:
    """Draw a cell, as MiniGrid does: [TILE, TILE, 3]. Drawing whole views takes ten times as long."""
    from minigrid.core.grid import Grid
    from minigrid.core.world_object import WorldObj

    is_visible = KINDS[kind] != "unseen"
    thing = WorldObj.decode(kind, colour, state) if KINDS[kind] not in ("unseen", "empty", "agent") else None
    drawn: np.ndarray = Grid.render_tile(thing, 3 if has_agent else None, is_visible, TILE)
    return drawn.astype(np.uint8)


def _seen(environment: Any, observation: Any, words: list[str]) -> Observation:
    carried = environment.unwrapped.carrying
    if carried is not None:
        words += ["carries", f"{carried.color}-{carried.type}"]
    return Observation(instruction=str(observation["mission"]), text=" ".join(words))


VIEWS = {"objects": objects, "cells": cells, "pixels": pixels}


def _word(kind: int, colour: int, state: int) -> str:
    name = KINDS[kind]
    if name == "door":
        return f"{COLOURS[colour]}-{STATES[state]}-door"
    return f"{COLOURS[colour]}-{name}" if name in _COLOURED else name
