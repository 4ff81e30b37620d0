"""The contract of a batch of simulators. `tests/helpers/simulator_conformance.py` checks it for any family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hotseat.envs.simulator import ActionSpec, Observation, Task
from hotseat.types import Moved


@dataclass(frozen=True)
class Outcome:
    """Results of a chunk of actions, for `n` simulators. Nothing acts after an episode's end.

    Rewards of actions that were not carried out are 0. failures: why a simulator gave no result, by its slot; its rows
    are zeros, and its episode has ended.
    """

    seen: Sequence[Observation | None]  # n, after the last action that was carried out; None: failed
    rewards: np.ndarray  # [n, K] float64
    num_taken: np.ndarray  # [n] int64: actions that were carried out
    terminated: np.ndarray  # [n] bool
    truncated: np.ndarray  # [n] bool
    success: np.ndarray  # [n] bool
    is_success_known: np.ndarray  # [n] bool: the simulator says whether the task is accomplished
    failures: Mapping[int, str]


class Env(Protocol):
    """A batch of simulators in numbered slots. A slot's results depend on its own task, seed and actions only.

    Calls are made from one thread at a time, and each one ends: what takes too long is ended and named.
    """

    num_envs: int
    tasks: Sequence[Task]
    action: ActionSpec
    state_bounds: tuple[np.ndarray, np.ndarray] | None
    num_state_values: int | None  # most values of an entry of the state that numbers things

    def reset(self, where: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> list[Observation | Exception]:
        """Begin episodes in these slots, whatever was in them; an entry per slot."""

    def step(self, where: Sequence[int], actions: np.ndarray) -> Outcome:
        """Carry out a chunk of actions in these slots: [n, K, D] float64."""

    def forget(self, where: Iterable[int]) -> None:
        """Drop the episodes of these slots, which have ended."""

    def snapshot(self) -> bytes:
        """Return the state of all slots."""

    def restore(self, state: bytes) -> None:
        """Continue from a snapshot, of this or another object with as many slots."""

    def render(self, where: Sequence[int]) -> list[np.ndarray]:
        """Return pictures for display: [H, W, 3] uint8 each."""

    def offload(self) -> Moved:
        """Give up the device's memory. Episodes are kept only as far as `restore` brings them back."""

    def onload(self) -> Moved:
        """Take the device's memory again."""

    def close(self) -> None:
        """End everything."""
