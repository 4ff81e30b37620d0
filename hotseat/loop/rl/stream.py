"""Sources of the groups that the loop learns from, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hotseat.errors import RunError
from hotseat.loop.rl.arrivals import Arrivals
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

    def metrics(self) -> dict[str, float]:
        """Return what the stream measured of the batch that was taken last."""

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint needs besides the order of prompts, as JSON; None: nothing."""

    def save(self, folder: Path) -> None:
        """Put groups that wait for training into a checkpoint."""

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Continue from a checkpoint that was made after `step`."""


class SynchronousStream:
    """Samples the groups of a step on demand: no request is open during an update or a push."""

    def __init__(self, rollout: RolloutPhase, record: Arrivals):
        self._rollout = rollout
        self._record = record

    def take(self, step: int) -> Collected:
        """Sample and score the groups of the next step."""
        batch = self._rollout.run(step)
        self._record.taken(step, batch)
        return batch

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

    def metrics(self) -> dict[str, float]:
        """Return nothing: the rollout phase and the meter measure a synchronous rollout."""
        return {}

    def state(self) -> None:
        """Return None: between two steps nothing waits."""

    def save(self, folder: Path) -> None:
        """Save nothing: between two steps nothing waits."""

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Refuse groups that were sampled ahead: they would be lost."""
        if state is not None and state["tickets"]:
            raise RunError(
                f"{folder} holds {len(state['tickets'])} groups that were sampled ahead of training, and"
                " overlap.staleness is 0 now: resume with the overlap that it was saved with"
            )
        self._record.restored(step, None)
