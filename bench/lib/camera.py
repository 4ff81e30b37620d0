"""A simulator that costs nothing: its pictures are slices of noise, as those of a camera hardly compress."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotseat.envs.simulator import ActionSpec, Observation, Task, WorldStep


class Noise:
    tasks = (Task(0, "noise"),)
    action = ActionSpec((-1.0,), (1.0,))
    state_bounds = None
    is_on_device = False

    def __init__(self, pixels: int):
        self._pixels = pixels
        self._noise = np.random.default_rng(0).integers(0, 256, 4 * pixels * pixels * 3, dtype=np.uint8)
        self._count = 0

    def _see(self) -> Observation:
        size = self._pixels * self._pixels * 3
        self._count += 1
        start = self._count * 7919 % (3 * size)
        return Observation("look", image=self._noise[start : start + size].reshape(self._pixels, self._pixels, 3))

    def reset(self, where: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> list[Observation]:
        return [self._see() for _ in where]

    def step(self, where: Sequence[int], actions: np.ndarray) -> list[WorldStep]:
        return [WorldStep(self._see(), [0.0]) for _ in where]

    def render(self, where: Sequence[int]) -> list[np.ndarray]:
        return [np.zeros((1, 1, 3), np.uint8) for _ in where]

    def close(self) -> None:
        pass


def make_worlds(tasks: Sequence[str], max_steps: int | None, num_worlds: int, pixels: int = 64) -> Noise:
    return Noise(pixels)
