"""Predicts how long steps take with some overlap, by driving the real pacer with the seconds that groups take."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hotseat.loop.rl.pacer import Awaited, Pace, Pacer


@dataclass(frozen=True)
class GroupCost:
    """Seconds that a group takes: each of its episodes, which begin one by one as places are free, then its rewards."""

    episode_s: tuple[float, ...]
    scoring_s: float = 0.0
    is_dropped: bool = False


class _Rollout:
    """Episodes on a number of places. Each takes its time, and the next begins when a place is free."""

    def __init__(self, costs: Sequence[GroupCost], num_places: int):
        self._costs = costs
        self._num_free = num_places
        self._queued: deque[tuple[int, float]] = deque()  # episodes without a place: ticket, seconds
        self._running: list[tuple[float, int]] = []  # a heap of (end, ticket)
        self._finishing: list[tuple[float, int]] = []  # groups whose rewards are computed, a heap of (end, ticket)
        self._num_open: dict[int, int] = {}  # episodes of each ticket

    def cost(self, ticket: int) -> GroupCost:
        return self._costs[ticket % len(self._costs)]

    def begin(self, tickets: Sequence[int], now: float) -> None:
        for ticket in tickets:
            episodes = self.cost(ticket).episode_s
            self._num_open[ticket] = len(episodes)
            self._queued += [(ticket, seconds) for seconds in episodes]
        self._fill(now)

    def next_arrival(self, until: float = math.inf) -> tuple[float, int] | None:
        """Return when the next group is finished, and its ticket; None if that is after `until`, or there is none."""
        while self._running or self._finishing:
            is_group = not self._running or (bool(self._finishing) and self._finishing[0] <= self._running[0])
            heap = self._finishing if is_group else self._running
            if heap[0][0] > until:
                return None
            now, ticket = heapq.heappop(heap)
            if is_group:
                return now, ticket
            self._num_free += 1
            self._fill(now)
            self._num_open[ticket] -= 1
            if self._num_open[ticket] == 0:
                heapq.heappush(self._finishing, (now + self.cost(ticket).scoring_s, ticket))
        return None

    def _fill(self, now: float) -> None:
        while self._queued and self._num_free:
            ticket, seconds = self._queued.popleft()
            heapq.heappush(self._running, (now + seconds, ticket))
            self._num_free -= 1


def step_times(
    pace: Pace,
    costs: Sequence[GroupCost],
    *,
    num_places: int,
    training_s: float,
    waits: bool = False,
    is_shared: bool = False,
) -> list[float]:
    """Return the time at which each step of a run ends.

    costs: of the groups in the order in which they begin, from the first again after the last.
    num_places: episodes in progress at once. training_s: from a batch to the end of its push.
    waits: a push waits for what is in flight. is_shared: rollout stands still during training, on the same devices.
    """
    assert not (waits and is_shared), "on shared devices open requests continue after a push"
    pacer, rollout = Pacer(pace), _Rollout(costs, num_places)
    now, stood_still_s = 0.0, 0.0  # rollout's clock is behind by the time in which it stood still
    ends: list[float] = []

    def begin() -> None:
        rollout.begin(pacer.admit(), now - stood_still_s)

    def arrive(until: float = math.inf) -> float | None:
        arrival = rollout.next_arrival(until - stood_still_s)
        if arrival is None:
            return None
        time, ticket = arrival
        if rollout.cost(ticket).is_dropped:
            pacer.drop(ticket)
            rollout.begin(pacer.admit(), time)
        else:
            pacer.arrive(ticket)
        return time + stood_still_s

    while len(ends) < pace.num_groups // pace.groups_per_step:
        begin()
        while isinstance(chosen := pacer.batch(), Awaited):
            arrived_s = arrive()
            assert arrived_s is not None, "no batch, and nothing in flight"
            now = max(now, arrived_s)
        pacer.take(chosen)
        if is_shared:
            now, stood_still_s = now + training_s, stood_still_s + training_s
        else:
            begin()
            now += training_s
            while (arrived_s := arrive(math.inf if waits else now)) is not None:
                now = max(now, arrived_s)
        pacer.trained()
        ends.append(now)
    return ends
