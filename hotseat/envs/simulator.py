"""The protocols that families of simulators implement: one file has such a class, and a function that returns it.

`make(tasks, max_steps, **kwargs)` returns a `Simulator`, one world; `make_worlds(tasks, max_steps, num_worlds,
**kwargs)` returns `Worlds`, a batch that one call steps. Importing the file takes no memory of a device.

Simulators run in child processes, so neither this module nor a family imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["ActionSpec", "Observation", "Simulator", "SimulatorStep", "Task", "WorldStep", "Worlds"]


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
class Observation:
    """Observation of one simulator, as far as it has each kind."""

    instruction: str = ""
    text: str = ""  # in words
    state: np.ndarray | None = None  # [S] float32
    image: np.ndarray | None = None  # [H, W, 3] uint8


@dataclass(frozen=True)
class SimulatorStep:
    """Result of one action. terminated: the task ended. truncated: time ran out, and more reward was possible.

    success: whether the task is accomplished; None: the simulator does not know.
    """

    seen: Observation
    reward: float
    terminated: bool = False
    truncated: bool = False
    success: bool | None = False


class Simulator(Protocol):
    """One simulated world. What it does depends on the task, the seed and the actions since `reset`, and nothing else.

    state_bounds: lowest and highest value of `Observation.state`, which is encoded as tokens between them.
    is_on_device: it holds memory of an accelerator, and is offloaded by ending its process. It may have
    `num_state_values`: values of an entry of the state that numbers things. Tokens distinguish them only if `env.bins`
    is as large.
    """

    tasks: Sequence[Task]
    action: ActionSpec
    state_bounds: tuple[np.ndarray, np.ndarray] | None  # [S] each
    is_on_device: bool

    def reset(self, task: int, seed: int) -> Observation:
        """Begin an episode."""

    def step(self, action: np.ndarray) -> SimulatorStep:
        """Carry out one action: [D] float64."""

    def render(self) -> np.ndarray:
        """Return a picture for display: [H, W, 3] uint8."""

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True)
class WorldStep:
    """Result of a chunk of actions in one world of a batch. rewards: of the actions that were carried out."""

    seen: Observation
    rewards: list[float]
    terminated: bool = False
    truncated: bool = False
    success: bool | None = False


class Worlds(Protocol):
    """A batch of simulated worlds that step together, each of which is as a `Simulator` is.

    Nothing in a world depends on the others, or on how many there are. An entry of a result may be an exception: that
    world failed, and the others did not.
    """

    tasks: Sequence[Task]
    action: ActionSpec
    state_bounds: tuple[np.ndarray, np.ndarray] | None
    is_on_device: bool

    def reset(
        self, where: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]
    ) -> Sequence[Observation | Exception]:
        """Begin episodes in these worlds."""

    def step(self, where: Sequence[int], actions: np.ndarray) -> Sequence[WorldStep | Exception]:
        """Carry out a chunk in these worlds, each up to the end of its episode: [n, K, D] float64."""

    def render(self, where: Sequence[int]) -> Sequence[np.ndarray]:
        """Return pictures for display: [H, W, 3] uint8 each."""

    def close(self) -> None:
        """Release resources."""
