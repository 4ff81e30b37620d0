"""Predicts what staleness would gain, by driving the real pacer with the seconds that groups of a recorded run took.

Episodes take as long as the recorded ones, however many are open at a time; training takes as long for each sample."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hotseat.config import Config
from hotseat.config.presence import has_agent
from hotseat.config.resolved import overlap_queue
from hotseat.errors import UserError
from hotseat.loop.rl.pacer import Awaited, Order, Pace, Pacer
from hotseat.loop.state.run_dir import ARRIVALS
from hotseat.observe import METRICS, read_lines
from hotseat.planning.config_plan import episodes_per_engine
from hotseat.planning.role_specs import engine_slots

STALENESS = (0, 1, 2, 4)
NUM_WARM_UP = 4  # simulated steps that do not count
NUM_COUNTED = 32  # simulated steps that do
NUM_HALVINGS = 12  # of the interval in which the share of episodes without waiting is searched


@dataclass(frozen=True)
class GroupCost:
    """Seconds that a group takes."""

    episode_s: tuple[float, ...]  # of each episode; they begin one by one, as places become free
    scoring_s: float = 0.0  # of its rewards, after the last episode
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


@dataclass(frozen=True)
class Costs:
    """Seconds that the groups of a run took, and that a step took, from its batch to its push and in all."""

    groups: tuple[GroupCost, ...]
    step_s: float
    training_s: float
    num_steps: int  # that were measured


@dataclass(frozen=True)
class Resources:
    """Means by which the groups of a run are sampled. is_shared: engines take turns with training on their devices."""

    num_places: int  # episodes in progress at once
    is_shared: bool


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of a step with some overlap. step_s_waiting: in prompt order, where pushes wait."""

    staleness: int
    step_s: float  # in order of arrival, where open requests continue after a push
    step_s_waiting: float | None  # None on shared devices, where they always continue


def recorded_costs(run_dir: Path) -> Costs:
    """Read the costs of a run, whose first step is left out. Raises if it recorded none."""
    for name in (METRICS, ARRIVALS):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} has no {name}: name the directory of an RL run that has made some steps")
    steps = measured_steps(run_dir)
    groups = tuple(cost for _, batch in steps for cost in group_costs(batch))
    if not groups:
        raise UserError(
            f"{run_dir} has no step after its first whose episodes were timed: let it make more steps, with this"
            " version of Hotseat"
        )
    # In this time nothing is trained or pushed.
    waited = [row["time/wait"] + row["time/drain"] if "time/wait" in row else row["time/rollout"] for row, _ in steps]
    mean_s = fmean(row["step_s"] for row, _ in steps)
    training_s = fmean(row["step_s"] - waited_s for (row, _), waited_s in zip(steps, waited, strict=True))
    return Costs(groups, mean_s, training_s, len(steps))


def measured_steps(run_dir: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the metrics and the recorded batch of each step of a run but its first."""
    rows = {row["step"]: row for row in read_lines(run_dir / METRICS) if "step_s" in row}
    batches = {line["step"]: line for line in read_lines(run_dir / ARRIVALS) if line["event"] == "taken"}
    return [(rows[step], batches[step]) for step in sorted(rows.keys() & batches.keys()) if step > 1]


def group_costs(batch: dict[str, Any]) -> list[GroupCost]:
    """Return what the groups of a recorded batch took, as far as their episodes were timed."""
    num_kept = len(batch["groups"])
    seconds = batch.get("seconds", [])
    costs = [GroupCost(tuple(each[:-1]), each[-1], index >= num_kept) for index, each in enumerate(seconds)]
    return [cost for cost in costs if cost.episode_s]


def resources_of(config: Config, num_engines: int, *, is_shared: bool) -> Resources:
    """Return what a run samples its groups with. An agent's tools need a place, but no slot of an engine."""
    per_engine = episodes_per_engine(config)
    if not has_agent(config):
        per_engine = min(per_engine, engine_slots(config))
    return Resources(per_engine * num_engines, is_shared)


def pace_with(config: Config, staleness: int, order: Order) -> Pace:
    """Return the pace of a simulated run with this staleness, and a queue as long."""
    num_groups = config.rollout.batch_size * (NUM_WARM_UP + NUM_COUNTED + 1 + staleness)
    return Pace(config.rollout.batch_size, staleness, staleness, order, num_groups)


def own_pace(config: Config) -> Pace:
    """Return the pace of a simulated run with the overlap that the config has."""
    overlap = config.overlap
    return replace(pace_with(config, overlap.staleness, overlap.order), queue=overlap_queue(config))


def own_step_s(config: Config, costs: Costs, resources: Resources) -> float | None:
    """Predict the seconds of a step with the overlap that the config has; None if it restarts open groups."""
    if config.overlap.in_flight == "restart":
        return None
    return step_s(own_pace(config), costs.groups, costs.training_s, resources, waits=config.overlap.in_flight == "wait")


def without_queueing(config: Config, costs: Costs, resources: Resources) -> Costs:
    """Take the time out of recorded episodes in which their requests waited for a slot of an engine.

    config, resources: of the recorded run. If it had more episodes open than slots, they are all made shorter by the
    factor with which the simulation of that run takes the time that it took.
    """
    num_open = config.rollout.batch_size * (1 + overlap_queue(config)) * config.rollout.samples_per_prompt
    if has_agent(config) or num_open <= resources.num_places:
        return costs
    low, high = 0.0, 1.0
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        predicted_s = own_step_s(config, _scaled(costs, middle), resources)
        if predicted_s is None:
            return costs
        low, high = (low, middle) if predicted_s > costs.step_s else (middle, high)
    return _scaled(costs, high)


def _scaled(costs: Costs, factor: float) -> Costs:
    groups = [replace(cost, episode_s=tuple(factor * s for s in cost.episode_s)) for cost in costs.groups]
    return replace(costs, groups=tuple(groups))


def for_samples(costs: Costs, num_samples: int, training_factor: float) -> Costs:
    """Return costs for groups of another size, made of the recorded episodes, and for other steps of training."""
    groups = costs.groups
    if {len(cost.episode_s) for cost in groups} != {num_samples}:
        episodes = [seconds for cost in groups for seconds in cost.episode_s]
        episodes *= -(-num_samples // len(episodes))
        groups = tuple(
            GroupCost(tuple(episodes[at : at + num_samples]), groups[index % len(groups)].scoring_s)
            for index, at in enumerate(range(0, len(episodes) - num_samples + 1, num_samples))
        )
    return replace(costs, groups=groups, training_s=costs.training_s * training_factor)


def forecasts(config: Config, costs: Costs, resources: Resources, values: Sequence[int] = STALENESS) -> list[Forecast]:
    """Predict the seconds of a step for each of these values of `overlap.staleness`."""

    def predict(staleness: int, order: Order, *, waits: bool) -> float:
        return step_s(pace_with(config, staleness, order), costs.groups, costs.training_s, resources, waits=waits)

    return [
        Forecast(
            staleness,
            predict(staleness, "arrival" if staleness else "prompt", waits=False),
            None if resources.is_shared else predict(staleness, "prompt", waits=True),
        )
        for staleness in values
    ]


def step_s(
    pace: Pace, groups: Sequence[GroupCost], training_s: float, resources: Resources, *, waits: bool = False
) -> float:
    """Simulate a run, and return the mean seconds of its steps after the first ones."""
    ends = step_times(
        pace,
        groups,
        num_places=resources.num_places,
        training_s=training_s,
        waits=waits and not resources.is_shared,
        is_shared=resources.is_shared,
    )
    return (ends[NUM_WARM_UP + NUM_COUNTED - 1] - ends[NUM_WARM_UP - 1]) / NUM_COUNTED
