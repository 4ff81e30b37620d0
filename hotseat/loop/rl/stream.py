"""Sources of the groups that each step learns from: sampled on demand here, or read from a recorded run.

`overlapped.py` has the third source: groups that were sampled ahead of training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from hotseat import faults
from hotseat.errors import RunError, UserError
from hotseat.loop.rl.arrivals import Arrivals, recorded_batches
from hotseat.loop.rl.collect import MAX_REFILLS, Collected, add_rewards, too_few_kept
from hotseat.loop.rl.groups import RolloutHosts
from hotseat.loop.rl.recovery import HOST
from hotseat.loop.rl.rollout import RolloutRunner, group_filter
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import RlState
from hotseat.loop.settings.rollout_settings import rollout_sampling
from hotseat.loop.state.run_dir import ARRIVALS, ROLLOUTS
from hotseat.loop.workers.group_facts import GivenUp, GroupFacts, GroupKey, Job
from hotseat.loop.workers.spool import Spool
from hotseat.rewards import RewardTally
from hotseat.types import Prompt

T = TypeVar("T")
NOTHING = Collected((), 0, (), 0)


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

    def weight_update(self) -> AbstractContextManager[None]:
        """Guard a push: no request may be answered by two versions of the weights unless the config allows it."""
        return nullcontext()

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


@dataclass(eq=False)
class SynchronousStream(Stream):
    """Samples the groups of a step on demand, and again if they were lost with their host.

    No request is open during an update or a push.
    """

    runner: RolloutRunner
    run_state: RlState
    samples: SampleLog
    prompts: Sequence[Prompt]
    arrivals: Arrivals
    _step: int = field(default=0, init=False)  # that is sampled now, or was last
    _order_before: dict[str, Any] = field(default_factory=dict, init=False)  # state of the prompts' order before it
    _num_host_restarts: int = field(default=0, init=False)  # when its batch was complete: more since have lost groups
    _unfinished: Collected = field(default=NOTHING, init=False)  # its groups so far

    def take(self, step: int) -> Collected:
        """Sample and score the groups of a step. If that stops the run, record what became of its samples."""
        faults.reach("generation.before")
        self._order_before, self._step = self.run_state.order.state(), step
        batch = self._sample_until_done()
        self.arrivals.taken(step, batch)
        return batch

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch that was sampled last; if hosts lost it, sample it again first."""

        def work() -> tuple[Collected, T]:
            nonlocal batch
            if self.runner.recovery.restarts[HOST] > self._num_host_restarts:
                batch = self._sample_until_done() if not batch.given_up else self._sample_again(batch)
            return batch, use(batch)

        return self.runner.recovery.during(work)

    def release(self, batch: Collected) -> None:
        """Let the hosts drop the groups of a batch; the order of prompts gets their scores."""
        groups = batch.all_groups
        self.run_state.order.record({facts.prompt: fmean(facts.scores) for facts in groups if facts.scores})
        keys = [facts.key for facts in groups] + [each.key for each in batch.given_up]
        self.runner.recovery.during(lambda: self.runner.groups.hosts.forget(keys))
        self.runner.recovery.start_counting()

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Refuse groups that were sampled ahead: they would be lost."""
        if state is not None and state["tickets"]:
            raise RunError(
                f"{folder} holds {len(state['tickets'])} groups that were sampled ahead of training, and"
                " overlap.staleness is 0 now: resume with the overlap that it was saved with"
            )
        self.arrivals.restored(step, None)

    def _sample_until_done(self) -> Collected:
        try:
            batch = self.runner.recovery.during(self._sample)
        except RunError:
            self.samples.record_unfinished(self._step, self._unfinished)
            raise
        self._num_host_restarts = self.runner.recovery.restarts[HOST]
        return batch

    def _sample_again(self, batch: Collected) -> Collected:
        """Sample the groups of a batch again: the same ones, whichever would be complete first this time."""
        config = self.runner.settings.config
        keys = [facts.key for facts in batch.all_groups]
        jobs = [Job(self.prompts[index], epoch, config.rollout.samples_per_prompt) for epoch, index in keys]

        def answer() -> list[GroupFacts]:
            return self.runner.answer(jobs, rollout_sampling(config))

        again = {facts.key: facts for facts in self.runner.recovery.during(answer)}
        self._num_host_restarts = self.runner.recovery.restarts[HOST]
        dropped = tuple((again[facts.key], reason) for facts, reason in batch.dropped)
        return replace(batch, groups=tuple(again[facts.key] for facts in batch.groups), dropped=dropped)

    def _given_up(self, jobs: Sequence[Job], answered: Sequence[GroupFacts]) -> list[GivenUp]:
        """Return the jobs that were not waited for, each with what its host reports, if that is still alive."""
        keys = {facts.key for facts in answered}
        rest = [job for job in jobs if job.key not in keys]
        known = {each.key: each for each in self.runner.groups.hosts.given_up()} if rest else {}
        return [known.get(job.key, GivenUp(*job.key, job.num_samples)) for job in rest]

    def _sample(self) -> Collected:
        """Sample prompts in order until enough groups are kept: the next prompts replace dropped groups.

        With `rollout.oversample` there are more prompts than needed, and the groups that are complete first stay.
        """
        # Sampling again gives the same samples: a request's seed is made from its key.
        self.run_state.order = self.run_state.order.at(self._order_before)
        config = self.runner.settings.config
        num_groups, keep = config.rollout.batch_size, group_filter(config, self.prompts)
        kept: list[GroupFacts] = []
        dropped: list[tuple[GroupFacts, str]] = []
        tally = RewardTally(keep.max_failed_fraction, keep.hint)
        self._unfinished = NOTHING
        given_up: list[GivenUp] = []
        for _ in range(MAX_REFILLS):
            num_needed = num_groups - len(kept)
            keys = self.run_state.order.next(num_needed + math.ceil(num_needed * config.rollout.oversample))
            jobs = [Job(self.prompts[index], epoch, config.rollout.samples_per_prompt) for epoch, index in keys]
            answered = self.runner.answer(jobs, rollout_sampling(config), num_needed)
            given_up += self._given_up(jobs, answered)
            for facts in answered:
                add_rewards(tally, facts)
                reason = keep.reason_to_drop(facts)
                if reason is None:
                    kept.append(facts)
                else:
                    dropped.append((facts, reason))
            num_generated = len(kept) + len(dropped)
            self._unfinished = Collected(tuple(kept), num_generated, tuple(dropped), tally.num_failed, tuple(given_up))
            tally.check()
            if len(kept) == num_groups:
                return self._unfinished
        raise too_few_kept(num_generated, len(kept), num_groups, [reason for _, reason in dropped])


class Recording:
    """The batches of a recorded run whose groups were kept: those of the steps after `start`, without a gap."""

    def __init__(self, run_dir: Path, start: int = 0, end: int | None = None):
        """Find the batches of the steps after `start` up to `end`, all of which must be there.

        end: None is as many as there are, but one at least.
        """
        if not (run_dir / ARRIVALS).is_file() or not (run_dir / ROLLOUTS).is_dir():
            raise UserError(
                f"{run_dir} cannot be replayed: it has no {ARRIVALS} or no {ROLLOUTS}; only runs with"
                " log.keep_rollouts keep what they learned from"
            )
        self.folder = run_dir / ROLLOUTS
        self._spool = Spool(self.folder)
        self._batches = recorded_batches(run_dir)
        self.last_step = start
        while self.last_step != end and self._is_kept(self._batches.get(self.last_step + 1)):
            self.last_step += 1
        if self.last_step < (start + 1 if end is None else end):
            which = "its first step" if self.last_step == 0 else f"step {self.last_step + 1}"
            raise UserError(f"{run_dir} cannot be replayed: the groups of {which} are not in {self.folder}")

    def batch(self, step: int) -> Collected:
        line = self._batches[step]
        return Collected(
            tuple(self._facts((epoch, prompt)) for epoch, prompt in line["groups"]),
            line["num_generated"],
            tuple((self._facts((epoch, prompt)), reason) for epoch, prompt, reason in line["dropped"]),
            line["num_failed"],
        )

    def _is_kept(self, batch: Mapping[str, Any] | None) -> bool:
        keys = [] if batch is None else [(each[0], each[1]) for each in (*batch["groups"], *batch["dropped"])]
        return bool(keys) and all(self._spool.has(key) for key in keys)

    def _facts(self, key: GroupKey) -> GroupFacts:
        finished = self._spool.get(key)
        assert finished is not None, f"{self.folder} lacks group {key}"
        return finished.facts()


class ReplayStream(Stream):
    """Supplies the batches of a recording. Nothing is sampled to learn from."""

    def __init__(self, recording: Recording, hosts: RolloutHosts):
        self._recording = recording
        self._hosts = hosts

    def take(self, step: int) -> Collected:
        return self._recording.batch(step)

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch, whose groups hosts read from the recording."""
        return batch, use(batch)

    def release(self, batch: Collected) -> None:
        """Let hosts drop a batch from memory; the recording keeps it."""
        self._hosts.forget([facts.key for facts in batch.groups])

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Do nothing: the recording has a batch for each step, and no group waits."""
