"""Rollout beside training: groups are sampled ahead while the actor learns, within a bound on their age.

The pacer says which groups may begin and which make up the next batch. Hosts sample and score on their own; this stream
hands out jobs and takes facts only while the loop calls it: places become free only when a batch is taken, when weights
were pushed, or when a group is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hotseat import faults
from hotseat.errors import RunError
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.recovery import ENGINE, HOST
from hotseat.loop.rl.rollout import RolloutRunner
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.stream import Stream
from hotseat.loop.rl.tickets import Tickets
from hotseat.loop.settings.rollout_settings import rollout_sampling
from hotseat.loop.state.run_dir import SPOOL
from hotseat.loop.workers.group_facts import GroupFacts, GroupKey, Job
from hotseat.loop.workers.spool import Spool
from hotseat.types import Prompt

FETCH_WAIT_S = 5.0  # longest wait for groups before the hosts are checked again
T = TypeVar("T")


@dataclass(eq=False)
class OverlappedStream(Stream):
    """Supplies batches of groups that were sampled while earlier batches were trained.

    `overlap.in_flight` says what a push does with open requests. `wait` lets them finish first; `keep` and `recompute`
    continue them with the new weights, with or without the KV cache of the old ones; `restart` samples their groups
    anew. Where engines share devices with training, open requests stand still between two leases.

    draw_rollout: draws the rollout in the timeline, from the time that it gets until now.
    """

    tickets: Tickets
    prompts: Sequence[Prompt]
    runner: RolloutRunner
    samples: SampleLog
    spool: Spool
    draw_rollout: Callable[[float], object]
    _num_restarts: int = field(default=0, init=False)  # of engines and hosts, when tickets were last begun
    _num_unscored: int = field(default=0, init=False)  # groups that hosts hold for a reward model
    _num_sent_again: int = field(default=0, init=False)  # requests of engines that died
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    _step: int = field(default=1, init=False)  # for which the next batch is
    _pushed_s: float = field(default_factory=time.time, init=False)

    # --- the loop's side ----------------------------------------------------------------------------------------------

    def take(self, step: int) -> Collected:
        """Wait until the groups of the next step are there; begin the ones after them before returning."""
        faults.reach("generation.before")
        started_s = time.monotonic()
        self._step = step
        with self._unfinished_recorded():
            self.runner.recovery.during(self._sample_batch)
        batch = self.tickets.take(step)
        self._measure(batch, time.monotonic() - started_s)
        self._step = step + 1
        self._begin_ahead()
        return batch

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch. Its groups are in the spool, so a host that is replaced has them too."""
        return batch, self.runner.recovery.during(lambda: use(batch))

    def release(self, batch: Collected) -> None:
        keys = [facts.key for facts in batch.all_groups]
        self.runner.recovery.during(lambda: self.runner.groups.hosts.forget(keys))
        self.runner.recovery.start_counting()

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Finish, restart or keep open requests over a push, as the config says; then count the batch as trained."""
        started_s, in_flight = time.monotonic(), self.runner.settings.config.overlap.in_flight
        if in_flight == "wait":
            with self._unfinished_recorded():
                self.runner.recovery.during(self._drain)
        elif in_flight == "restart":
            self.runner.recovery.during(self.runner.groups.reconnect)
        self._metrics["time/drain"] = time.monotonic() - started_s
        if not self.runner.carries_over:  # otherwise the scheduler draws each lease of the rollout
            self.draw_rollout(self._pushed_s)
        yield
        self._pushed_s = time.time()
        self.tickets.trained()
        if in_flight == "restart":
            self.tickets.begin_again()
        self._begin_ahead()

    def metrics(self) -> dict[str, float]:
        """Return the age of the batch in training, how many groups wait or are in flight, and seconds of waiting."""
        return dict(self._metrics)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return which groups are in flight and which wait, as JSON."""
        return self.tickets.state()

    def save(self, folder: Path) -> None:
        """Put finished groups that no step has learned from into a checkpoint."""
        self.spool.link_into(folder / SPOOL, self.tickets.finished_keys)

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Continue from a checkpoint: groups that waited wait again, those that were in flight begin again."""
        self._num_unscored = self._num_sent_again = 0
        self.spool.restore(folder / SPOOL)
        self.tickets.restore(state, step, self._spooled)

    def _spooled(self, key: GroupKey) -> GroupFacts:
        finished = self.spool.get(key)
        assert finished is not None, f"the checkpoint lacks group {key}"
        return finished.facts()

    # --- hosts --------------------------------------------------------------------------------------------------------

    def _sample_batch(self) -> None:
        while True:
            with self.runner.sampling() if self.runner.carries_over else nullcontext():
                # Before asking what is awaited: the group that was dropped may have been the last in flight.
                self._begin()
                while not self._is_scoring_due:
                    num_awaited = self.tickets.num_awaited
                    if num_awaited == 0:
                        return
                    self._fetch(num_awaited)
                    self._begin()
            self._score()

    @contextmanager
    def _unfinished_recorded(self) -> Iterator[None]:
        """If the run stops meanwhile, record what became of the samples that no step has learned from."""
        try:
            yield
        except RunError:
            self.samples.record_unfinished(self._step, self.tickets.unfinished())
            raise

    def _drain(self) -> None:
        """Wait until nothing is in flight, and nothing more may begin: dropped groups are replaced first."""
        self._begin()
        while self.tickets.pacer.in_flight:
            if self._is_scoring_due:
                self._score()
            else:
                self._fetch(len(self.tickets.pacer.in_flight))
            self._begin()

    def _begin_ahead(self) -> None:
        """Begin jobs that run while the loop does something else; on shared devices they wait for the next lease."""
        if not self.runner.carries_over:
            self.runner.recovery.during(self._begin)

    def _begin(self) -> None:
        num_restarts = self.runner.recovery.restarts[ENGINE] + self.runner.recovery.restarts[HOST]
        if num_restarts != self._num_restarts:  # a host that was replaced has lost what was open
            self.tickets.begin_again()
            self._num_restarts = num_restarts
        config, keys = self.runner.settings.config, self.tickets.admit()
        jobs = [Job(self.prompts[prompt], epoch, config.rollout.samples_per_prompt) for epoch, prompt in keys]
        for taken, sampled in self.runner.groups.hosts.begin(jobs, rollout_sampling(config)):
            self.tickets.begin(taken, sampled)

    def _fetch(self, num_groups: int) -> None:
        """Wait for so many groups; for one if groups may be dropped, so that no place stays empty."""
        at_least = 1 if self.tickets.is_filtered else max(1, num_groups - self._num_unscored)
        self._num_unscored = self._num_sent_again = 0
        # On shared devices an engine is replaced between two leases, in which the others pause.
        reports_deaths = not self.runner.carries_over
        for fetched in self.runner.groups.hosts.fetch(FETCH_WAIT_S, at_least, reports_deaths=reports_deaths):
            self._num_unscored += fetched.num_unscored
            self._num_sent_again += fetched.num_sent_again
            self.tickets.arrive(fetched.facts)

    @property
    def _is_scoring_due(self) -> bool:
        """Tell whether a reward model has to score: groups that wait for it complete a batch, or all in flight do."""
        if self._num_unscored == 0:
            return False
        pacer = self.tickets.pacer
        is_batch = len(pacer.waiting) + self._num_unscored >= pacer.pace.groups_per_step
        return is_batch or self._num_unscored >= len(pacer.in_flight)

    def _score(self) -> None:
        groups = self.runner.score()
        self._num_unscored = 0  # not before: if a host dies meanwhile, groups of the others still wait to be scored
        self.tickets.arrive(groups)

    def _measure(self, batch: Collected, waited_s: float) -> None:
        pacer = self.tickets.pacer
        ages = [pacer.version - oldest for facts in batch.groups for oldest, _ in facts.versions]
        assert min(ages) >= 0, "a sample is of weights that are not trained yet"
        assert max(ages) <= pacer.pace.staleness, "a sample is older than overlap.staleness allows"
        self._metrics = {
            "staleness": sum(ages) / len(ages),
            "staleness_max": float(max(ages)),
            "groups_waiting": float(len(pacer.waiting)),
            "groups_in_flight": float(len(pacer.in_flight)),
            "groups_begun_again": float(self.tickets.num_begun_again),
            "requests_sent_again": float(self._num_sent_again),
            "time/wait": waited_s,
        }
