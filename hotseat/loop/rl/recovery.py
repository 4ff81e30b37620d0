"""Engines and agent hosts that die are replaced, and what they were doing is done again.

Neither holds anything that is not elsewhere: an engine's weights are the trainer's, and a sample that is asked for
again comes out the same. So a run goes on, bit for bit as if nothing had happened, unless they die faster than rollouts
are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from hotseat.cluster import WorkerGroup
from hotseat.errors import ClusterError, RunError, WorkerError
from hotseat.loop.devices.scheduler import DeviceScheduler

MAX_DEATHS = 5  # between two rollouts that succeed; those that die at the same time count once
DYING_S = 5.0

T = TypeVar("T")


class Recovery:
    """Runs what needs engines and hosts, replaces those that die meanwhile, and runs it again.

    reconnect: tells the hosts of the engines' processes. push: brings the current weights to all engines.
    measures_its_device: an engine that starts takes a share of what it finds free, so others make way for it.
    """

    def __init__(
        self,
        engines: WorkerGroup[Any],
        hosts: WorkerGroup[Any],
        scheduler: DeviceScheduler,
        *,
        reconnect: Callable[[], object],
        push: Callable[[], object],
        say: Callable[[str], object],
        measures_its_device: bool = False,
    ):
        self._engines = engines
        self._hosts = hosts
        self._scheduler = scheduler
        self._reconnect = reconnect
        self._push = push
        self._say = say
        self._measures_its_device = measures_its_device
        self._num_deaths = 0
        self.num_restarts = 0  # of engines
        self.num_host_restarts = 0

    def start_counting(self) -> None:
        """A rollout was made: whatever killed some has not killed all."""
        self._num_deaths = 0

    def during(self, work: Callable[[], T], *, is_push: bool = False) -> T:
        """The result of `work`, which must be something that can be done again. `is_push`: it brings the weights."""
        while True:
            try:
                return work()
            except ClusterError:
                raise  # nobody can be replaced
            except RunError as error:
                self._replace_dead(error, needs_push=not is_push)

    def _find_dead(self, error: RunError) -> tuple[list[int], list[int]]:
        """Engines and hosts. The news of a death may come before the process is gone."""
        until = time.monotonic() + (DYING_S if tells_of_death(error) else 0.0)
        while True:
            found = _dead(self._engines), _dead(self._hosts)
            if any(found) or time.monotonic() >= until:
                return found
            time.sleep(0.05)

    def _replace_dead(self, error: RunError, needs_push: bool) -> None:
        """Until all are alive and have their weights. Raises the error if none has died, or too many have."""
        owes_push = False
        while True:
            dead_engines, dead_hosts = self._find_dead(error)
            if not dead_engines and not dead_hosts:
                raise error
            self._num_deaths += 1
            if self._num_deaths > MAX_DEATHS:
                raise WorkerError(
                    f"engines or agent hosts died {self._num_deaths} times and no rollout came to its end in between;"
                    f" the last: {error}"
                ) from error
            owes_push = owes_push or bool(dead_engines)
            try:
                for rank in dead_engines:
                    self._say(f"engine {rank} died and is replaced ({_first_line(error)})")
                    self.num_restarts += 1
                    if self._measures_its_device:
                        self._scheduler.make_way("rollout", rank)
                    self._engines.restart(rank)
                    self._scheduler.replaced("rollout", rank)
                for rank in dead_hosts:
                    self._say(f"agent host {rank} died and is replaced ({_first_line(error)})")
                    self.num_host_restarts += 1
                    self._hosts.restart(rank)
                self._reconnect()
                if needs_push and owes_push:
                    self._push()
                return
            except ClusterError:
                raise
            except RunError as another:
                error = another


def tells_of_death(error: BaseException | None) -> bool:
    """Whether somebody, here or in a worker, was told that a process died."""
    while error is not None:
        if getattr(error, "is_death", False):
            return True
        error = error.__cause__
    return False


def start_up(group: WorkerGroup[Any], say: Callable[[str], object]) -> None:
    """Wait until a group that holds nothing of value is ready. A process that dies while it starts is started again."""
    start = group.ready
    for _ in range(MAX_DEATHS):
        try:
            start()
            return
        except RunError as error:
            if not tells_of_death(error):
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
