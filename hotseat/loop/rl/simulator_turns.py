"""Predicts the seconds of a rollout in simulators, from turns that were measured with one stage.

A turn is an observation, the policy's answer, and the step of the simulator. In a round every simulator has a turn.
With S stages, simulators step S times in a round, each time with 1/S of them, and the policy answers as often; while it
answers one stage, another steps. So a round takes as long as the device with most work: S times the slower of the two,
or S times both where simulators and engines share a device. And it takes one turn at least, which waits for both. An
engine that several env processes prefer (`engines_of_host`) answers what waits at once if it is kept busy, and each for
itself if it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotseat.config import Config
from hotseat.loop.workers.engine_client import engines_of_host
from hotseat.placement import Plan
from hotseat.placement.cost import Curve, Reading


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
