"""Rollout beside training: groups are sampled ahead while the actor learns, within a bound on their age.

The pacer says which groups may begin and which make up the next batch. Hosts sample and score on their own; this stream
hands out jobs and takes facts only while the loop calls it: places become free only when a batch is taken, when weights
were pushed, or when a group is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from hotseat import faults
from hotseat.cluster import WorkerGroup
from hotseat.errors import RunError
from hotseat.loop.rl.collect import MAX_REFILLS, Collected, GroupFilter, too_few_kept
from hotseat.loop.rl.pacer import Awaited, Pace, Pacer
from hotseat.loop.rl.recovery import Recovery
from hotseat.loop.rl.state import RlState
from hotseat.loop.state.run_dir import SPOOL
from hotseat.loop.workers.facts import GroupFacts, GroupKey, Job
from hotseat.loop.workers.rollout_host import RolloutHost, facts_of
from hotseat.loop.workers.spool import Spool
from hotseat.observe import Timeline
from hotseat.rewards import RewardTally
from hotseat.types import Failed, Prompt, Sampling

InFlight = Literal["wait", "keep", "recompute", "restart"]

FETCH_WAIT_S = 5.0  # longest wait for groups before the hosts are checked again
T = TypeVar("T")


@dataclass(frozen=True)
class Asking:
    """The work of the hosts: prompts, how often and how each is answered, and which groups are kept."""

    prompts: Sequence[Prompt]
    num_samples: int
    sampling: Sampling
    group_filter: GroupFilter


@dataclass
class _Window:
    """Groups that have come since the last batch was taken: how many, which were dropped, and failed rewards."""

    tally: RewardTally
    arrived: list[tuple[GroupKey, str | None]]  # groups, and why they were dropped, if they were
    dropped: list[tuple[GroupFacts, str]]

    @classmethod
    def empty(cls, group_filter: GroupFilter) -> _Window:
        return cls(RewardTally(group_filter.max_failed_fraction), [], [])

    @property
    def num_groups(self) -> int:
        return len(self.arrived)

    def add(self, facts: GroupFacts, reason: str | None) -> None:
        """Count a group. `reason`: why it was dropped; None: it was kept."""
        self.tally.add([*(Failed(why) for _, why in facts.failures), *facts.rewards])
        self.arrived.append((facts.key, reason))
        if reason is not None:
            self.dropped.append((facts, reason))


class OverlappedStream:
    """Supplies batches of groups that were sampled while earlier batches were trained.

    in_flight: what a push does with open requests. `wait` lets them finish first; `keep` and `recompute` let them go on
    with the new weights, with or without the keys and values of the old ones; `restart` samples their groups anew.
    sampling: leases devices that engines share with training; between two leases open requests stand still. None: they
    have devices of their own.
    """

    def __init__(
        self,
        pace: Pace,
        asking: Asking,
        in_flight: InFlight,
        hosts: WorkerGroup[RolloutHost],
        spool: Spool,
        state: RlState,
        recovery: Recovery,
        callbacks: Callbacks,
        sampling: Callable[[], AbstractContextManager[None]] | None = None,
    ):
        self._pacer = Pacer(pace)
        self._asking = asking
        self._in_flight = in_flight
        self._hosts = hosts
        self._spool = spool
        self._state = state
        self._recovery = recovery
        self._callbacks = callbacks
        self._is_shared = sampling is not None
        self._sampling = sampling or nullcontext
        self._keys: dict[int, GroupKey] = {}  # of tickets in flight or waiting
        self._facts: dict[int, GroupFacts] = {}  # of tickets that wait
        self._unbegun: list[int] = []  # tickets that no host works on yet
        self._num_restarts = 0  # of engines and hosts, when tickets were last begun
        self._num_unscored = 0  # groups that hosts hold for a reward model
        self._window = _Window.empty(asking.group_filter)
        self._metrics: dict[str, float] = {}
        self._num_begun_again = 0
        self._step = 1  # for which the next batch is

    # --- the loop's side ----------------------------------------------------------------------------------------------

    def take(self, step: int) -> Collected:
        """Wait until the groups of the next step are there; begin the ones after them before returning."""
        faults.reach("generation.before")
        started_s = time.monotonic()
        self._step = step
        with self._unfinished_recorded():
            numbers = self._recovery.during(self._sample_batch)
        self._pacer.take(numbers)
        batch = self._collected(numbers)
        self._measure(batch, time.monotonic() - started_s)
        for number in numbers:
            del self._facts[number], self._keys[number]
        self._window = _Window.empty(self._asking.group_filter)
        self._step = step + 1
        self._begin_ahead()
        return batch

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch. Its groups are in the spool, so a host that is replaced has them too."""
        return batch, self._recovery.during(lambda: use(batch))

    def release(self, batch: Collected) -> None:
        """Drop the groups of a batch."""
        keys = [facts.key for facts in (*batch.groups, *(facts for facts, _ in batch.dropped))]
        self._recovery.during(lambda: self._hosts.call(RolloutHost.forget, keys))
        self._recovery.start_counting()

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """Bring open requests over a push, as the config says; afterwards count the batch in training as trained."""
        started_s = time.monotonic()
        if self._in_flight == "wait":
            with self._unfinished_recorded():
                self._recovery.during(self._drain)
        elif self._in_flight == "restart":
            self._recovery.during(self._callbacks.reconnect)
        self._metrics["time/drain"] = time.monotonic() - started_s
        self._callbacks.pause_timeline()
        yield
        self._callbacks.resume_timeline()
        self._pacer.trained()
        assert self._pacer.version == self._state.version, "the pacer counts other versions than the engines serve"
        if self._in_flight == "restart":
            self._begin_again()
        self._begin_ahead()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the weights that engines serve."""
        return self._callbacks.evaluate()

    def metrics(self) -> dict[str, float]:
        """Return the age of the batch in training, how many groups wait or are in flight, and seconds of waiting."""
        return dict(self._metrics)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the pacer, the prompts of its tickets, and what has come since the last batch, as JSON."""
        return {
            "pacer": self._pacer.state(),
            "keys": [[number, *key] for number, key in self._keys.items()],
            "window": [[*key, reason] for key, reason in self._window.arrived],
        }

    def save(self, folder: Path) -> None:
        """Put the groups that wait for training, and those whose drop is not recorded yet, into a checkpoint."""
        dropped = [facts.key for facts, _ in self._window.dropped]
        self._spool.link_into(folder / SPOOL, [*(self._keys[number] for number in self._facts), *dropped])

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Continue from a checkpoint: groups that waited wait again, those that were in flight begin again."""
        self._spool.restore(folder / SPOOL)
        if state is None:  # of a run that did not overlap until then
            self._pacer = replace(self._pacer, version=step, num_trained=step * self._pacer.pace.groups_per_step)
            return
        pace = self._pacer.pace
        self._pacer = replace(Pacer.restored(pace, state["pacer"]), num_trained=step * pace.groups_per_step)
        if not self._pacer.can_keep_bound():
            raise RunError(
                f"{folder} holds {len(state['keys'])} groups that were sampled ahead of training, more or older ones"
                f" than overlap.staleness {pace.staleness} and rollout.batch_size {pace.groups_per_step} allow: resume"
                " with those that it was saved with"
            )
        self._keys = {number: (epoch, prompt) for number, epoch, prompt in state["keys"]}
        waiting = self._keys.keys() - set(self._pacer.in_flight)
        self._facts = {number: self._spooled(self._keys[number]) for number in waiting}
        for epoch, prompt, reason in state["window"]:
            self._window.add(self._spooled((epoch, prompt)), reason)
        self._begin_again()

    def _spooled(self, key: GroupKey) -> GroupFacts:
        finished = self._spool.get(key)
        assert finished is not None, f"the checkpoint lacks group {key}"
        return facts_of(finished)

    # --- tickets ------------------------------------------------------------------------------------------------------

    def _sample_batch(self) -> tuple[int, ...]:
        """Have groups sampled until there is a batch."""
        while True:
            with self._sampling():
                self._exchange(wait_s=None)
                while not self._is_scoring_due:
                    chosen = self._pacer.batch()
                    if not isinstance(chosen, Awaited):
                        return chosen
                    assert chosen.numbers, "no batch, and nothing in flight that could make up one"
                    self._exchange(FETCH_WAIT_S)
            self._score()

    @contextmanager
    def _unfinished_recorded(self) -> Iterator[None]:
        """If the run stops meanwhile, record what became of the samples that no step has learned from."""
        try:
            yield
        except RunError:
            self._callbacks.record_unfinished(self._step, self._collected(sorted(self._facts)))
            raise

    def _drain(self) -> None:
        """Wait until nothing is in flight, and nothing more may begin: dropped groups are replaced first."""
        self._exchange(wait_s=None)
        while self._pacer.num_in_flight:
            if self._is_scoring_due:
                self._score()
            else:
                self._exchange(FETCH_WAIT_S)
            self._exchange(wait_s=None)

    def _begin_ahead(self) -> None:
        """Begin what may begin while the loop does something else. On shared devices that waits for their lease."""
        if not self._is_shared:
            self._recovery.during(lambda: self._exchange(wait_s=None))

    def _exchange(self, wait_s: float | None) -> None:
        """Begin every ticket that may begin; with `wait_s`, wait that long for a group to finish."""
        new = self._pacer.admit()
        self._keys |= dict(zip(new, self._state.order.next(len(new)), strict=True))
        self._unbegun += new
        num_restarts = self._recovery.num_restarts + self._recovery.num_host_restarts
        if num_restarts != self._num_restarts:  # whatever was open then is lost
            self._begin_again()
            self._num_restarts = num_restarts
        if self._unbegun:
            jobs = [self._job(number) for number in self._unbegun]
            [started] = self._hosts.call(RolloutHost.begin, jobs, self._asking.sampling)
            self._pacer.begin_again([number for number in self._unbegun if self._keys[number] in started])
            self._unbegun = []
        if wait_s is None:
            return
        [(facts, self._num_unscored)] = self._hosts.call(RolloutHost.fetch, wait_s)
        for group in facts:
            self._arrive(group)

    @property
    def _is_scoring_due(self) -> bool:
        """Tell whether a reward model has to score: what waits for it makes up a batch, or is all that is in flight."""
        if self._num_unscored == 0:
            return False
        is_batch = self._pacer.num_waiting + self._num_unscored >= self._pacer.pace.groups_per_step
        return is_batch or self._num_unscored >= self._pacer.num_in_flight

    def _score(self) -> None:
        self._num_unscored = 0
        for group in self._callbacks.score():
            self._arrive(group)

    def _begin_again(self) -> None:
        """Have every ticket in flight begun once more, by the weights that are served then."""
        self._num_begun_again += len(self._pacer.in_flight) - len(self._unbegun)
        self._unbegun = self._pacer.in_flight

    def _job(self, number: int) -> Job:
        epoch, prompt = self._keys[number]
        return Job(self._asking.prompts[prompt], epoch, self._asking.num_samples)

    def _arrive(self, facts: GroupFacts) -> None:
        number = next(number for number, key in self._keys.items() if key == facts.key)
        window = self._window
        reason = self._asking.group_filter.reason_to_drop(facts)
        window.add(facts, reason)
        if reason is None:
            self._pacer.arrive(number)
            self._facts[number] = facts
        else:
            self._pacer.drop(number)
            del self._keys[number]
        pace = self._pacer.pace
        if window.num_groups >= pace.groups_per_step:
            window.tally.check()
        most = pace.groups_per_step * (1 + pace.staleness)
        if len(window.dropped) >= MAX_REFILLS * most:
            raise too_few_kept(window.num_groups, len(self._facts), most, [why for _, why in window.dropped])

    def _collected(self, numbers: Sequence[int]) -> Collected:
        window = self._window
        groups = tuple(self._facts[number] for number in numbers)
        return Collected(groups, window.num_groups, tuple(window.dropped), window.tally.num_failed)

    def _measure(self, batch: Collected, waited_s: float) -> None:
        ages = [self._pacer.version - oldest for facts in batch.groups for oldest, _ in facts.versions]
        self._metrics = {
            "staleness": sum(ages) / len(ages),
            "staleness_max": float(max(ages)),
            "groups_waiting": float(self._pacer.num_waiting),
            "groups_in_flight": float(self._pacer.num_in_flight),
            "groups_begun_again": float(self._num_begun_again),
            "time/wait": waited_s,
        }


@dataclass(frozen=True)
class Callbacks:
    """Functions that an overlapped stream calls, besides the methods of hosts."""

    evaluate: Callable[[], dict[str, float]]  # of the weights that are served
    score: Callable[[], list[GroupFacts]]  # by the reward model, what hosts hold for it
    reconnect: Callable[[], object]  # hosts to engines, which ends every open request
    record_unfinished: Callable[[int, Collected], object]  # of a step in which the run stops
    pause_timeline: Callable[[], object]
    resume_timeline: Callable[[], object]


class RolloutSpans:
    """Draws the engines' devices as busy with rollout, between one push and the next."""

    def __init__(self, timeline: Timeline, devices: Sequence[int]):
        self._timeline = timeline
        self._devices = devices
        self._since_s = time.time()

    def pause(self) -> None:
        """Draw the time since the last push."""
        for device in self._devices:
            self._timeline.span("devices", f"device {device}", "rollout", self._since_s, time.time(), turn="rollout")

    def resume(self) -> None:
        """Begin the next span."""
        self._since_s = time.time()
