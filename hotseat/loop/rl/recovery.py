"""Replaces engines and rollout hosts that die, and the judge's engines, and repeats what they were doing.

None holds state: an engine's weights are the trainer's, and a sample that is requested again from the same
weights comes out the same. So a synchronous run continues bit for bit as if nothing had happened, unless processes
die faster than rollouts finish.

A host sends the requests of a dead engine to the others. The replacement gets requests once it has proved that it holds
the weights; if it shares devices, only in the next lease of the rollout, because a push leaves it without its KV cache.
What a dead host had open begins again, with the weights of that moment.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hotseat.cluster import WorkerGroup, reports_death
from hotseat.deaths import who_died
from hotseat.errors import ClusterError, RunError, WorkerError
from hotseat.loop.devices.scheduler import DeviceScheduler

MAX_DEATHS = 5  # between two rollouts that succeed; processes that die at the same time count once
DYING_S = 5.0  # longest time between the report of a death and the end of the process

T = TypeVar("T")


ENGINE, HOST = "engine", "rollout host"  # what messages and counts call a process that is replaced


@dataclass(frozen=True)
class Replaceable:
    """A role whose dead processes are replaced by new ones.

    noun: what messages call a process. connect: called with the ranks of new processes before work is repeated.
    needs_weights: new processes need the current weights, and then to rejoin.
    measures_its_device: a starting process takes a share of the free memory that it measures, so other roles offload.
    """

    group: WorkerGroup[Any]
    noun: str
    connect: Callable[[Sequence[int]], object] = lambda ranks: None
    needs_weights: bool = False
    measures_its_device: bool = False


@dataclass(eq=False)
class Recovery:
    """Runs work that needs engines and hosts; if some die meanwhile, replaces them and runs it again.

    push: sends the current weights to engines of these ranks, and proves that they arrived. rejoin: has hosts send
    requests to them. rejoins_in_lease: new engines rejoin when `use_new_engines` is called, which is in a lease of the
    rollout; otherwise as soon as they have the weights. restarts: how many processes were replaced, by their noun.
    num_given_up: counts the episodes that are not played any more since hosts died of them; such deaths come to an end.
    """

    roles: Sequence[Replaceable]
    scheduler: DeviceScheduler
    push: Callable[[Sequence[int]], object]
    rejoin: Callable[[Sequence[int]], object]
    say: Callable[[str], object]
    rejoins_in_lease: bool = False
    restarts: Counter[str] = field(default_factory=Counter)
    num_given_up: Callable[[], int] = lambda: 0
    _new_engines: set[int] = field(default_factory=set, init=False)  # replaced, and not in use yet
    # By noun, of other roles: replaced, and not connected yet.
    _new: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set), init=False)
    _num_deaths: int = field(default=0, init=False)
    _num_given_up: int = field(default=0, init=False)

    def start_counting(self) -> None:
        """Count deaths from 0 again, since a rollout succeeded."""
        self._num_deaths = 0

    def during(self, work: Callable[[], T], *, is_push: bool = False) -> T:
        """Return the result of `work`, which must be repeatable. `is_push`: it sends the weights itself."""
        while True:
            try:
                result = work()
                if not self.rejoins_in_lease:
                    self.use_new_engines()
                return result
            except ClusterError:
                raise  # without a cluster nothing can be replaced
            except RunError as error:
                self._replace_dead(error, needs_push=not is_push)

    def use_new_engines(self) -> None:
        """Have hosts send requests to engines that were replaced and have the weights."""
        if self._new_engines:
            self.rejoin(sorted(self._new_engines))
            self._new_engines.clear()

    def _find_dead(self, error: RunError) -> list[tuple[Replaceable, list[int]]]:
        """Return the roles with dead processes, and their ranks. A death may be reported before the process is gone."""
        death, _ = who_died(error)
        is_ours = reports_death(error) and (death is None or death in {role.group.name for role in self.roles})
        until = time.monotonic() + (DYING_S if is_ours else 0.0)
        while True:
            dead = [(role, ranks) for role in self.roles if (ranks := _dead(role.group))]
            if dead or time.monotonic() >= until:
                return dead
            time.sleep(0.05)

    def _replace_dead(self, error: RunError, needs_push: bool) -> None:
        """Replace the dead until all are alive and have their weights. Raises if none has died, or too many have."""
        while True:
            dead = self._find_dead(error)
            if not dead:
                raise error
            num_given_up = self.num_given_up()
            if num_given_up > self._num_given_up:
                self._num_given_up = num_given_up
                self.start_counting()
            self._num_deaths += 1
            if self._num_deaths > MAX_DEATHS:
                raise WorkerError(
                    f"engines or rollout hosts died {self._num_deaths} times without a finished rollout in between;"
                    f" the last: {error}"
                ) from error
            try:
                for role, ranks in dead:
                    for rank in ranks:
                        self._replace(role, rank, error)
                self._connect(needs_push)
                return
            except ClusterError:
                raise
            except RunError as another:
                error = another

    def _replace(self, role: Replaceable, rank: int, error: RunError) -> None:
        self.say(f"{role.noun} {rank} died and is replaced ({_first_line(error)})")
        self.restarts[role.noun] += 1
        if role.measures_its_device:
            self.scheduler.make_way(role.group.name, rank)
        role.group.restart(rank)
        self.scheduler.replaced(role.group.name, rank)
        (self._new_engines if role.needs_weights else self._new[role.noun]).add(rank)

    def _connect(self, needs_push: bool) -> None:
        for role in self.roles:
            if self._new[role.noun]:
                role.connect(sorted(self._new[role.noun]))
                self._new[role.noun].clear()
        if needs_push and self._new_engines:
            self.push(sorted(self._new_engines))
            if not self.rejoins_in_lease:
                self.use_new_engines()


def start_up(group: WorkerGroup[Any], say: Callable[[str], object]) -> None:
    """Wait until a group that holds no state is ready. A process that dies while it starts is started again."""

    def restart() -> None:
        for rank in _dead(group):
            group.restart(rank)

    start = group.ready
    for _ in range(MAX_DEATHS):
        try:
            start()
            return
        except RunError as error:
            if not reports_death(error):
                raise
            say(f"{group.name} died while it started, and is started again ({_first_line(error)})")
            start = restart
    start()


def _dead(group: WorkerGroup[Any]) -> list[int]:
    return [rank for rank, is_alive in enumerate(group.alive()) if not is_alive]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
