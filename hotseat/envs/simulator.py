"""What a family of simulators implements: one file with a class of this form, and a function `make` that returns it.

Simulators run in child processes, so neither this module nor a family imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["ActionSpec", "Seen", "Simulator", "Step", "Task"]


@dataclass(frozen=True)
class Task:
    """One of the tasks that a simulator can be reset to."""

    index: int
    name: str


@dataclass(frozen=True)
class ActionSpec:
    """Actions of a simulator: vectors within bounds, or numbers 0 to `num_values` - 1 in vectors of one."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    num_values: int | None = None

    @classmethod
    def numbered(cls, num_values: int) -> ActionSpec:
        return cls((0.0,), (float(num_values - 1),), num_values)

    @property
    def dim(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class Seen:
    """Observation of one simulator, as far as it has each kind."""

    instruction: str = ""
    text: str = ""  # in words
    state: np.ndarray | None = None  # [S] float32
    image: np.ndarray | None = None  # [H, W, 3] uint8


@dataclass(frozen=True)
class Step:
    """Result of one action. terminated: the task ended. truncated: time ran out, and more reward was possible.

    success: whether the task is accomplished; None: the simulator does not know.
    """

    seen: Seen
    reward: float
    terminated: bool = False
    truncated: bool = False
    success: bool | None = False


class Simulator(Protocol):
    """One simulated world. What it does depends on the task, the seed and the actions since `reset`, and nothing else.

    state_bounds: lowest and highest value of `Seen.state`, which is encoded as tokens between them. is_on_device: it
    holds memory of an accelerator, and is offloaded by ending its process. It may have `num_state_values`: values of
    an entry of the state that numbers things, which are told apart only if `env.bins` is as large.
    """

    tasks: Sequence[Task]
    action: ActionSpec
    state_bounds: tuple[np.ndarray, np.ndarray] | None  # [S] each
    is_on_device: bool

    def reset(self, task: int, seed: int) -> Seen:
        """Begin an episode."""

    def step(self, action: np.ndarray) -> Step:
        """Carry out one action: [D] float64."""

    def render(self) -> np.ndarray:
        """Return a picture for people: [H, W, 3] uint8."""

    def close(self) -> None:
        """Release resources."""
