"""A script that solves the tasks of the family mujoco_warp, because it knows where everything is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotseat.envs.families.mujoco_warp import PUCKS


def advise(worlds: Any, where: Sequence[int]) -> np.ndarray:
    """Return the action of the script in each of these worlds of a `Tabletop`: [n, 2]."""
    names = [worlds.tasks[task].name for task in worlds.playing[list(where)]]
    is_pushing = np.array([name.startswith("push") for name in names])
    pucks = np.array([PUCKS.index(name.split("-")[1]) for name in names])
    return _actions(is_pushing, pucks, worlds.state()[list(where)].reshape(-1, 4, 2))


def _actions(is_pushing: np.ndarray, pucks: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the actions of a script: around what is in the way, to the puck, and behind it towards the disc.

    is_pushing and pucks: [n]. places: [n, 4, 2]. Returns [n, 2].
    """
    places = places.astype(np.float64)
    rows = np.arange(len(places))
    finger, disc = places[:, 0], places[:, 3]
    mine, other = places[rows, 1 + pucks], places[rows, 2 - pucks]
    way = disc - mine
    way /= np.maximum(_length(way), 1e-6)
    from_puck = finger - mine
    along = (from_puck * way).sum(1, keepdims=True)
    is_behind = (along < -0.75 * _length(from_puck)) & (_length(from_puck) < 0.12)
    # Behind the puck: push, and move across to where the centres are in line with the disc.
    push = np.clip((way * 0.05 - (from_puck - way * along) * 1.5) / 0.06, -1, 1)
    pushing = np.where(is_behind, push, _towards(finger, mine - way * 0.075, [mine, other]))
    return np.where(is_pushing[:, None], pushing, _towards(finger, mine, [other]))


def _towards(finger: np.ndarray, target: np.ndarray, obstacles: Sequence[np.ndarray]) -> np.ndarray:
    """Return the actions of a step to a place, sideways past pucks on the way; all are [n, 2]."""
    way = target - finger
    distance = np.maximum(_length(way), 1e-6)
    step = way / distance
    for obstacle in obstacles:
        to = obstacle - finger
        along, far = (to * step).sum(1, keepdims=True), _length(to)
        is_in_the_way = (along > 0) & (along < distance + 0.03) & (far < 0.13) & (_length(to - step * along) < 0.075)
        side = np.stack([-to[:, 1], to[:, 0]], axis=1) / np.maximum(far, 1e-6)
        side = np.where((side * step).sum(1, keepdims=True) >= 0, side, -side)
        step = np.where(is_in_the_way, side - 0.5 * to / np.maximum(far, 1e-6) * (far < 0.085), step)
    return np.clip(step * np.minimum(distance, 0.06) / 0.06, -1, 1)


def _length(vectors: np.ndarray) -> np.ndarray:
    return np.linalg.norm(vectors, axis=1, keepdims=True)
