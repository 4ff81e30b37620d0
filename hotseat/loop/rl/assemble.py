"""Puts a reinforcement run together from its config, plan and worker groups."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from hotseat.config import Config
from hotseat.config.resolved import overlap_queue
from hotseat.config.roles import has_accuracy, has_simulator
from hotseat.loop.devices.memory import DeviceWatch
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.opening import ClusterContext
from hotseat.loop.planning.simulator_memory import keep_gib
from hotseat.loop.preflight import RlInputs
from hotseat.loop.rl.alarms import Alarms
from hotseat.loop.rl.arrivals import Arrivals
from hotseat.loop.rl.canary import CanaryGuard, CanarySettings
from hotseat.loop.rl.checkpoint import RlCheckpoints
from hotseat.loop.rl.components import Components
from hotseat.loop.rl.launch import Groups
from hotseat.loop.rl.ledger import Ledger
from hotseat.loop.rl.loop import RlRun
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.micro_batches import MicroBatches
from hotseat.loop.rl.overlapped import Callbacks, OverlappedStream, RolloutRequest
from hotseat.loop.rl.pacer import Pace
from hotseat.loop.rl.phase_settings import PhaseSettings
from hotseat.loop.rl.prepare import PreparePhase
from hotseat.loop.rl.recovery import Recovery
from hotseat.loop.rl.replay import Recording, ReplayStream
from hotseat.loop.rl.rollout import RolloutPhase, RolloutRunner, group_filter
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import RlState
from hotseat.loop.rl.step_metrics import StepMetrics
from hotseat.loop.rl.stream import Stream, SynchronousStream
from hotseat.loop.rl.sync import Routes, SyncPhase, sender_host
from hotseat.loop.rl.tickets import Tickets
from hotseat.loop.rl.update import UpdatePhase
from hotseat.loop.setup import settings
from hotseat.loop.state.run_dir import ROLLOUTS, SPOOL
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.spool import KEPT_BYTES_PER_TOKEN, Spool
from hotseat.observe import Journal, Timeline
from hotseat.placement import GIB, Plan, shares_devices
from hotseat.registry.estimators import estimator_entry


def columns(config: Config) -> dict[str, str]:
    """Return the metrics of a step's line on the screen, and their formats."""
    evaluation = {"eval/accuracy": "accuracy {:.3f}"}
    if has_simulator(config):
        evaluation = {"extra/success": "success {:.3f}", "eval/success": "held-out success {:.3f}"}
    elif not has_accuracy(config):
        evaluation = {"eval/reward": "held-out reward {:.3f}"}
    return {
        "reward": "reward {:.3f}",
        "length": "length {:.1f}",
        "kl": "kl {:.4f}",
        "samples_failed": "failed {:,.0f}",
        **evaluation,
        "eval/failed": "held-out failed {:,.0f}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "step_s": "{:.2f} s",
    }


@contextmanager
def assemble(
    place: ClusterContext,
    inputs: RlInputs,
    groups: Groups,
    run_dir: Path,
    journal: Journal,
    recording: Recording | None = None,
) -> Iterator[RlRun]:
    """Make the objects of a run whose worker groups are ready; at the end, close what holds devices or a thread.

    recording: of the run that is replayed; None: groups are sampled.
    """
    config, plan, cluster = place.config, place.plan, place.cluster
    with ExitStack() as stack:
        scheduler = DeviceScheduler(
            plan,
            groups.by_role,
            timeout_s=config.cluster.call_timeout_s,
            is_gone=cluster.is_gone,
            measure=cluster.device_memory,
            timeline=journal.timeline,
            offloaded=groups.offloaded,
            when_measured=partial(_keep_simulator_memory, config, journal),
        )
        stack.callback(scheduler.close)
        devices = sorted({d for role in plan.roles for process in role.processes for d in process.devices})
        watch = DeviceWatch(devices, cluster.device_memory)
        stack.callback(watch.close)
        meter = PhaseMeter(scheduler, groups.by_role, plan, watch)
        yield _connect(place, inputs, groups, run_dir, journal, scheduler, meter, recording)


def _keep_simulator_memory(config: Config, journal: Journal, device: int, num_bytes: int) -> None:
    """Keep what simulators took on a device for later plans, and say so, unless the config says how much it is."""
    gib, configured = num_bytes / GIB, config.env.memory_gib
    if configured is None and keep_gib(config, gib):
        journal.say(f"simulators took {gib:.2f} GiB of device {device}; plans of this config count it from now on")
    elif configured is not None and gib > configured:
        journal.say(
            f"simulators took {gib:.2f} GiB of device {device}, and env.memory_gib is {configured:g}: set it higher"
        )


def _connect(
    place: ClusterContext,
    inputs: RlInputs,
    groups: Groups,
    run_dir: Path,
    journal: Journal,
    scheduler: DeviceScheduler,
    meter: PhaseMeter,
    recording: Recording | None,
) -> RlRun:
    """Make the phases and connect them."""
    config, plan, algebra, prompts = place.config, place.plan, inputs.algebra, inputs.prompts
    assert algebra.num_steps is not None
    warn = partial(journal.say, kind="warning")
    state = RlState.initial(config, prompts)
    phase_settings = PhaseSettings(config, algebra, state, warn)
    guard = CanaryGuard(
        CanarySettings.of(config, groups.have_gpus, is_merged=not groups.adapters_alone),
        prompts,
        groups.actor,
        groups.engines,
        groups.inference,
        meter.lease,
        warn,
    )

    def reconnect(ranks: Sequence[int] | None = None) -> None:
        """Connect hosts of these ranks, or all, to the current engines; drop requests of earlier connections."""
        # Hosts first: an episode that is still waited for would fail when its request is dropped.
        connected = groups.hosts.connect(groups.engines, ranks)
        groups.engines.call(EngineWorker.drop_requests, connected)
        if groups.judge is not None and ranks is not None:  # all: engines changed, not hosts or the judge
            reconnect_judge(ranks)

    def reconnect_judge(ranks: Sequence[int] | None = None) -> None:
        """Connect hosts of these ranks, or all, to the judge's engines; drop requests of earlier connections."""
        assert groups.judge is not None
        groups.judge.call(EngineWorker.drop_requests, groups.hosts.connect_judge(groups.judge, ranks))

    recovery = Recovery(
        groups.engines,
        groups.hosts.workers,
        scheduler,
        reconnect=reconnect,
        push=lambda ranks: sync.push_again(ranks),
        rejoin=lambda ranks: groups.hosts.rejoin(groups.engines, ranks),
        say=partial(journal.say, kind="fault"),
        rejoins_in_lease=config.overlap.staleness == 0 or shares_devices(plan),
        measures_its_device=groups.measures_its_device,
        is_env="env" in groups.by_role,
        judge=groups.judge,
        reconnect_judge=reconnect_judge,
    )
    routes = _routes(place, groups)
    sync = SyncPhase(groups, routes, state, guard, meter, scheduler, recovery, journal.say)
    is_shared = config.overlap.staleness > 0 and shares_devices(plan)
    evaluating = [name for name, each in config.components.items() if each.evaluates]
    components = Components(groups.components, groups.hosts, meter, evaluating) if groups.components else None
    answering = RolloutRunner(
        groups, phase_settings, meter, guard, sync, recovery, carries_over=is_shared, components=components
    )
    ledger = Ledger(run_dir)
    samples = SampleLog(groups, ledger, _alarms(config, journal), state, journal, config.log)
    rollout = RolloutPhase(answering, groups, phase_settings, state, recovery, samples, prompts, inputs.eval_prompts)
    if config.log.keep_rollouts:
        journal.say(_kept_note(config, algebra.num_steps, run_dir / ROLLOUTS))
    record = Arrivals(run_dir)
    stream: Stream = SynchronousStream(rollout, record)
    if recording is not None:
        stream = ReplayStream(recording, groups.hosts)
    elif config.overlap.staleness > 0:
        draw = partial(_draw_rollout, journal.timeline, plan)
        callbacks = Callbacks(rollout.evaluate, answering.score, reconnect, samples.record_unfinished, draw)
        tickets = Tickets(
            pace_of(config, algebra.num_steps),
            group_filter(config, prompts),
            lambda count: state.order.next(count),
            record,
        )
        asking = RolloutRequest(prompts, config.rollout.samples_per_prompt, settings.sampling(config))
        sampling = answering.sampling if is_shared else None
        spool, in_flight = Spool(run_dir / SPOOL), config.overlap.in_flight
        stream = OverlappedStream(tickets, asking, in_flight, groups.hosts, spool, recovery, callbacks, sampling)
    return RlRun(
        num_steps=algebra.num_steps if recording is None else min(algebra.num_steps, recording.num_steps),
        has_evaluation=bool(inputs.eval_prompts) and recording is None,
        eval_every=config.eval.every,
        stream=stream,
        prepare=PreparePhase(groups, stream, phase_settings, meter, samples),
        update=UpdatePhase(groups, phase_settings, state, meter),
        sync=sync,
        meter=meter,
        metrics=StepMetrics(
            meter,
            recovery,
            guard,
            phase_settings,
            state,
            has_reference=groups.reference is not None,
            components=components,
        ),
        micro_batches=MicroBatches(groups.models, phase_settings, meter),
        samples=samples,
        checkpoints=RlCheckpoints(groups, scheduler, state, guard, ledger, stream, phase_settings),
    )


def pace_of(config: Config, num_steps: int) -> Pace:
    """Return how far rollout may run ahead in a run of so many steps."""
    overlap, batch_size = config.overlap, config.rollout.batch_size
    return Pace(batch_size, overlap.staleness, overlap_queue(config), overlap.order, batch_size * num_steps)


def _kept_note(config: Config, num_steps: int, folder: Path) -> str:
    """Say what keeping all groups takes at most, dropped groups and texts not counted."""
    rollout = config.rollout
    num_tokens = num_steps * rollout.batch_size * rollout.samples_per_prompt * config.data.max_length
    gib = num_tokens * KEPT_BYTES_PER_TOKEN / 2**30
    return f"log.keep_rollouts: all groups stay in {folder}, at most {gib:.2f} GiB and their texts"


def _draw_rollout(timeline: Timeline, plan: Plan, since_s: float) -> None:
    """Draw the engines' devices as busy with rollout until now."""
    for device in sorted({device for process in plan.role("rollout").processes for device in process.devices}):
        timeline.span("devices", f"device {device}", "rollout", since_s, time.time(), turn="rollout")


def _routes(place: ClusterContext, groups: Groups) -> Routes:
    config, plan = place.config, place.plan
    to_inference = None
    if groups.inference is not None:
        to_inference = settings.weight_transports(config, plan, groups.have_gpus, "inference")
    to_engines = settings.weight_transports(config, plan, groups.have_gpus)
    return Routes(to_engines, to_inference, sender_host(plan, place.cluster), config.cluster.call_timeout_s)


def _alarms(config: Config, journal: Journal) -> Alarms:
    return Alarms(
        journal.say,
        has_groups=estimator_entry(config.algorithm.estimator).needs_group,
        spike_factor=config.train.spike_factor,
        on_spike=config.train.on_spike,
    )
