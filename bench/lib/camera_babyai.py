"""BabyAI with a camera: a family of simulators that draws `frames` pictures at every step, as one with cameras does."""

from __future__ import annotations

from typing import Any

from hotseat.envs.families.babyai import BabyAi


def make(tasks: list[str], max_steps: int | None = None, frames: int = 0, **kwargs: Any) -> CameraBabyAi:
    simulator = CameraBabyAi(tasks, max_steps, kwargs)
    simulator.frames = frames
    return simulator


class CameraBabyAi(BabyAi):
    frames = 0

    def step(self, action: Any) -> Any:
        for _ in range(self.frames):
            self.environments[self._current].unwrapped.get_frame(tile_size=8)
        return super().step(action)
