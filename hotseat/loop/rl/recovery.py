"""Replaces engines and rollout hosts that die, and the judge's engines, and repeats what they were doing.

Neither holds state of its own: an engine's weights are the trainer's, and a sample that is requested again from the
same weights comes out the same. So a synchronous run continues bit for bit as if nothing had happened, unless processes
die faster than rollouts finish. A host sends the requests of a dead engine to the others, and to its replacement after
that has proved that it holds the weights, and not before it has a lease if it shares devices: a push leaves it without
its KV cache. What a dead host had open begins again, with the weights of that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from hotseat.cluster import WorkerGroup, reports_death
from hotseat.errors import ClusterError, RunError, WorkerError
from hotseat.loop.devices.scheduler import DeviceScheduler

MAX_DEATHS = 5  # between two rollouts that succeed; processes that die at the same time count once
DYING_S = 5.0  # longest time between the report of a death and the end of the process

T = TypeVar("T")


class Recovery:
    """Runs work that needs engines and hosts; if some die meanwhile, replaces them and runs it again.

    reconnect: connects hosts of these ranks, which are new, to the engines' current processes. push: sends the current
    weights to engines of these ranks, and proves that they arrived. rejoin: has hosts send requests to them.
    rejoins_in_lease: new engines rejoin when `use_new_engines` is called, which is in a lease of the rollout; otherwise
    as soon as they have the weights.
    measures_its_device: a starting engine takes a share of the free memory that it measures, so other roles offload.
    is_env: hosts are the role env, which has devices.
    reconnect_judge: connects all hosts to the current processes of `judge`.
    """

    def __init__(
        self,
        engines: WorkerGroup[Any],
        hosts: WorkerGroup[Any],
        scheduler: DeviceScheduler,
        *,
        reconnect: Callable[[Sequence[int]], object],
        push: Callable[[Sequence[int]], object],
        rejoin: Callable[[Sequence[int]], object],
        say: Callable[[str], object],
        rejoins_in_lease: bool = False,
        measures_its_device: bool = False,
        is_env: bool = False,
        judge: WorkerGroup[Any] | None = None,
        reconnect_judge: Callable[[], object] = lambda: None,
    ):
        self._engines = engines
        self._hosts = hosts
        self._scheduler = scheduler
        self._reconnect = reconnect
        self._push = push
        self._rejoin = rejoin
        self._new_engines: set[int] = set()  # replaced, and not in use yet
        self._say = say
        self._rejoins_in_lease = rejoins_in_lease
        self._measures_its_device = measures_its_device
        self._is_env = is_env
        self._judge = judge
        self._reconnect_judge = reconnect_judge
        self._num_deaths = 0
        self.num_restarts = 0  # of engines
        self.num_host_restarts = 0

    def start_counting(self) -> None:
        """Count deaths from 0 again, since a rollout succeeded."""
        self._num_deaths = 0

    def during(self, work: Callable[[], T], *, is_push: bool = False) -> T:
        """Return the result of `work`, which must be repeatable. `is_push`: it sends the weights itself."""
        while True:
            try:
                result = work()
                if not self._rejoins_in_lease:
                    self.use_new_engines()
                return result
            except ClusterError:
                raise  # without a cluster nothing can be replaced
            except RunError as error:
                self._replace_dead(error, needs_push=not is_push)

    def use_new_engines(self) -> None:
        """Have hosts send requests to engines that were replaced and have the weights."""
        if self._new_engines:
            self._rejoin(sorted(self._new_engines))
            self._new_engines.clear()

    def _find_dead(self, error: RunError) -> tuple[list[int], list[int], list[int]]:
        """Return ranks of dead engines, hosts and judges. A death may be reported before the process is gone."""
        until = time.monotonic() + (DYING_S if reports_death(error) else 0.0)
        while True:
            dead = _dead(self._engines), _dead(self._hosts), [] if self._judge is None else _dead(self._judge)
            if any(dead) or time.monotonic() >= until:
                return dead
            time.sleep(0.05)

    def _replace_dead(self, error: RunError, needs_push: bool) -> None:
        """Replace the dead until all are alive and have their weights. Raises if none has died, or too many have."""
        while True:
            dead_engines, dead_hosts, dead_judges = self._find_dead(error)
            if not dead_engines and not dead_hosts and not dead_judges:
                raise error
            self._num_deaths += 1
            if self._num_deaths > MAX_DEATHS:
                raise WorkerError(
                    f"engines or rollout hosts died {self._num_deaths} times without a finished rollout in between;"
                    f" the last: {error}"
                ) from error
            try:
                for rank in dead_engines:
                    self._say(f"engine {rank} died and is replaced ({_first_line(error)})")
                    self.num_restarts += 1
                    if self._measures_its_device:
                        self._scheduler.make_way("rollout", rank)
                    self._engines.restart(rank)
                    self._scheduler.replaced("rollout", rank)
                    self._new_engines.add(rank)
                for rank in dead_hosts:
                    self._say(f"rollout host {rank} died and is replaced ({_first_line(error)})")
                    self.num_host_restarts += 1
                    self._hosts.restart(rank)
                    if self._is_env:
                        self._scheduler.replaced("env", rank)
                self._replace_judges(dead_judges, error)
                if dead_hosts:
                    self._reconnect(dead_hosts)
                if needs_push and self._new_engines:
                    self._push(sorted(self._new_engines))
                    if not self._rejoins_in_lease:
                        self.use_new_engines()
                return
            except ClusterError:
                raise
            except RunError as another:
                error = another

    def _replace_judges(self, ranks: Sequence[int], error: RunError) -> None:
        for rank in ranks:
            assert self._judge is not None
            self._say(f"judge {rank} died and is replaced ({_first_line(error)})")
            if self._measures_its_device:
                self._scheduler.make_way("judge", rank)
            self._judge.restart(rank)
            self._scheduler.replaced("judge", rank)
        if ranks:
            self._reconnect_judge()


def start_up(group: WorkerGroup[Any], say: Callable[[str], object]) -> None:
    """Wait until a group without state of its own is ready. A process that dies while it starts is started again."""
    start = group.ready
    for _ in range(MAX_DEATHS):
        try:
            start()
            return
        except RunError as error:
            if not reports_death(error):
                raise
            say(f"{group.name} died while it started, and is started again ({_first_line(error)})")
            start = partial(_restart_dead, group)
    start()


def _restart_dead(group: WorkerGroup[Any]) -> None:
    for rank in _dead(group):
        group.restart(rank)


def _dead(group: WorkerGroup[Any]) -> list[int]:
    return [rank for rank, is_alive in enumerate(group.alive()) if not is_alive]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
