"""Sources of the groups that the loop learns from, step by step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.rollout import RolloutPhase

T = TypeVar("T")


class Stream(Protocol):
    """Supplies scored groups, and knows when weights change."""

    def take(self, step: int) -> Collected:
        """Wait for the groups of the next step. Raises `RunError` if there can be none."""

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on a batch whose groups hosts hold; return the batch and the result.

        Groups that were lost with their host are sampled again first: the batch returned may then be another object
        than the one passed in, with the same samples.
        """

    def release(self, batch: Collected) -> None:
        """Drop the groups of a batch whose experience was made."""

    def crossing(self) -> AbstractContextManager[None]:
        """Guard a push: no request may be answered by two versions of the weights unless the config allows it."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate the weights that engines serve."""


class SynchronousStream:
    """Samples the groups of a step on demand: no request is open during an update or a push."""

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
