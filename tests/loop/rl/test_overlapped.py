"""The stream that samples ahead: whichever groups are dropped, and whenever, every step gets its batch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from phase_fakes import FakeArrivals, facts_of, make_prompts

from hotseat.config import loads
from hotseat.loop.rl.collect import GroupFilter
from hotseat.loop.rl.overlapped import OverlappedStream
from hotseat.loop.rl.pacer import Order, Pace
from hotseat.loop.rl.recovery import HOST
from hotseat.loop.rl.tickets import Tickets
from hotseat.loop.workers.group_facts import Fetched, GroupFacts, GroupKey, Job
from hotseat.loop.workers.spool import Spool
from hotseat.types import Sampling

BATCHES = ("rollout.batch_size=1", "train.batch_size=2")
T = TypeVar("T")


class Schedule:
    """Hosts whose groups finish in random order, are dropped at random, and can be lost with all that was open.

    needs_model: finished groups wait for a reward model. may_work: tells whether engines hold their devices.
    """

    def __init__(self, rng: random.Random, chance_of_drop: float, by_score: bool, needs_model: bool):
        self.rng = rng
        self.version = 0
        self.may_work = True
        self.restarts = Counter()  # as `Recovery` has them
        self.fates: dict[GroupKey, str] = {}
        self._chance_of_drop = chance_of_drop
        self._dropped = [1.0, 1.0] if by_score else [1.0, None]
        self._needs_model = needs_model
        self._open: dict[GroupKey, int] = {}  # the version under which each began
        self._unscored: dict[GroupKey, int] = {}

    # --- RolloutHosts -------------------------------------------------------------------------------------------------

    def begin(self, jobs: Sequence[Job], sampling: Sampling) -> Iterator[tuple[list[GroupKey], list[GroupKey]]]:
        assert self.may_work or not jobs, "a group began without a lease"
        keys = [job.key for job in jobs]
        assert not self.fates.keys() & {*keys}, "a group that is finished began again"
        sampled = [key for key in keys if key not in self._open and key not in self._unscored]
        self._open |= dict.fromkeys(sampled, self.version)
        yield keys, sampled

    def fetch(self, wait_s: float, at_least: int, *, reports_deaths: bool) -> Iterator[Fetched]:
        assert self.may_work, "groups were awaited without a lease"
        assert self._open, "groups were awaited, and none is open"
        assert at_least <= len(self._open), "more groups were awaited than are open"
        finished = self.rng.sample(sorted(self._open), self.rng.randint(at_least, len(self._open)))
        began = {key: self._open.pop(key) for key in finished}
        if self._needs_model:
            self._unscored |= began
            began = {}
        yield Fetched([self._facts(key, version) for key, version in began.items()], len(self._unscored), 0)

    def score(self) -> list[GroupFacts]:
        scored, self._unscored = self._unscored, {}
        return [self._facts(key, version) for key, version in scored.items()]

    def forget(self, keys: Sequence[GroupKey]) -> None:
        self.fates |= dict.fromkeys(keys, "done")

    def lose_open_groups(self) -> None:
        """Replace the host: what was open begins again."""
        self._open.clear()
        self._unscored.clear()
        self.restarts[HOST] += 1

    def _facts(self, key: GroupKey, began: int) -> GroupFacts:
        rewards = self._dropped if self.rng.random() < self._chance_of_drop else [1.0, 0.0]
        facts = facts_of(key, rewards)
        return replace(facts, versions=((began, self.version),) * len(facts.rewards))

    # --- Recovery -----------------------------------------------------------------------------------------------------

    def during(self, work: Callable[[], T]) -> T:
        return work()

    def start_counting(self) -> None: ...

    # --- the lease of shared devices ----------------------------------------------------------------------------------

    @contextmanager
    def lease(self) -> Iterator[None]:
        self.may_work = True
        yield
        self.may_work = False


def play(seed: int, in_flight: str, is_shared: bool, folder: Path, num_steps: int = 6) -> None:
    """Take and train every batch of a run whose hosts follow a random schedule."""
    rng = random.Random(seed)
    per_step, staleness = rng.randint(1, 4), rng.randint(1, 3)
    order: Order = rng.choice(["prompt", "arrival"])
    pace = Pace(per_step, staleness, rng.randint(0, staleness), order, per_step * num_steps)
    by_score = rng.random() < 0.5  # otherwise groups are dropped because samples failed
    hosts = Schedule(rng, rng.choice([0.0, 0.3, 0.6]), by_score, needs_model=rng.random() < 0.3)
    hosts.may_work = not is_shared
    bounds = (0.0, 1.0) if by_score else (None, None)
    keep = GroupFilter(min_samples=2, low=bounds[0], high=bounds[1], max_failed_fraction=1.0)
    prompts = make_prompts(per_step * 2)  # several passes over the data
    keys = iter((epoch, prompt.index) for epoch in range(10_000) for prompt in prompts)
    tickets = Tickets(pace, keep, lambda count: [next(keys) for _ in range(count)], FakeArrivals())
    unused: Any = None
    options = [f"overlap.in_flight={in_flight}", "overlap.staleness=1", "rollout.samples_per_prompt=2"]
    runner: Any = SimpleNamespace(
        groups=SimpleNamespace(hosts=hosts, reconnect=hosts.lose_open_groups),
        settings=SimpleNamespace(config=loads("", [*options, *BATCHES])),
        recovery=hosts,
        score=hosts.score,
        sampling=hosts.lease,
        carries_over=is_shared,
    )
    stream = OverlappedStream(tickets, prompts, runner, unused, Spool(folder), lambda since_s: None)
    trained: list[GroupKey] = []
    for step in range(1, num_steps + 1):
        batch = stream.take(step)
        assert len(batch.groups) == per_step
        trained += [facts.key for facts in batch.groups]
        stream.release(batch)
        if rng.random() < 0.1:
            hosts.lose_open_groups()
        with stream.weight_update():
            hosts.version += 1
    assert len({*trained}) == per_step * num_steps
    assert not tickets.pacer.in_flight
    assert not tickets.pacer.waiting


@pytest.mark.parametrize(
    ("in_flight", "is_shared"),
    # On shared devices open requests go on after a push.
    [("wait", False), ("keep", False), ("restart", False), ("keep", True), ("recompute", True)],
)
def test_every_step_gets_its_batch_whichever_groups_are_dropped(in_flight, is_shared, tmp_path):
    for seed in range(150):
        play(seed, in_flight, is_shared, tmp_path / "spool")
