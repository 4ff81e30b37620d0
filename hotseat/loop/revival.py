"""Engines that die are replaced, and what they were doing is done again.

An engine holds nothing that is not elsewhere: its weights are the trainer's, and a request gives the same tokens when
it is asked again. So a run goes on, bit for bit as if nothing had happened, unless engines die faster than steps are
made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hotseat.cluster.group import Group
from hotseat.errors import RunError, WorkerError
from hotseat.loop.seats import Seats

MAX_DEATHS = 5  # between two rollouts that succeed

T = TypeVar("T")


class Revival:
    """Runs what needs the engines, replaces those that die meanwhile, and runs it again.

    reconnect: tells those who call the engines of their new processes. push: brings the current weights to all of them.
    """

    def __init__(
        self,
        engines: Group,
        seats: Seats,
        *,
        reconnect: Callable[[], object],
        push: Callable[[], object],
        say: Callable[[str], object],
    ):
        self._engines = engines
        self._seats = seats
        self._reconnect = reconnect
        self._push = push
        self._say = say
        self._num_deaths = 0
        self.num_restarts = 0

    def start_counting(self) -> None:
        """The engines have done their work: whatever killed some has not killed all."""
        self._num_deaths = 0

    def during(self, work: Callable[[], T], *, is_push: bool = False) -> T:
        """The result of `work`, which must be something that can be done again. `is_push`: it brings the weights."""
        while True:
            try:
                return work()
            except RunError as error:
                self._replace_dead(error)
                while not is_push:
                    try:
                        self._push()
                        break
                    except RunError as another:
                        self._replace_dead(another)

    def _replace_dead(self, error: RunError) -> None:
        """Raises `error` if no engine has died, or too many have."""
        dead = [rank for rank, is_alive in enumerate(self._engines.alive()) if not is_alive]
        if not dead:
            raise error
        self._num_deaths += len(dead)
        if self._num_deaths > MAX_DEATHS:
            raise WorkerError(
                f"engines died {self._num_deaths} times and no rollout came to its end in between; the last: {error}"
            ) from error
        for rank in dead:
            self._say(f"engine {rank} died and is replaced ({str(error).splitlines()[0]})")
            self._engines.restart(rank)
            self._seats.replaced("rollout", rank)
            self.num_restarts += 1
        self._reconnect()
