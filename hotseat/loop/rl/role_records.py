"""Records of the roles of a reinforcement run: how the processes of each are made, started and replaced.

`registry/roles.py` has the facts that need no torch, `config/presence.py` says which roles a config has. A record
that is added to `RECORDS` is launched and watched, and replaced when it dies if it says how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hotseat.checks.model_configs import judge_eos_token_ids
from hotseat.cluster import Cluster, Process
from hotseat.config import Config, roles_of
from hotseat.config.presence import has_simulator
from hotseat.config.resolved import critic_model, source_of
from hotseat.loop.opening import ClusterContext
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.recovery import ENGINE, HOST
from hotseat.loop.settings.rollout_settings import (
    component_settings,
    engine_dtype,
    engine_settings,
    judge_engine_settings,
)
from hotseat.loop.settings.training_settings import critic_options, reward_options, train_options
from hotseat.loop.workers.component import ComponentSettings, ComponentWorker
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.loop.workers.host_settings import HostSettings
from hotseat.loop.workers.model_workers import ActorWorker, InferenceWorker, ModelWorker
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.loop.workers.teacher_engine import TeacherEngineWorker
from hotseat.loop.workers.teachers import TeachersWorker
from hotseat.loop.workers.value_models import CriticWorker, RewardWorker
from hotseat.placement import Plan
from hotseat.planning import config_plan
from hotseat.registry.roles import role_entry
from hotseat.rollout.kinds import EngineSettings

# A worker class, and the arguments of its constructor.
Worker = tuple[type[Any], tuple[Any, ...]]

# engine: first, and alone on its devices if it measures their free memory. model: together, after engines that measure.
# host: without memory on a device, so beside engines that measure; otherwise after all models.
Start = Literal["engine", "model", "host"]


@dataclass(frozen=True)
class LaunchContext:
    """Inputs of every role's launch. engines: settings by role, of engines that the run launches."""

    config: Config
    plan: Plan
    cluster: Cluster
    schedule_length: int
    engines: dict[str, EngineSettings]
    host: HostSettings
    folder_proof: FolderProof | None
    samples: bool  # a replay that evaluates nothing takes neither engines nor rewards
    teacher: EngineSettings | None = None  # of the engine of the reference; None: that has a training backend

    @property
    def measures_its_device(self) -> bool:
        """Tell whether a starting engine takes a share of the free memory that it measures on its device.

        Where an engine fills its memory share, no other process may use the device meanwhile.
        """
        shared = [each for each in self.engines.values() if each.entry.memory_share is not None]
        fills_share = any(each.options.cache_gib is None for each in shared)
        needs_room = bool(shared) and config_plan.is_anything_offloaded(self.plan)
        return (fills_share or needs_room) and not config_plan.are_devices_logical(self.cluster)

    @property
    def warms_models_up(self) -> bool:
        """Tell whether models warm up while the policy's engines start, where these take longest.

        Memory is no concern where nothing measures it: everything fits beside everything.
        """
        is_slow = "rollout" in self.engines and self.engines["rollout"].entry.compiles
        return is_slow and not self.measures_its_device and not config_plan.are_devices_logical(self.cluster)


@dataclass(frozen=True)
class RoleRecord:
    """Way in which the processes of a role are made, started and replaced.

    worker: returns their class and its arguments. is_present: tells whether a run has the role; None: by its config.
    processes: returns their places if they have no devices; None: those of the plan. serves_hosts: every rollout host
    has a call that waits in each process. warms_up: see `LaunchContext.warms_models_up`. is_offloaded_first: the parts
    that the plan ever offloads leave the device as soon as the role has started.

    replaced_as: what messages call a process of a role without state, of which a dead one alone is replaced
    (`recovery.py`). None: all processes of the role are restarted, and the run goes back to its checkpoint
    (`group_restarts.py`). connect: called with the ranks of new processes before they work.
    """

    name: str
    worker: Callable[[LaunchContext], Worker]
    start: Start = "model"
    is_present: Callable[[Config], bool] | None = None
    processes: Callable[[LaunchContext], list[Process]] | None = None
    serves_hosts: bool = False
    warms_up: bool = False
    is_offloaded_first: bool = False
    replaced_as: str | None = None
    connect: Callable[[Groups, Sequence[int]], object] = lambda groups, ranks: None

    def is_in(self, launch: LaunchContext) -> bool:
        if self.is_present is not None:
            return self.is_present(launch.config)
        is_left_out = not launch.samples and role_entry(self.name).makes_groups
        return self.name in roles_of(launch.config) and not is_left_out

    def options(self, launch: LaunchContext) -> dict[str, Any]:
        """Return the options with which the cluster launches, or prepares, the processes."""
        config = launch.config
        options: dict[str, Any] = {"timeout_s": config.cluster.call_timeout_s}
        if self.processes is not None:
            return options | {"processes": self.processes(launch)}
        options |= {
            "processes": launch.plan.role(self.name).processes,
            "num_threads": config.cluster.threads_per_process,
        }
        if self.serves_hosts:
            options["max_concurrency"] = EngineWorker.max_concurrency + len(host_places(config, launch.plan))
        return options


def records_of(launch: LaunchContext) -> list[RoleRecord]:
    """Return the roles of a run in the order in which they are launched."""
    components = [
        RoleRecord(each.name, partial(_component, each)) for each in component_settings(launch.config, launch.plan)
    ]
    order: tuple[Start, ...] = ("engine", "model", "host")
    present = [record for record in (*RECORDS, *components) if record.is_in(launch)]
    return sorted(present, key=lambda record: order.index(record.start))


def host_places(config: Config, plan: Plan) -> list[Process]:
    """Return the places of the rollout hosts: as many as the config says, spread over the nodes with engines.

    With simulators they are those of the role env.
    """
    if has_simulator(config):
        return [Process(process.rank, process.node) for process in plan.role("env").processes]
    nodes = sorted({process.node for process in plan.role("rollout").processes}) or [0]
    return [Process(rank, nodes[rank % len(nodes)]) for rank in range(config.rollout.num_hosts or len(nodes))]


def engine_settings_of(
    context: ClusterContext, eos_token_ids: tuple[int, ...], logs: Path, adapters_alone: bool
) -> dict[str, EngineSettings]:
    """Return the settings of the run's engines by role. logs: the folder for their logs."""
    config, plan = context.config, context.plan
    engines = {
        "rollout": engine_settings(
            config,
            eos_token_ids,
            logs,
            room=config_plan.engine_room(config, plan),
            adapters_alone=adapters_alone,
            num_slots=config_plan.stage_slots(config, plan) if has_simulator(config) else None,
        )
    }
    if "judge" in roles_of(config):
        of_judge, room = judge_eos_token_ids(config), config_plan.engine_room(config, plan, "judge")
        engines["judge"] = judge_engine_settings(config, of_judge, logs, room=room)
    return engines


# --- worker classes and their arguments -------------------------------------------------------------------------------


def _engine(role: str, launch: LaunchContext) -> Worker:
    return EngineWorker, (launch.engines[role],)


def _host(launch: LaunchContext) -> Worker:
    return RolloutHost, (launch.host,)


def _actor(launch: LaunchContext) -> Worker:
    config = launch.config
    options = train_options(config, launch.schedule_length)
    dtype = engine_dtype(config)
    distill, teacher = config.algorithm.distill, None
    if distill.coef > 0 and distill.top_k is None:
        teacher = source_of(config, config.reference.model)
    return ActorWorker, (source_of(config, config.actor.model), options, dtype, launch.folder_proof, teacher)


def _critic(launch: LaunchContext) -> Worker:
    config, proof = launch.config, launch.folder_proof
    options = critic_options(config, launch.schedule_length)
    of_critic = proof and proof.of("critic")
    return CriticWorker, (source_of(config, critic_model(config)), options, of_critic)


def _reference(launch: LaunchContext) -> Worker:
    config, reference = launch.config, launch.config.reference
    options = train_options(config, launch.schedule_length, is_trained=False)
    if launch.teacher is not None:
        return TeacherEngineWorker, (launch.teacher,)
    if reference.teachers:
        weights = reference.teacher_weights or None
        teachers = {name: source_of(config, model) for name, model in reference.teachers.items()}
        return TeachersWorker, (teachers, weights, options)
    if reference.model is None:  # the policy as it was, in the bits that it is frozen in
        options = replace(options, has_nf4=config.train.load_in_4bit)
    return ModelWorker, (source_of(config, reference.model or config.actor.model), options)


def _reward(launch: LaunchContext) -> Worker:
    return RewardWorker, (source_of(launch.config, launch.config.reward.model), reward_options(launch.config))


def _inference(launch: LaunchContext) -> Worker:
    config = launch.config
    options = train_options(config, launch.schedule_length, is_trained=False)
    options = replace(options, replays_routing=config.rollout.routing_replay)
    return InferenceWorker, (source_of(config, config.actor.model), options, engine_dtype(config))


def _component(component: ComponentSettings, launch: LaunchContext) -> Worker:
    return ComponentWorker, (component,)


RECORDS: tuple[RoleRecord, ...] = (
    RoleRecord("rollout", partial(_engine, "rollout"), start="engine", serves_hosts=True, replaced_as=ENGINE),
    RoleRecord(
        "judge",
        partial(_engine, "judge"),
        start="engine",
        serves_hosts=True,
        is_offloaded_first=True,
        replaced_as="judge",
        connect=lambda groups, ranks: groups.reconnect_judge(),
    ),
    RoleRecord("actor", _actor, warms_up=True),
    RoleRecord("critic", _critic),
    RoleRecord("reference", _reference, warms_up=True),
    RoleRecord("reward", _reward),
    RoleRecord("inference", _inference),
    RoleRecord("env", _host, start="host", replaced_as=HOST, connect=Groups.reconnect),
    RoleRecord(
        "agents",
        _host,
        start="host",
        is_present=lambda config: not has_simulator(config),
        processes=lambda launch: host_places(launch.config, launch.plan),
        replaced_as=HOST,
        connect=Groups.reconnect,
    ),
)
