"""Puts a reinforcement run together from its config, plan and worker groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from hotseat.config import Config
from hotseat.config.roles import ESTIMATORS_WITH_GROUP
from hotseat.loop.devices.memory import DeviceWatch
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.opening import OnCluster
from hotseat.loop.preflight import RlInputs
from hotseat.loop.rl.alarms import Alarms
from hotseat.loop.rl.canary import CanaryGuard, CanarySettings
from hotseat.loop.rl.checkpoint import RlCheckpoints
from hotseat.loop.rl.launch import Groups
from hotseat.loop.rl.ledger import Ledger
from hotseat.loop.rl.loop import RlRun
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.micro_batches import MicroBatches
from hotseat.loop.rl.phase_settings import PhaseSettings
from hotseat.loop.rl.prepare import PreparePhase
from hotseat.loop.rl.recovery import Recovery
from hotseat.loop.rl.rollout import Answering, RolloutPhase
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import RlState
from hotseat.loop.rl.step_metrics import StepMetrics
from hotseat.loop.rl.stream import SynchronousStream
from hotseat.loop.rl.sync import Routes, SyncPhase, sender_host
from hotseat.loop.rl.update import UpdatePhase
from hotseat.loop.setup import settings
from hotseat.loop.workers.models import EngineWorker
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.observe import Journal

COLUMNS = {
    "reward": "reward {:.3f}",
    "length": "length {:.1f}",
    "kl": "kl {:.4f}",
    "eval/accuracy": "accuracy {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_s": "{:.2f} s",
}


@contextmanager
def assemble(place: OnCluster, inputs: RlInputs, groups: Groups, ledger: Ledger, journal: Journal) -> Iterator[RlRun]:
    """Make the objects of a run whose worker groups are ready; at the end, close what holds devices or a thread."""
    config, plan, cluster = place.config, place.plan, place.cluster
    with ExitStack() as stack:
        scheduler = DeviceScheduler(
            plan,
            groups.by_role,
            timeout_s=config.cluster.call_timeout_s,
            is_gone=cluster.is_gone,
            measure=cluster.device_memory,
            timeline=journal.timeline,
        )
        stack.callback(scheduler.close)
        devices = sorted({d for role in plan.roles for process in role.processes for d in process.devices})
        watch = DeviceWatch(devices, cluster.device_memory)
        stack.callback(watch.close)
        meter = PhaseMeter(scheduler, groups.by_role, plan, watch)
        yield _connect(place, inputs, groups, ledger, journal, scheduler, meter)


def _connect(
    place: OnCluster,
    inputs: RlInputs,
    groups: Groups,
    ledger: Ledger,
    journal: Journal,
    scheduler: DeviceScheduler,
    meter: PhaseMeter,
) -> RlRun:
    """Make the phases and connect them."""
    config, algebra, prompts = place.config, inputs.algebra, inputs.prompts
    assert algebra.num_steps is not None
    warn = partial(journal.say, kind="warning")
    state = RlState.initial(config, prompts)
    phase_settings = PhaseSettings(config, algebra, state, warn)
    guard = CanaryGuard(
        CanarySettings.of(config, groups.have_gpus),
        prompts,
        groups.actor,
        groups.engines,
        groups.inference,
        meter.lease,
        warn,
    )

    def reconnect() -> None:
        """Connect hosts to the current engines, and drop requests of earlier connections."""
        groups.engines.call(EngineWorker.drop_requests)
        groups.hosts.call(RolloutHost.connect, groups.engines)

    recovery = Recovery(
        groups.engines,
        groups.hosts,
        scheduler,
        reconnect=reconnect,
        push=lambda: sync.push_again(),
        say=partial(journal.say, kind="fault"),
        measures_its_device=groups.measures_its_device,
    )
    routes = _routes(place, groups)
    sync = SyncPhase(groups, routes, state, guard, meter, scheduler, recovery, journal.say)
    answering = Answering(groups, phase_settings, meter, guard, sync)
    samples = SampleLog(groups, ledger, _alarms(config, journal), state, journal, config.log)
    rollout = RolloutPhase(answering, groups, phase_settings, state, recovery, samples, prompts, inputs.eval_prompts)
    stream = SynchronousStream(rollout)
    return RlRun(
        num_steps=algebra.num_steps,
        eval_every=config.eval.every,
        stream=stream,
        prepare=PreparePhase(groups, stream, phase_settings, meter, samples),
        update=UpdatePhase(groups, phase_settings, state, meter),
        sync=sync,
        meter=meter,
        metrics=StepMetrics(meter, recovery, guard, phase_settings, state, has_reference=groups.reference is not None),
        micro_batches=MicroBatches(groups.models, phase_settings, meter),
        samples=samples,
        checkpoints=RlCheckpoints(groups, scheduler, state, guard, ledger, phase_settings),
    )


def _routes(place: OnCluster, groups: Groups) -> Routes:
    config, plan = place.config, place.plan
    to_inference = None
    if groups.inference is not None:
        to_inference = settings.weight_transports(config, plan, groups.have_gpus, "inference")
    to_engines = settings.weight_transports(config, plan, groups.have_gpus)
    return Routes(to_engines, to_inference, sender_host(plan, place.cluster), config.cluster.call_timeout_s)


def _alarms(config: Config, journal: Journal) -> Alarms:
    return Alarms(
        journal.say,
        has_groups=config.algorithm.estimator in ESTIMATORS_WITH_GROUP,
        spike_factor=config.train.spike_factor,
        on_spike=config.train.on_spike,
    )
