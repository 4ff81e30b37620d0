"""Puts a reinforcement run together from its config, plan and worker groups."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from hotseat.agents.crash_record import num_given_up
from hotseat.algorithms.routing import RoutingShape
from hotseat.checks.reward_columns import label_hint
from hotseat.config import Config
from hotseat.config.presence import has_accuracy, has_agent, has_simulator, has_teacher_alone
from hotseat.config.resolved import overlap_queue, reward_parts, source_of
from hotseat.loop.devices.held_memory import DeviceWatch
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.inputs import RlInputs
from hotseat.loop.opening import ClusterContext
from hotseat.loop.rl.arrivals import Arrivals
from hotseat.loop.rl.canary import CanaryGuard, CanarySettings
from hotseat.loop.rl.components import Components
from hotseat.loop.rl.group_restarts import GroupRestarts
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.ledger import Ledger
from hotseat.loop.rl.loop import RlRun
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.overlapped import OverlappedStream
from hotseat.loop.rl.pacer import Pace
from hotseat.loop.rl.phases import PreparePhase, SyncPhase, UpdatePhase
from hotseat.loop.rl.recovery import Recovery, Replaceable
from hotseat.loop.rl.rl_checkpoints import RlCheckpoints
from hotseat.loop.rl.rollout import RolloutRunner, evaluate, group_filter
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import MicroBatches, PhaseSettings, RlState
from hotseat.loop.rl.step_metrics import Alarms, StepMetrics
from hotseat.loop.rl.stream import Recording, ReplayStream, Stream, SynchronousStream
from hotseat.loop.rl.sync import Pusher, Routes, sender_host
from hotseat.loop.rl.tickets import Tickets
from hotseat.loop.settings.training_settings import weight_transports
from hotseat.loop.state.run_dir import LOGS, ROLLOUTS, SPOOL
from hotseat.loop.state.watchdog import record_hang
from hotseat.loop.workers.folder_proof import witness
from hotseat.loop.workers.spool import KEPT_BYTES_PER_TOKEN, Spool
from hotseat.observe import Journal, Timeline
from hotseat.placement import GIB, Plan, shares_devices
from hotseat.planning.config_plan import is_anything_offloaded
from hotseat.planning.simulator_memory import keep_gib
from hotseat.registry.estimators import estimator_entry
from hotseat.registry.roles import role_entry
from hotseat.types import Prompt


def columns(config: Config) -> dict[str, str]:
    """Return the metrics of a step's line on the screen, and their formats."""
    evaluation = {"eval/accuracy": "accuracy {:.3f}"}
    if has_simulator(config):
        evaluation = {"extra/success": "success {:.3f}", "eval/success": "held-out success {:.3f}"}
    elif not has_accuracy(config):
        evaluation = {"eval/reward": "held-out reward {:.3f}"}
    main, form = next(iter(evaluation)), "accuracy" if has_accuracy(config) else "reward"
    if config.eval.sets and config.eval.path is None:
        evaluation.pop(main)  # it is of all sets together
    evaluation |= {f"eval/{name}/{form}": f"{name} {{:.3f}}" for name in config.eval.sets}
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
    context: ClusterContext,
    inputs: RlInputs,
    groups: Groups,
    run_dir: Path,
    journal: Journal,
    recording: Recording | None = None,
) -> Iterator[RlRun]:
    """Make the objects of a run whose worker groups are ready; at the end, close what holds devices or a thread.

    recording: of the run that is replayed; None: groups are sampled.
    """
    config, plan = context.config, context.plan
    prompts, num_steps = inputs.rows, inputs.algebra.num_steps
    assert num_steps is not None
    with ExitStack() as stack:
        scheduler, meter = _scheduler_and_meter(context, groups, journal, stack)
        warn = partial(journal.say, kind="warning")
        state = RlState.initial(config, prompts)
        phase_settings = PhaseSettings(config, inputs.algebra, state, warn)
        canary = CanarySettings.of(config, groups.have_gpus, is_merged=not groups.adapters_alone)
        guard = CanaryGuard(canary, prompts, groups.actor, groups.engines, groups.inference, meter.lease, warn)
        restarts: Counter[str] = Counter()
        pusher = Pusher(groups, _routes(context, groups), state, guard, meter, scheduler, restarts, journal.say)
        recovery = _recovery(context, groups, scheduler, pusher, restarts, run_dir, partial(journal.say, kind="fault"))
        components = _components(config, groups, meter)
        carries_over = config.overlap.staleness > 0 and shares_devices(plan)
        runner = RolloutRunner(groups, phase_settings, meter, guard, pusher, recovery, carries_over, components)
        ledger = Ledger(run_dir)
        samples = SampleLog(groups, ledger, _alarms(config, journal, prompts), state, journal, config.log)
        if config.log.keep_rollouts:
            journal.say(_kept_note(config, num_steps, run_dir / ROLLOUTS))
        stream: Stream
        if recording is not None:
            stream = ReplayStream(recording, groups.hosts)
        elif config.overlap.staleness == 0:
            stream = SynchronousStream(runner, state, samples, prompts, Arrivals(run_dir))
        else:
            draw = partial(_draw_rollout, journal.timeline, plan)
            tickets = _tickets(config, num_steps, prompts, state, Arrivals(run_dir))
            stream = OverlappedStream(tickets, prompts, runner, samples, Spool(run_dir / SPOOL), draw)
        checkpoints = RlCheckpoints(groups, scheduler, state, guard, ledger, stream, phase_settings)
        group_restarts = _group_restarts(context, groups, recovery, checkpoints, run_dir, journal)
        if recording is not None:
            group_restarts.max_restarts = 0  # a replay makes no checkpoints
        yield RlRun(
            num_steps=num_steps if recording is None else min(num_steps, recording.last_step),
            has_evaluation=bool(inputs.eval_prompts),
            eval_every=config.eval.every,
            stream=stream,
            evaluate=partial(evaluate, runner, inputs.eval_prompts, inputs.eval_sets),
            prepare=PreparePhase(groups, stream, phase_settings, meter, samples),
            update=UpdatePhase(groups, phase_settings, state, meter),
            sync=SyncPhase(pusher, state, guard, recovery),
            meter=meter,
            metrics=StepMetrics(
                meter,
                recovery,
                guard,
                phase_settings,
                state,
                has_reference=groups.reference is not None,
                has_agent=has_agent(config),
                components=components,
                num_group_restarts=lambda: group_restarts.num_restarts,
                is_replay=recording is not None,
            ),
            micro_batches=MicroBatches(groups.models, phase_settings, meter),
            samples=samples,
            checkpoints=checkpoints,
            restarts=group_restarts,
        )


def _scheduler_and_meter(
    context: ClusterContext, groups: Groups, journal: Journal, stack: ExitStack
) -> tuple[DeviceScheduler, PhaseMeter]:
    config, plan, cluster = context.config, context.plan, context.cluster
    on_devices = groups.on_devices(plan)
    scheduler = DeviceScheduler(
        plan,
        on_devices,
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
    return scheduler, PhaseMeter(scheduler, on_devices, plan, watch)


def _components(config: Config, groups: Groups, meter: PhaseMeter) -> Components | None:
    evaluating = [name for name, each in config.components.items() if each.evaluates]
    custom = {role: group for role, group in groups.by_role.items() if role in config.components}
    return Components(custom, groups.hosts, meter, evaluating) if custom else None


def _keep_simulator_memory(config: Config, journal: Journal, device: int, num_bytes: int) -> None:
    """Keep what simulators took on a device for later plans, and say so, unless the config says how much it is."""
    gib, configured = num_bytes / GIB, config.env.memory_gib
    if configured is None and keep_gib(config, gib):
        journal.say(f"simulators took {gib:.2f} GiB of device {device}; plans of this config count it from now on")
    elif configured is not None and gib > configured:
        journal.say(
            f"simulators took {gib:.2f} GiB of device {device}, and env.memory_gib is {configured:g}: set it higher"
        )


def _recovery(
    context: ClusterContext,
    groups: Groups,
    scheduler: DeviceScheduler,
    pusher: Pusher,
    restarts: Counter[str],
    run_dir: Path,
    say: Callable[[str], object],
) -> Recovery:
    roles = [
        Replaceable(
            groups.by_role[record.name],
            record.replaced_as,
            partial(record.connect, groups),
            needs_weights=role_entry(record.name).gets_weights,
            measures_its_device=groups.measures_its_device and record.start == "engine",
        )
        for record in groups.records
        if record.replaced_as is not None
    ]
    return Recovery(
        roles,
        scheduler,
        push=pusher.push_again,
        rejoin=partial(groups.hosts.rejoin, groups.engines),
        say=say,
        rejoins_in_lease=context.config.overlap.staleness == 0 or shares_devices(context.plan),
        restarts=restarts,
        num_given_up=partial(num_given_up, run_dir / LOGS),
    )


def _group_restarts(
    context: ClusterContext,
    groups: Groups,
    recovery: Recovery,
    checkpoints: RlCheckpoints,
    run_dir: Path,
    journal: Journal,
) -> GroupRestarts:
    restarted = [record.name for record in groups.records if record.replaced_as is None]
    proof = groups.folder_proof

    def drop_open_work() -> None:
        groups.reconnect()
        groups.hosts.forget_all()

    return GroupRestarts(
        {role: groups.by_role[role] for role in restarted},
        recovery.scheduler,
        context.config.run.max_restarts,
        makes_way=groups.have_gpus and is_anything_offloaded(context.plan),
        end_open_work=lambda: recovery.during(drop_open_work, is_push=True),
        settle=checkpoints.settle,
        proving=lambda: nullcontext() if proof is None else witness(Path(proof.folder), proof.name),
        examine=partial(record_hang, context.cluster, journal, run_dir),
        restarts=recovery.restarts,
    )


def _tickets(config: Config, num_steps: int, prompts: Sequence[Prompt], state: RlState, arrivals: Arrivals) -> Tickets:
    keep = group_filter(config, prompts)
    # A resumed run has another order than the one that is there now.
    return Tickets(pace_of(config, num_steps), keep, lambda count: state.order.next(count), arrivals)


def pace_of(config: Config, num_steps: int) -> Pace:
    """Return how far rollout may run ahead in a run of so many steps."""
    overlap, batch_size = config.overlap, config.rollout.batch_size
    return Pace(batch_size, overlap.staleness, overlap_queue(config), overlap.order, batch_size * num_steps)


def _kept_note(config: Config, num_steps: int, folder: Path) -> str:
    """Say what keeping all groups takes at most, dropped groups and texts not counted."""
    rollout = config.rollout
    num_tokens = num_steps * rollout.batch_size * rollout.samples_per_prompt * config.data.max_length
    bytes_per_token = KEPT_BYTES_PER_TOKEN
    if rollout.routing_replay:
        bytes_per_token += RoutingShape.of(source_of(config, config.actor.model).config()).bytes_per_token
    gib = num_tokens * bytes_per_token / 2**30
    return f"log.keep_rollouts: all groups stay in {folder}, at most {gib:.2f} GiB and their texts"


def _draw_rollout(timeline: Timeline, plan: Plan, since_s: float) -> None:
    for device in sorted({device for process in plan.role("rollout").processes for device in process.devices}):
        timeline.span("devices", f"device {device}", "rollout", since_s, time.time(), turn="rollout")


def _routes(context: ClusterContext, groups: Groups) -> Routes:
    config, plan = context.config, context.plan
    to_inference = None
    if groups.inference is not None:
        to_inference = weight_transports(config, plan, groups.have_gpus, "inference")
    to_engines = weight_transports(config, plan, groups.have_gpus)
    return Routes(to_engines, to_inference, sender_host(plan, context.cluster), config.cluster.call_timeout_s)


def _alarms(config: Config, journal: Journal, prompts: Sequence[Prompt]) -> Alarms:
    entry = estimator_entry(config.algorithm.estimator)
    return Alarms(
        journal.say,
        has_groups=entry.needs_group and not entry.compares_parts and not has_teacher_alone(config),
        spike_factor=config.train.spike_factor,
        on_spike=config.train.on_spike,
        hint=partial(label_hint, config, prompts),
        parts=tuple(reward_parts(config)) if entry.compares_parts else (),
    )
