"""Where the loop gets the groups of each step from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.rollout import RolloutPhase

T = TypeVar("T")


class Stream(Protocol):
    """Supplies scored groups, and is told when weights change."""

    def take(self, step: int) -> Collected:
        """Wait for the groups of the next step. Raises why there can be none."""

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on a batch whose groups hosts hold; return the batch and the result.

        Groups that were lost with their host are made again first, so the batch returned may be another than the one
        passed in, with the same samples.
        """

    def release(self, batch: Collected) -> None:
        """Drop the groups of a batch: their experience was made."""

    def crossing(self) -> AbstractContextManager[None]:
        """Enter around a push: no request may be answered by two versions of the weights unless the config says so."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate the weights that engines serve."""


class SynchronousStream:
    """Samples the groups of a step when they are asked for: nothing is in flight during an update or a push."""

    def __init__(self, rollout: RolloutPhase):
        self._rollout = rollout

    def take(self, step: int) -> Collected:
        """Sample and score the groups of the next step."""
        return self._rollout.run(step)

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch, sampled again if it was lost."""
        return self._rollout.with_groups(batch, use)

    def release(self, batch: Collected) -> None:
        """Drop the groups of a batch."""
        self._rollout.release(batch)

    def crossing(self) -> AbstractContextManager[None]:
        """Wait for nothing: no request is open."""
        return nullcontext()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the weights that engines serve."""
        return self._rollout.evaluate()
