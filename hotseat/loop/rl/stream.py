"""Sources of the groups that the loop learns from, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from hotseat import faults
from hotseat.errors import RunError
from hotseat.loop.rl.arrivals import Arrivals
from hotseat.loop.rl.collect import Collected, Collector
from hotseat.loop.rl.rollout import Evaluation, RolloutRunner, group_filter
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import RlState
from hotseat.loop.settings.engine_settings import rollout_sampling
from hotseat.types import Prompt

T = TypeVar("T")


class Stream(ABC):
    """Supplies scored groups, and knows when weights change. By default no request is open between two steps."""

    @abstractmethod
    def take(self, step: int) -> Collected:
        """Wait for the groups of the next step. Raises `RunError` if there can be none."""

    @abstractmethod
    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on a batch whose groups hosts hold; return the batch and the result.

        Groups that were lost with their host are sampled again first: the batch returned may then be another object
        than the one passed in, with the same samples.
        """

    @abstractmethod
    def release(self, batch: Collected) -> None:
        """Drop the groups of a batch whose experience was made."""

    def crossing(self) -> AbstractContextManager[None]:
        """Guard a push: no request may be answered by two versions of the weights unless the config allows it."""
        return nullcontext()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the weights that engines serve."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return what the stream measured of the batch that was taken last."""
        return {}

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint needs besides the order of prompts, as JSON; None: nothing."""
        return None

    def save(self, folder: Path) -> None:  # noqa: B027 -- by default there is nothing to save
        """Put groups that wait for training into a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Continue from a checkpoint that was made after `step`."""


class SynchronousStream(Stream):
    """Samples the groups of a step on demand, and again if they were lost with their host.

    No request is open during an update or a push.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        state: RlState,
        samples: SampleLog,
        prompts: Sequence[Prompt],
        evaluation: Evaluation,
        record: Arrivals,
    ):
        self._recovery = runner.recovery
        self._settings = runner.settings
        self._state = state
        self._samples = samples
        self._prompts = prompts
        self._evaluation = evaluation
        self._record = record
        self._collector = Collector(runner.answer, runner.groups.hosts, prompts)
        # Of the batch that was sampled last: order of prompts before it, restarts of hosts by its end, and its step.
        self._order_before = state.order.state()
        self._num_host_restarts = 0
        self._step = 0

    def take(self, step: int) -> Collected:
        """Sample and score the groups of a step. If that stops the run, record what became of its samples."""
        faults.reach("generation.before")
        self._order_before, self._step = self._state.order.state(), step
        batch = self._sample_until_done()
        self._record.taken(step, batch)
        return batch

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch that was sampled last; if hosts lost it, sample it again first."""

        def work() -> tuple[Collected, T]:
            nonlocal batch
            if self._recovery.num_host_restarts > self._num_host_restarts:
                batch = self._sample_until_done()
            return batch, use(batch)

        return self._recovery.during(work)

    def release(self, batch: Collected) -> None:
        """Let the hosts drop the groups of a batch; the order of prompts gets their scores."""
        groups = [*batch.groups, *(facts for facts, _ in batch.dropped)]
        self._state.order.record({facts.prompt: fmean(facts.scores) for facts in groups if facts.scores})
        self._recovery.during(lambda: self._collector.forget(groups))
        self._recovery.start_counting()

    def evaluate(self) -> dict[str, float]:
        return self._evaluation.run()

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Refuse groups that were sampled ahead: they would be lost."""
        if state is not None and state["tickets"]:
            raise RunError(
                f"{folder} holds {len(state['tickets'])} groups that were sampled ahead of training, and"
                " overlap.staleness is 0 now: resume with the overlap that it was saved with"
            )
        self._record.restored(step, None)

    def _sample_until_done(self) -> Collected:
        try:
            batch = self._recovery.during(self._sample)
        except RunError:
            self._samples.record_unfinished(self._step, self._collector.unfinished)
            raise
        self._num_host_restarts = self._recovery.num_host_restarts
        return batch

    def _sample(self) -> Collected:
        # Sampling again gives the same samples: a request's seed is made from its key.
        self._state.order = self._state.order.at(self._order_before)
        config = self._settings.config
        return self._collector.collect(
            self._state.order,
            config.rollout.batch_size,
            config.rollout.samples_per_prompt,
            rollout_sampling(config),
            group_filter(config, self._prompts),
        )
