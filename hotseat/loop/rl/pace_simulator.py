"""Predicts how long steps take with some overlap, by driving the real pacer with durations of groups."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hotseat.loop.rl.pacer import Awaited, Pace, Pacer


@dataclass
class _Rollout:
    """Groups on a number of places: each takes its time, and the next begins when a place is free."""

    durations: Sequence[float]
    num_places: int
    finishing: list[tuple[float, int]] = field(default_factory=list)  # a heap of (time, ticket)
    queued: list[int] = field(default_factory=list)

    def begin(self, tickets: Sequence[int], now: float) -> None:
        self.queued += tickets
        self._fill(now)

    def next_arrival(self) -> tuple[float, int]:
        """Return when the next group is finished, and its ticket."""
        now, ticket = heapq.heappop(self.finishing)
        self._fill(now)
        return now, ticket

    def _fill(self, now: float) -> None:
        while self.queued and len(self.finishing) < self.num_places:
            ticket = self.queued.pop(0)
            heapq.heappush(self.finishing, (now + self.durations[ticket], ticket))


def step_times(
    pace: Pace, durations: Sequence[float], *, num_places: int, training_s: float, waits: bool = False
) -> list[float]:
    """Return the time at which each step of a run ends.

    durations: seconds from the beginning of each group to its rewards, in the order in which groups begin.
    num_places: groups in progress at once. training_s: from a batch to the end of its push. waits: a push waits for
    what is in flight.
    """
    pacer, rollout, now = Pacer(pace), _Rollout(durations, num_places), 0.0
    ends: list[float] = []

    def arrive() -> float:
        time, ticket = rollout.next_arrival()
        pacer.arrive(ticket)
        return time

    while len(ends) < pace.num_groups // pace.groups_per_step:
        rollout.begin(pacer.admit(), now)
        while isinstance(chosen := pacer.batch(), Awaited):
            now = max(now, arrive())
        pacer.take(chosen)
        rollout.begin(pacer.admit(), now)
        now += training_s
        while rollout.finishing and (waits or rollout.finishing[0][0] <= now):
            now = max(now, arrive())
        pacer.trained()
        ends.append(now)
    return ends
