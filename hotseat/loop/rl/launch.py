"""Starts the processes of a reinforcement run: one group per role, on the devices that the plan gives it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from hotseat import faults
from hotseat.cluster import Process, WorkerGroup
from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra
from hotseat.config.roles import (
    has_critic,
    has_inference,
    has_judge_engine,
    has_reference,
    has_reward_model,
    has_simulator,
)
from hotseat.errors import RunError
from hotseat.loop.devices.scheduler import Movable
from hotseat.loop.opening import ClusterContext, folder_witness
from hotseat.loop.planning.plan import (
    are_devices_logical,
    cache_limit,
    is_anything_offloaded,
    offloaded_parts,
    stage_slots,
)
from hotseat.loop.rl.hosts import RolloutHosts
from hotseat.loop.rl.recovery import start_up
from hotseat.loop.rl.replay import NoWorkers, Recording
from hotseat.loop.setup import settings
from hotseat.loop.setup.cpu import check_engine_dtype
from hotseat.loop.setup.inputs import judge_eos_token_ids
from hotseat.loop.setup.value_models import critic_model
from hotseat.loop.state.readiness import Readiness
from hotseat.loop.state.run_dir import LOGS
from hotseat.loop.workers.component import ComponentWorker
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.loop.workers.models import ActorWorker, InferenceWorker, ModelWorker
from hotseat.loop.workers.rollout_host import HostSettings, RolloutHost
from hotseat.loop.workers.teachers import TeachersWorker
from hotseat.loop.workers.value_models import CriticWorker, RewardWorker
from hotseat.observe import Journal
from hotseat.placement import Part, Plan
from hotseat.rollout.kinds import EngineSettings

M = TypeVar("M", bound=Movable)


@dataclass(frozen=True)
class Groups:
    """Worker groups of a run. `by_role`: those to which the plan assigns devices, by the name of their role."""

    engines: WorkerGroup[EngineWorker]
    actor: WorkerGroup[ActorWorker]
    hosts: RolloutHosts
    critic: WorkerGroup[CriticWorker] | None
    reference: WorkerGroup[ModelWorker] | None
    reward: WorkerGroup[RewardWorker] | None
    inference: WorkerGroup[InferenceWorker] | None
    by_role: dict[str, WorkerGroup[Movable]]
    have_gpus: bool  # the actor trains on GPUs
    measures_its_device: bool  # a starting engine takes a share of the free memory that it measures on its device
    judge: WorkerGroup[EngineWorker] | None = None
    offloaded: Mapping[str, Sequence[Part]] = field(default_factory=dict)  # by role: parts off its devices now
    adapters_alone: bool = False  # engines get adapters apart from the weights below them
    components: Mapping[str, WorkerGroup[ComponentWorker]] = field(default_factory=dict)  # in the order of the flow

    @property
    def models(self) -> dict[str, WorkerGroup[ModelWorker]]:
        """Return the roles that hold a model behind a training backend, by name, in the order of their launch."""
        roles: dict[str, WorkerGroup[ModelWorker] | None] = {
            "actor": self.actor,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.reward,
            "inference": self.inference,
        }
        return {role: group for role, group in roles.items() if group is not None}


def launch_groups(
    place: ClusterContext,
    algebra: BatchAlgebra,
    eos_token_ids: tuple[int, ...],
    run_dir: Path,
    journal: Journal,
    recording: Recording | None = None,
) -> Groups:
    """Start all roles and connect them. They start together, unless engines have to measure their devices first.

    recording: of the run that is replayed, which takes neither engines nor rewards; None: groups are sampled.
    """
    assert algebra.schedule_length is not None
    config = place.config
    adapters_alone = settings.are_adapters_alone(config, on_gpu=not are_devices_logical(place.cluster))
    settings.check_8_bits(config, on_gpu=not are_devices_logical(place.cluster))
    if are_devices_logical(place.cluster):
        check_engine_dtype(config)
    limit = cache_limit(config, place.plan)
    engine: EngineSettings | None = settings.engine_settings(
        config,
        eos_token_ids,
        run_dir / LOGS,
        limit=limit,
        adapters_alone=adapters_alone,
        num_slots=stage_slots(config, place.plan) if has_simulator(config) else None,
    )
    judge: EngineSettings | None = None
    if has_judge_engine(config) and recording is None:
        limit = cache_limit(config, place.plan, "judge")
        judge = settings.judge_engine_settings(config, judge_eos_token_ids(config), run_dir / LOGS, limit=limit)
    host = settings.host_settings(place.config, run_dir)
    if recording is not None:
        folder = str(recording.folder.absolute())
        host = replace(
            host,
            agent=None,
            reward=None,
            eval_reward=None,
            reward_urls=(),
            graders=(),
            eval_graders=(),
            judge=None,
            spool=folder,
            kept_rollouts=folder,
        )
        engine = None
    is_local = place.cluster.runtime == "local"
    with (
        closing(Readiness(journal.progress)) as readiness,
        folder_witness(config, run_dir, is_local) as proof,
    ):
        groups = _launch(place, algebra.schedule_length, engine, judge, host, journal, readiness, proof)
    return replace(groups, adapters_alone=adapters_alone)


def _launch(
    place: ClusterContext,
    schedule_length: int,
    engine: EngineSettings | None,
    judge: EngineSettings | None,
    host: HostSettings,
    journal: Journal,
    readiness: Readiness,
    folder_proof: FolderProof | None,
) -> Groups:
    config, plan, cluster = place.config, place.plan, place.cluster
    by_role: dict[str, WorkerGroup[Movable]] = {}
    say_fault = partial(journal.say, kind="fault")

    places = host_places(config, plan)

    def options_of(role: str) -> dict[str, Any]:
        options = {
            "processes": plan.role(role).processes,
            "num_threads": config.cluster.threads_per_process,
            "timeout_s": config.cluster.call_timeout_s,
        }
        # One call of every host waits for completions.
        is_engine = role in ("rollout", "judge")
        return options | ({"max_concurrency": EngineWorker.max_concurrency + len(places)} if is_engine else {})

    def launch(role: str, cls: type[M], *args: Any) -> WorkerGroup[M]:
        started_s = time.monotonic()
        group = cluster.launch(role, cls, args=args, wait=False, **options_of(role))
        by_role[role] = group
        readiness.watch(group, started_s)
        return group

    def launch_hosts() -> WorkerGroup[RolloutHost]:
        if host.simulation is not None:
            return launch("env", RolloutHost, host)
        started_s = time.monotonic()
        group = cluster.launch(
            "agents",
            RolloutHost,
            args=(host,),
            processes=places,
            timeout_s=config.cluster.call_timeout_s,
            wait=False,
        )
        readiness.watch(group, started_s)
        return group

    trust = config.trust_remote_code
    shared = [each for each in (engine, judge) if each is not None and each.entry.memory_share is not None]
    engines: WorkerGroup[EngineWorker] = (
        NoWorkers("rollout") if engine is None else launch("rollout", EngineWorker, engine)
    )
    # An engine that fills its memory share measures free memory: no other process may use the device meanwhile.
    # Trainers' processes start and load their libraries, but not their models.
    fills_share = any(each.options.cache_gib is None for each in shared)
    needs_room = bool(shared) and is_anything_offloaded(plan)
    measures_its_device = (fills_share or needs_room) and not are_devices_logical(cluster)
    judges: WorkerGroup[EngineWorker] | None = None
    judge_away = [] if judge is None else offloaded_parts(plan, "judge")
    early_hosts = launch_hosts() if measures_its_device else None
    if measures_its_device:
        for role, cls in _trainers(config).items():
            cluster.prepare(role, cls, **options_of(role))
        start_up(engines, say_fault)
        if judge is not None:
            # The two engines take turns: the judge's measures the device while the other is off it.
            away = offloaded_parts(plan, "rollout")
            if away:
                engines.call(EngineWorker.offload, away)
            judges = launch("judge", EngineWorker, judge)
            start_up(judges, say_fault)
            if judge_away:
                judges.call(EngineWorker.offload, judge_away)
            if away:
                engines.call(EngineWorker.onload, away)
        for device in sorted({d for process in plan.role("rollout").processes for d in process.devices}):
            memory = cluster.device_memory(device)
            if memory is not None:
                journal.say(f"device {device}: {memory.used / 2**30:.1f} GiB in use after the engines started")
    if judge is not None and judges is None:
        judges = launch("judge", EngineWorker, judge)
    options = settings.train_options(config, schedule_length)
    dtype = settings.engine_dtype(config)
    actor = launch("actor", ActorWorker, config.actor.model, options, dtype, trust, folder_proof)
    critic = reference = reward = inference = None
    if has_critic(config):
        options = settings.critic_options(config, schedule_length)
        proof = folder_proof and folder_proof.of("critic")
        critic = launch("critic", CriticWorker, critic_model(config), options, trust, proof)
    if has_reference(config):
        options = settings.train_options(config, schedule_length, is_trained=False)
        if config.reference.teachers:
            several: type[ModelWorker] = TeachersWorker
            weights = config.reference.teacher_weights or None
            reference = launch("reference", several, config.reference.teachers, weights, options, trust)
        else:
            reference = launch("reference", ModelWorker, config.reference.model or config.actor.model, options, trust)
    if has_reward_model(config) and engine is not None:
        reward = launch("reward", RewardWorker, config.reward.model, settings.reward_options(config), trust)
    if has_inference(config):
        options = settings.train_options(config, schedule_length, is_trained=False)
        inference = launch("inference", InferenceWorker, config.actor.model, options, dtype, trust)
    components: dict[str, WorkerGroup[ComponentWorker]] = {}
    if engine is not None:  # what they changed is in the groups that are replayed
        for each in settings.component_settings(config, plan):
            components[each.name] = launch(each.name, ComponentWorker, each)
    hosts = launch_hosts() if early_hosts is None else early_hosts
    faults.reach("start-up")
    warming = []
    if engine is not None and engine.entry.compiles and not measures_its_device and not are_devices_logical(cluster):
        # The engine starts longest. Memory is no concern: everything fits beside everything.
        warming = [group.start(ModelWorker.warm_up, config.data.max_length) for group in (actor, reference) if group]
    start_up(engines, say_fault)
    start_up(hosts, say_fault)
    if judges is not None and not measures_its_device:
        start_up(judges, say_fault)
        if judge_away:
            judges.call(EngineWorker.offload, judge_away)
    for role, group in by_role.items():
        if role != "env":  # started above
            group.ready()
    for warm_up in warming:
        warm_up.result()
    if host.spool is not None and len({place.node for place in places}) > 1:
        check_spool(hosts, Path(host.spool))
    rollout_hosts = RolloutHosts(hosts)
    if engine is not None:
        rollout_hosts.connect(engines)
    if judges is not None:
        rollout_hosts.connect_judge(judges)
    have_gpus = actor.call(ActorWorker.device_type)[0] == "cuda"
    return Groups(
        engines,
        actor,
        rollout_hosts,
        critic,
        reference,
        reward,
        inference,
        by_role,
        have_gpus,
        measures_its_device,
        judges,
        {} if judges is None else {"judge": judge_away},
        components=components,
    )


def host_places(config: Config, plan: Plan) -> list[Process]:
    """Return the places of the rollout hosts: as many as the config says, spread over the nodes with engines.

    With simulators they are those of the role env.
    """
    if has_simulator(config):
        return [Process(process.rank, process.node) for process in plan.role("env").processes]
    nodes = sorted({process.node for process in plan.role("rollout").processes}) or [0]
    return [Process(rank, nodes[rank % len(nodes)]) for rank in range(config.rollout.num_hosts or len(nodes))]


def check_spool(hosts: WorkerGroup[RolloutHost], folder: Path) -> None:
    """Raise if some host has another folder of that name than this process: finished groups go through it."""
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder) as mark:
        seen = hosts.call(RolloutHost.sees, mark.name)
    if not all(seen):
        raise RunError(
            f"rollout host {seen.index(False)}, on another node, does not see the files of {folder}, through which"
            " finished groups go: put run_dir on a disk that all nodes share, or set rollout.num_hosts to 1"
        )


def _trainers(config: Config) -> dict[str, type[ModelWorker]]:
    """Return the roles with a model behind a training backend, and the class of each."""
    roles: dict[str, tuple[type[ModelWorker], bool]] = {
        "actor": (ActorWorker, True),
        "critic": (CriticWorker, has_critic(config)),
        "reference": (TeachersWorker if config.reference.teachers else ModelWorker, has_reference(config)),
        "reward": (RewardWorker, has_reward_model(config)),
        "inference": (InferenceWorker, has_inference(config)),
    }
    return {role: cls for role, (cls, is_present) in roles.items() if is_present}
