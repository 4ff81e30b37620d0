"""Predicts what staleness would gain, by simulating the steps of a recorded run with the real pacer.

Episodes take as long as the recorded ones, however many are open at a time; training takes as long for each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hotseat.config import Config
from hotseat.config.presence import has_agent
from hotseat.config.resolved import overlap_queue
from hotseat.errors import UserError
from hotseat.loop.rl.pace_simulator import GroupCost, step_times
from hotseat.loop.rl.pacer import Order, Pace
from hotseat.loop.state.run_dir import ARRIVALS
from hotseat.observe import METRICS, read_lines
from hotseat.planning.config_plan import episodes_per_engine
from hotseat.planning.role_specs import engine_slots

STALENESS = (0, 1, 2, 4)
NUM_WARM_UP = 4  # simulated steps that do not count
NUM_COUNTED = 32  # simulated steps that do
NUM_HALVINGS = 12  # of the interval in which the share of episodes without waiting is searched


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
    return Costs(
        groups,
        fmean(row["step_s"] for row, _ in steps),
        fmean(row["step_s"] - _waited_s(row) for row, _ in steps),
        len(steps),
    )


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


def _waited_s(row: dict[str, float]) -> float:
    """Return the seconds of a step in which nothing was trained or pushed."""
    if "time/wait" in row:
        return row["time/wait"] + row["time/drain"]
    return row["time/rollout"]


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
