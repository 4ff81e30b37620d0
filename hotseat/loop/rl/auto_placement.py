"""Predicts the seconds of a step under any placement, from phases that were measured under one.

The seconds of a rollout are read at the samples per engine, those of prepare and update at the samples per
data-parallel rank, and the rest of a step is as long as it was. Where actor and rollout share devices, offload and
onload are added. With staleness, the real pacer is driven with recorded groups, whose episodes take longer or shorter
by the factor between the rollouts (`pace_simulator.py`). Rollouts in simulators are predicted from their turns
(`simulator_turns.py`). Not modelled: that more ranks exchange gradients longer, and that a push to other devices takes
another time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hotseat.config import Config
from hotseat.config.presence import has_simulator
from hotseat.errors import UserError
from hotseat.files import write_whole
from hotseat.loop.rl.forecast import GroupCost, Resources, group_costs, measured_steps, own_pace, pace_with, step_s
from hotseat.loop.rl.simulator_turns import TurnCosts, predicted_rollout, shape_of, turn_costs
from hotseat.observe import PREDICTION
from hotseat.placement import Plan, shares_devices
from hotseat.placement.cost import Curve, Reading
from hotseat.planning.candidates import Candidate
from hotseat.planning.config_plan import num_data_parallel
from hotseat.planning.role_specs import engine_slots

_VERSION = 1
_PHASES = ("rollout", "prepare", "update", "sync")
_MAX_GROUPS = 256  # that a profile keeps


@dataclass(frozen=True)
class Measurement:
    """Mean seconds of the steps of one run: by phase, of offload and onload, and of all the rest.

    groups: what each group of prompts took. The sizes are samples per engine and per data-parallel rank.
    """

    tensor_parallel_size: int
    samples_per_engine: float
    samples_per_rank: float
    phases: Mapping[str, float]
    moves_s: float
    other_s: float
    step_s: float
    num_steps: int
    is_shared: bool
    groups: tuple[GroupCost, ...] = field(repr=False)
    turns: TurnCosts | None = None  # in simulators


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step, and of its phases as if they came one after another."""

    step_s: float
    phases: Mapping[str, float]
    is_extrapolated: bool  # a size lies outside of those that were measured
    samples_per_s: float
    lacks_moves: bool = False  # it has offload and onload, which were not measured


@dataclass(frozen=True)
class Profile:
    """Measurements of `hotseat profile`, in `profile.json`. about: model, device and versions."""

    measurements: tuple[Measurement, ...]
    about: Mapping[str, str]

    @property
    def tensor_parallel_sizes(self) -> list[int]:
        return sorted({each.tensor_parallel_size for each in self.measurements})

    def rollout(self, size: int) -> Curve:
        """Return the seconds of a rollout by samples per engine, for engines of this tensor-parallel size."""
        return Curve.through((each.samples_per_engine, each.phases["rollout"]) for each in self._of_size(size))

    def turns(self, size: int) -> list[TurnCosts]:
        """Return what turns in simulators took, with engines of this tensor-parallel size."""
        turns = [each.turns for each in self._of_size(size) if each.turns is not None]
        if not turns:
            raise UserError(
                "the profile was measured without simulators: measure this config by `hotseat profile CONFIG`"
            )
        return turns

    def _of_size(self, size: int) -> list[Measurement]:
        measured = [each for each in self.measurements if each.tensor_parallel_size == size]
        if not measured:
            known = ", ".join(map(str, self.tensor_parallel_sizes))
            raise UserError(
                f"the profile has no engines of tensor parallel size {size}, it has {known}: measure them by"
                f" `hotseat profile CONFIG --tensor-parallel {size}`"
            )
        return measured

    def training(self, phase: str) -> Curve:
        """Return the seconds of a training phase by samples per data-parallel rank."""
        return Curve.through((each.samples_per_rank, each.phases[phase]) for each in self.measurements)

    @property
    def sync_s(self) -> float:
        return fmean(each.phases["sync"] for each in self.measurements)

    @property
    def other_s(self) -> float:
        return fmean(each.other_s for each in self.measurements)

    @property
    def moves_s(self) -> float | None:
        """Return the seconds of offload and onload, None if no measured placement shares devices."""
        shared = [each.moves_s for each in self.measurements if each.is_shared]
        return fmean(shared) if shared else None

    def groups(self, size: int) -> tuple[GroupCost, ...]:
        """Return recorded groups, of engines of this tensor-parallel size."""
        return max((each.groups for each in self.measurements if each.tensor_parallel_size == size), key=len)

    # --- the file -------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        rows = []
        for each in self.measurements:
            groups = [[*cost.episode_s, cost.scoring_s] for cost in each.groups[:_MAX_GROUPS]]
            turns = None if each.turns is None else vars(each.turns)
            rows.append({**vars(each), "phases": dict(each.phases), "groups": groups, "turns": turns})
        return json.dumps({"version": _VERSION, "about": dict(self.about), "measurements": rows}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Profile:
        try:
            stored = json.loads(path.read_text())
            if stored["version"] != _VERSION:
                raise UserError(f"{path} is a profile of another version of Hotseat: measure it again")
            return cls(tuple(_measurement(row) for row in stored["measurements"]), stored["about"])
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): `hotseat profile CONFIG` writes such a file"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no profile: `hotseat profile CONFIG` writes one") from error


def _measurement(row: Mapping[str, Any]) -> Measurement:
    groups = tuple(GroupCost(tuple(each[:-1]), each[-1]) for each in row["groups"])
    turns = None if row.get("turns") is None else TurnCosts(**row["turns"])
    return Measurement(**{**row, "groups": groups, "turns": turns})


def measurement_of(config: Config, plan: Plan, run_dir: Path) -> Measurement:
    """Read what a synchronous run measured, without its first step."""
    steps = measured_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} made no step after its first, so there is nothing to measure")
    phases = {phase: fmean(row.get(f"time/{phase}", 0.0) for row, _ in steps) for phase in _PHASES}
    moves_s = fmean(sum(row.get(f"time/{name}", 0.0) for name in ("offload", "onload")) for row, _ in steps)
    mean_s = fmean(row["step_s"] for row, _ in steps)
    turns = None
    if has_simulator(config):
        turns = turn_costs(shape_of(config, plan), [batch for _, batch in steps], phases["rollout"])
    return Measurement(
        config.rollout.tensor_parallel_size,
        _per_engine(config, plan),
        _per_rank(config, plan),
        phases,
        moves_s,
        max(0.0, mean_s - sum(phases.values()) - moves_s),
        mean_s,
        len(steps),
        shares_devices(plan),
        tuple(replace(cost, is_dropped=False) for _, batch in steps for cost in group_costs(batch)),
        turns,
    )


def _per_engine(config: Config, plan: Plan) -> float:
    """Return the samples of the engine that has most of a step."""
    num_samples = config.rollout.batch_size * config.rollout.samples_per_prompt
    return float(math.ceil(num_samples / len(plan.role("rollout").processes)))


def _per_rank(config: Config, plan: Plan) -> float:
    """Return the samples of the rank that has most of a step: ranks get whole groups."""
    num_groups = math.ceil(config.rollout.batch_size / num_data_parallel(config, plan))
    return float(num_groups * config.rollout.samples_per_prompt)


def predict(config: Config, plan: Plan, profile: Profile) -> Prediction:
    size = config.rollout.tensor_parallel_size
    readings = {
        "rollout": (
            predicted_rollout(profile.turns(size), shape_of(config, plan))
            if has_simulator(config)
            else profile.rollout(size).at(_per_engine(config, plan))
        ),
        "prepare": profile.training("prepare").at(_per_rank(config, plan)),
        "update": profile.training("update").at(_per_rank(config, plan)),
        "sync": Reading(profile.sync_s, False),
    }
    phases = {name: reading.seconds for name, reading in readings.items()}
    is_shared = shares_devices(plan)
    moves_s = profile.moves_s if is_shared else 0.0
    training_s = phases["prepare"] + phases["update"] + phases["sync"] + profile.other_s + (moves_s or 0.0)
    predicted_s = phases["rollout"] + training_s
    if config.overlap.staleness:
        predicted_s = _overlapped_s(config, plan, profile, phases["rollout"], training_s)
    num_samples = config.rollout.batch_size * config.rollout.samples_per_prompt
    return Prediction(
        predicted_s,
        phases,
        any(reading.is_extrapolated for reading in readings.values()),
        num_samples / predicted_s,
        lacks_moves=moves_s is None,
    )


def _overlapped_s(config: Config, plan: Plan, profile: Profile, rollout_s: float, training_s: float) -> float:
    """Simulate the config's overlap, with the recorded episodes brought to the predicted rollout."""
    num_samples = config.rollout.batch_size * config.rollout.samples_per_prompt
    places = min(num_samples, engine_slots(config) * len(plan.role("rollout").processes))
    groups, resources = profile.groups(config.rollout.tensor_parallel_size), Resources(places, shares_devices(plan))
    recorded_s = step_s(pace_with(config, 0, "prompt"), groups, 0.0, Resources(places, is_shared=False))
    scaled = [_scaled(cost, rollout_s / recorded_s) for cost in groups]
    return step_s(own_pace(config), scaled, training_s, resources, waits=config.overlap.in_flight == "wait")


def _scaled(cost: GroupCost, factor: float) -> GroupCost:
    return GroupCost(tuple(factor * seconds for seconds in cost.episode_s), factor * cost.scoring_s, cost.is_dropped)


def record_prediction(config: Config, plan: Plan, run_dir: Path, say: Callable[[str], object]) -> None:
    """Write what the config's profile predicts for this run, which the report compares with what is measured."""
    if config.cluster.profile is None:
        return
    predicted = predict(config, plan, Profile.read(Path(config.cluster.profile)))
    facts = {"step_s": predicted.step_s, "phases": dict(predicted.phases)}
    write_whole(run_dir / PREDICTION, json.dumps(facts) + "\n")
    say(f"predicted: {predicted.step_s:.3g} s per step, by {config.cluster.profile}")


def ranked(candidates: Iterable[Candidate], profile: Profile) -> list[tuple[Candidate, Prediction]]:
    """Predict every candidate; the fastest comes first."""
    predicted = [(candidate, predict(candidate.config, candidate.plan, profile)) for candidate in candidates]
    return sorted(predicted, key=lambda pair: pair[1].step_s)
