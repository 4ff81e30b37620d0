"""Starts the processes of a reinforcement run: one group per role, on the devices that the plan gives it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from hotseat import faults
from hotseat.checks.pipeline import DEVICES
from hotseat.checks.stage import DeviceContext, run_checks
from hotseat.cluster import WorkerGroup
from hotseat.config.batches import BatchAlgebra
from hotseat.config.presence import has_evaluation
from hotseat.errors import RunError
from hotseat.loop.opening import ClusterContext, folder_witness
from hotseat.loop.rl.groups import Groups, RolloutHosts
from hotseat.loop.rl.recovery import start_up
from hotseat.loop.rl.role_records import LaunchContext, RoleRecord, engine_settings_of, host_places, records_of
from hotseat.loop.rl.stream import Recording
from hotseat.loop.settings.rollout_settings import are_adapters_alone, host_settings, teacher_engine_settings
from hotseat.loop.state.run_dir import LOGS
from hotseat.loop.state.watchdog import Readiness
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.host_settings import HostSettings, ScorerSettings
from hotseat.loop.workers.model_workers import ActorWorker, ModelWorker
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.observe import Journal
from hotseat.planning.config_plan import are_devices_logical, offloaded_parts
from hotseat.registry.roles import role_entry


def launch_groups(
    context: ClusterContext,
    algebra: BatchAlgebra,
    eos_token_ids: tuple[int, ...],
    run_dir: Path,
    journal: Journal,
    recording: Recording | None = None,
) -> Groups:
    """Start all roles and connect them. They start together, unless engines have to measure their devices first.

    recording: groups of the run that is replayed, which takes engines and rewards only to evaluate; None: groups are
    sampled.
    """
    assert algebra.schedule_length is not None
    config, cluster = context.config, context.cluster
    on_gpu = not are_devices_logical(cluster)
    adapters_alone = are_adapters_alone(config, on_gpu=on_gpu)
    run_checks(DeviceContext(config=config, on_gpu=on_gpu), DEVICES)
    samples = recording is None or has_evaluation(config)
    engines = engine_settings_of(context, eos_token_ids, run_dir / LOGS, adapters_alone) if samples else {}
    host = host_settings(config, run_dir)
    with (
        closing(Readiness(journal.progress)) as readiness,
        folder_witness(config, run_dir, cluster.is_in_process) as proof,
    ):
        launch = LaunchContext(
            config,
            context.plan,
            cluster,
            algebra.schedule_length,
            engines,
            host if recording is None else replaying(host, recording.folder, samples),
            proof,
            samples,
            teacher=teacher_engine_settings(config, run_dir / LOGS),
        )
        launching = _Launching(launch, readiness, journal)
        launching.launch_all()
        return replace(launching.connect(), adapters_alone=adapters_alone)


class _Launching:
    """Starts the processes of every role. `groups`: worker groups that are launched so far, by role."""

    def __init__(self, launch: LaunchContext, readiness: Readiness, journal: Journal):
        self._launch = launch
        self._readiness = readiness
        self._journal = journal
        self._records = records_of(launch)
        self._offloaded = {
            record.name: offloaded_parts(launch.plan, record.name)
            for record in self._records
            if record.is_offloaded_first
        }
        self.groups: dict[str, WorkerGroup[Any]] = {}

    def launch_all(self) -> None:
        """Launch all roles, and wait until they are ready."""
        started = self._start_engines() if self._launch.measures_its_device else []
        for record in self._records:
            if record.name not in self.groups:
                self._launch_role(record)
        faults.reach("start-up")
        max_length = self._launch.config.data.max_length
        warmed = [record.name for record in self._records if record.warms_up and self._launch.warms_models_up]
        warming = [self.groups[role].start(ModelWorker.warm_up, max_length) for role in warmed]
        for record in self._records:
            if record.replaced_as is not None and record not in started:
                self._wait_until_ready(record)
        for group in self.groups.values():
            group.ready()
        for warm_up in warming:
            warm_up.result()

    def connect(self) -> Groups:
        """Connect the hosts to the engines, and return all groups."""
        [hosts] = [RolloutHosts(self.groups[role]) for role in ("env", "agents") if role in self.groups]
        groups = Groups(
            self.groups,
            hosts,
            have_gpus=self.groups["actor"].call(ActorWorker.device_type)[0] == "cuda",
            measures_its_device=self._launch.measures_its_device,
            records=tuple(self._records),
            offloaded=self._offloaded,
            folder_proof=self._launch.folder_proof,
        )
        places, spool = host_places(self._launch.config, self._launch.plan), self._launch.host.spool
        if spool is not None and len({process.node for process in places}) > 1:
            check_spool(hosts.workers, Path(spool))
        if groups.engines.size:
            hosts.connect(groups.engines)
        if groups.judge is not None:
            hosts.connect_judge(groups.judge)
        return groups

    def _start_engines(self) -> list[RoleRecord]:
        """Start engines one after another, each while the earlier ones are off the devices, and return their roles.

        Processes of models start meanwhile and load their libraries, but not their models. So do hosts.
        """
        engines = [record for record in self._records if record.start == "engine"]
        for record in [engines[0], *(record for record in self._records if record.start == "host")]:
            self._launch_role(record)
        for record in self._records:
            if role_entry(record.name).kind == "model":
                worker, _ = record.worker(self._launch)
                self._launch.cluster.prepare(record.name, worker, **record.options(self._launch))
        self._wait_until_ready(engines[0])
        for index, record in enumerate(engines[1:], start=1):
            with self._off_devices(engines[:index]):
                self._launch_role(record)
                self._wait_until_ready(record)
        policy_engines = self._launch.plan.role("rollout").processes
        for device in sorted({device for process in policy_engines for device in process.devices}):
            memory = self._launch.cluster.device_memory(device)
            if memory is not None:
                self._journal.say(f"device {device}: {memory.used / 2**30:.1f} GiB in use after the engines started")
        return engines

    @contextmanager
    def _off_devices(self, engines: Sequence[RoleRecord]) -> Iterator[None]:
        """Offload from engines that have started what the plan ever offloads, for as long as another one starts."""
        leaving = {
            self.groups[record.name]: offloaded_parts(self._launch.plan, record.name)
            for record in engines
            if not record.is_offloaded_first  # else it is off its devices already
        }
        moved = {group: parts for group, parts in leaving.items() if parts}
        for group, parts in moved.items():
            group.call(EngineWorker.offload, parts)
        yield
        for group, parts in moved.items():
            group.call(EngineWorker.onload, parts)

    def _launch_role(self, record: RoleRecord) -> None:
        started_s = time.monotonic()
        worker, arguments = record.worker(self._launch)
        options = record.options(self._launch)
        group = self._launch.cluster.launch(record.name, worker, args=arguments, wait=False, **options)
        self.groups[record.name] = group
        self._readiness.watch(group, started_s)

    def _wait_until_ready(self, record: RoleRecord) -> None:
        """Wait until a role that can be replaced is ready; offload what the plan keeps off its devices at first."""
        group = self.groups[record.name]
        start_up(group, partial(self._journal.say, kind="fault"))
        if self._offloaded.get(record.name):
            group.call(EngineWorker.offload, self._offloaded[record.name])


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


def replaying(host: HostSettings, recorded: Path, samples: bool) -> HostSettings:
    """Return the settings of hosts that read groups from a folder of a recorded run.

    samples: they also sample and score, for evaluations.
    """
    folder = str(recorded.absolute())
    reading = replace(host, spool=folder, kept_rollouts=folder)
    return reading if samples else replace(reading, agent=None, scorers=ScorerSettings())
