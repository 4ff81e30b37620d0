"""Predicts the seconds of a step under any placement, from phases that were measured under one.

The seconds of a rollout are read at the samples per engine, those of prepare and update at the samples per
data-parallel rank, and the rest of a step is as long as it was. Where actor and rollout share devices, offload and
onload are added. With staleness, the real pacer is driven with recorded groups, whose episodes take longer or shorter
by the factor between the rollouts (`forecast.py`). Not modelled: that more ranks exchange gradients longer, and that a
push to other devices takes another time.

Rollouts in simulators are predicted from turns that were measured with one stage. A turn is an observation, the
policy's answer, and the step of the simulator. In a round every simulator has a turn. With S stages, simulators step S
times in a round, each time with 1/S of them, and the policy answers as often; while it answers one stage, another
steps. So a round takes as long as the device with most work: S times the slower of the two, or S times both where
simulators and engines share a device. And it takes one turn at least, which waits for both. An engine that several env
processes prefer (`engines_of_host`) answers what waits at once if it is kept busy, and each for itself if it is not.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from hotseat.config import Config
from hotseat.config.presence import has_simulator
from hotseat.errors import UserError
from hotseat.files import write_whole
from hotseat.loop.rl.forecast import GroupCost, Resources, group_costs, measured_steps, own_pace, pace_with, step_s
from hotseat.loop.workers.engine_client import engines_of_host
from hotseat.observe import PREDICTION
from hotseat.placement import Plan, shares_devices
from hotseat.placement.cost import Curve, Reading
from hotseat.planning.candidates import Candidate
from hotseat.planning.config_plan import num_data_parallel
from hotseat.planning.role_specs import engine_slots

_VERSION = 2
_PHASES = ("rollout", "prepare", "update", "sync")
_MAX_GROUPS = 256  # that a profile keeps


@dataclass(frozen=True)
class RolloutShape:
    """Sizes of a rollout in simulators. num_envs: of all processes of the role env together.

    on_devices: numbers of env processes and of engines on a device, for each device that has some.
    """

    num_samples: int
    num_envs: int
    num_env_ranks: int
    num_engines: int
    num_stages: int
    on_devices: frozenset[tuple[int, int]] = frozenset({(1, 0), (0, 1)})

    @property
    def num_active(self) -> int:
        """Return the simulators that have an episode."""
        return min(self.num_envs, self.num_samples)

    @property
    def envs_per_call(self) -> float:
        """Return the simulators of one process that step together."""
        return self.num_active / (self.num_env_ranks * self.num_stages)

    @property
    def requests_per_engine(self) -> float:
        """Return the requests that one engine gets of a stage of all processes."""
        return self.num_active / (self.num_engines * self.num_stages)

    @property
    def requests_per_turn(self) -> float:
        """Return the requests that one engine gets of a stage of one process."""
        engines = len(engines_of_host(0, self.num_env_ranks, self.num_engines)) or self.num_engines
        return self.envs_per_call / engines


@dataclass(frozen=True)
class TurnCosts:
    """Mean seconds of a turn with one stage: of simulators that step together, and of the policy's answers.

    stretch: seconds of the rollout for each second of its rounds; it is above 1 because places are empty at the end.
    """

    envs_per_call: float
    requests_per_engine: float
    env_s: float
    policy_s: float
    turns_per_sample: float
    stretch: float


def shape_of(config: Config, plan: Plan) -> RolloutShape:
    """Return the sizes of a config's rollouts under its plan."""
    env, engines = plan.role("env"), plan.role("rollout")
    return RolloutShape(
        num_samples=config.rollout.batch_size * config.rollout.samples_per_prompt,
        num_envs=config.env.num_envs * len(env.processes),
        num_env_ranks=len(env.processes),
        num_engines=len(engines.processes),
        num_stages=config.rollout.pipeline_stage_num,
        on_devices=_counts_by_device(plan),
    )


def _counts_by_device(plan: Plan) -> frozenset[tuple[int, int]]:
    """Return the numbers of env processes and of engines on each device; a process without devices counts as on one."""
    env, engines = (
        Counter(place for each in plan.role(role).processes for place in each.devices or (f"{role} {each.rank}",))
        for role in ("env", "rollout")
    )
    return frozenset((env[place], engines[place]) for place in {*env, *engines})


def steps_beside_answers(plan: Plan) -> bool:
    """Tell whether simulators may step on a device while an engine there answers others, which slows down both."""
    env, engines = plan.role("env").processes, plan.role("rollout").processes
    serves = [set(engines_of_host(at, len(env), len(engines)) or range(len(engines))) for at in range(len(env))]
    return any(
        set(process.devices) & set(engine.devices)
        for at, process in enumerate(env)
        for index, engine in enumerate(engines)
        if any(index in serves[other] for other in range(len(env)) if other != at)
    )


def turn_costs(shape: RolloutShape, batches: Sequence[Mapping[str, Any]], rollout_s: float) -> TurnCosts | None:
    """Return what turns took in a run with one stage; None if its batches do not say.

    batches: lines of `arrivals.jsonl`, of the steps that took `rollout_s` on average.
    """
    num_turns = sum(line.get("num_turns", 0) for line in batches)
    if not num_turns or shape.num_stages > 1:
        return None
    policy_s = sum(line["policy_s"] for line in batches) / num_turns
    episodes_s = sum(sum(seconds[:-1]) for line in batches for seconds in line["seconds"])
    env_s = max(0.0, episodes_s / num_turns - policy_s)
    turns_per_sample = num_turns / sum(len(seconds) - 1 for line in batches for seconds in line["seconds"])
    rounds = shape.num_samples * turns_per_sample / shape.num_active
    return TurnCosts(
        shape.envs_per_call,
        shape.requests_per_engine,
        env_s,
        policy_s,
        turns_per_sample,
        rollout_s / (rounds * (env_s + policy_s)),
    )


def predicted_rollout(costs: Sequence[TurnCosts], shape: RolloutShape) -> Reading:
    env = Curve.through((each.envs_per_call, each.env_s) for each in costs).at(shape.envs_per_call)
    policy = Curve.through((each.requests_per_engine, each.policy_s) for each in costs)
    alone, together = policy.at(shape.requests_per_turn), policy.at(shape.requests_per_engine)
    # The measurement of nearest size knows best how long episodes are and how places empty.
    nearest = min(costs, key=lambda each: abs(each.envs_per_call - shape.num_active / shape.num_env_ranks))
    rounds = shape.num_samples * nearest.turns_per_sample / shape.num_active
    busy_s = shape.num_stages * max(
        processes * env.seconds + engines * together.seconds for processes, engines in shape.on_devices
    )
    round_s = max(busy_s, env.seconds + alone.seconds)
    is_extrapolated = env.is_extrapolated or alone.is_extrapolated or together.is_extrapolated
    return Reading(rounds * nearest.stretch * round_s, is_extrapolated)


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
        kept = [replace(each, groups=each.groups[:_MAX_GROUPS]) for each in self.measurements]
        stored = asdict(replace(self, measurements=tuple(kept)))
        return json.dumps({"version": _VERSION, **stored}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Profile:
        try:
            stored = json.loads(path.read_text())
            if stored.pop("version") != _VERSION:
                raise UserError(f"{path} is a profile of another version of Hotseat: measure it again")
            return TypeAdapter(cls).validate_python(stored)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): `hotseat profile CONFIG` writes such a file"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no profile: `hotseat profile CONFIG` writes one") from error


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
    """Write the prediction of the config's profile for this run; the report compares it with measurements."""
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
