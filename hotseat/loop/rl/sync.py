"""Sync phase: the actor's weights go to every engine, and both sides prove that they hold the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hotseat import faults
from hotseat.algorithms.adapters import WeightForm
from hotseat.cluster import Calling, Cluster, WorkerGroup
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.recovery import ENGINE
from hotseat.loop.rl.state import RlState
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.loop.workers.weight_check import Canary, TakesWeights
from hotseat.placement import Plan
from hotseat.registry.roles import role_entry
from hotseat.weights.broadcast import LOOPBACK, TIMEOUT_S, BroadcastData, BroadcastGroup
from hotseat.weights.bucket import Bucket
from hotseat.weights.device_ipc import merge
from hotseat.weights.transfer import check_digests
from hotseat.weights.transports import Transport, TransportPlan


@dataclass(frozen=True)
class Routes:
    """Transports of weights from the actor to engines, and to the ranks of the inference role if there are any."""

    to_engines: TransportPlan
    to_inference: TransportPlan | None
    sender_host: str
    timeout_s: float


@dataclass(eq=False)
class Pusher:
    """Pushes weights to the engines and the inference role, each after the other side has proved what it holds.

    restarts: how many processes were replaced, by their noun; replaced engines have to connect anew. bases_sent: the
    restarts of engines when all of them last got the weights below adapters.
    """

    groups: Groups
    routes: Routes
    state: RlState
    guard: CanaryGuard
    meter: PhaseMeter
    scheduler: DeviceScheduler
    restarts: Mapping[str, int]
    say: Callable[[str], object]
    _bases_sent: int | None = field(default=None, init=False)

    def push_again(self, ranks: Sequence[int] | None = None) -> None:
        """Push the version that is served, to engines that lost it: all, or these ranks, if no broadcast is in use."""
        self.push(self.state.version, None if self.routes.to_engines.receivers else ranks)

    def restore_dropped_weights(self) -> None:
        """Push again if the engines' weights were dropped to make room since the last push."""
        if not self.scheduler.has_weights("rollout"):
            self.push_again()

    def push(self, version: int, ranks: Sequence[int] | None = None) -> PushReport:
        """Push the actor's weights as this version, to all engines or these ranks, and have the canary judge them."""
        groups, routes, canary = self.groups, self.routes, self.guard.canary
        timeout_s = min(TIMEOUT_S, routes.timeout_s)
        # Receivers that were replaced have to connect anew: they are another generation.
        receivers = routes.to_engines.broadcast_group(self.restarts[ENGINE], routes.sender_host, timeout_s)
        to_inference = None
        with self.meter.lease("sync", "actor"):
            form = self._form()
            pushed = PushReport(version, 0, 0, 0.0, 0.0, frozenset(), None, None)  # that of a replay, without engines
            if groups.engines.size:
                pushed = push_weights(
                    groups.actor, groups.engines, version, canary, routes.to_engines, receivers, form=form, ranks=ranks
                )
            if ranks is None and groups.inference is not None and routes.to_inference is not None:
                transport = routes.to_inference
                receivers = transport.broadcast_group(self.restarts["inference"], routes.sender_host, timeout_s)
                to_inference = push_weights(
                    groups.actor, groups.inference, version, canary, transport, receivers, "inference rank"
                )
        self._bases_sent = self.restarts[ENGINE]
        self.scheduler.mark_weights_loaded("rollout")
        self.guard.check(pushed, to_inference)
        unseen = sorted(pushed.undigested)
        if unseen and version == 0:
            self.say(
                f"{len(unseen)} weights of the engines have no digest, such as {unseen[0]}: only the canary checks them"
            )
        return pushed

    def _form(self) -> WeightForm:
        """Return the form of the next push: adapters alone go to engines that have the weights below them."""
        if not self.groups.adapters_alone:
            return "merged"
        have_base = self._bases_sent == self.restarts[ENGINE] and self.scheduler.has_weights("rollout")
        return "adapters" if have_base else "apart"


def sender_host(plan: Plan, cluster: Cluster) -> str:
    """Return the address at which receivers on other devices meet the actor's first rank."""
    node = plan.role("actor").processes[0].node
    receivers = [role for role in plan.roles if role_entry(role.name).gets_weights]
    if all(process.node == node for role in receivers for process in role.processes):
        return LOOPBACK
    return cluster.nodes[node].address


@dataclass(frozen=True)
class PushReport:
    """Report of a push: its size and times, and the log-probs of the canary on both sides afterwards."""

    version: int
    num_buckets: int
    num_bytes: int
    transfer_s: float  # from the first gathering of weights until every engine has loaded all
    proof_s: float  # digests and canary, on both sides at once
    undigested: frozenset[str]  # weights of some engine that have no digest; only the canary guards them
    expected: list[float] | None  # the trainer's log-probs of the canary; None: there is no canary yet
    answers: list[list[float]] | None  # those of each engine; None: some engine can score only in its next lease
    ranks: tuple[int, ...] | None = None  # of the engines that it went to; None: all


def push_weights(
    actor: WorkerGroup[ActorWorker],
    engines: WorkerGroup[TakesWeights],
    version: int,
    canary: Canary | None,
    transports: TransportPlan,
    receivers: BroadcastGroup | None = None,
    what: str = "engine",
    form: WeightForm = "merged",
    ranks: Sequence[int] | None = None,
) -> PushReport:
    """Send all weights under `version`. Raises `WeightError` naming the tensor if any engine does not serve them.

    `what`: what errors call a receiver. `form`: of weights with adapters; "adapters" sends and proves these alone.
    `ranks`: of the only engines that get them; without a broadcast, in which all take part.

    Both sides work at the same time where they can: on a small model the calls themselves take most of the time. The
    next bucket is packed while engines load the current one; the one after that waits, since its memory is being read.
    """
    started_s = time.monotonic()
    chosen: Calling[TakesWeights] = engines
    if ranks is not None:
        chosen, transports = engines.on(*ranks), transports.only(ranks)
    packing = actor.start(ActorWorker.begin_push, version, receivers, form)
    chosen.call(TakesWeights.begin_load, version)
    packed_bytes = packing.result()[0]
    num_buckets = num_bytes = 0
    while packed_bytes is not None:
        num_bytes += packed_bytes
        taking = chosen.start_scatter(TakesWeights.take_bucket, _hand_out(actor, transports))
        sending = actor.on(0).start(ActorWorker.broadcast) if receivers is not None else None
        packing = actor.start(ActorWorker.pack_next)
        taking.result()  # First: the death of an engine shows here at once, but in `sending` only after its timeout.
        if sending is not None:
            sending.result()
        packed_bytes = packing.result()[0]
        if num_buckets == 0:
            faults.reach("push.during")
        num_buckets += 1
    transferred_s = time.monotonic()
    proving = actor.start(ActorWorker.finish_push, canary)
    proofs = chosen.call(TakesWeights.finish_load, version, canary)
    sent = proving.result()[0]
    for rank, proof in zip(engines.ranks if ranks is None else ranks, proofs, strict=True):
        reached = {name: digest for name, digest in sent.digests.items() if name not in proof.undigested}
        check_digests(version, reached, proof.digests, f"{what} {rank}")
    answers = [proof.log_probs for proof in proofs if proof.log_probs is not None]
    is_complete = len(answers) == len(proofs)
    return PushReport(
        version,
        num_buckets,
        num_bytes,
        transfer_s=transferred_s - started_s,
        proof_s=time.monotonic() - transferred_s,
        undigested=frozenset().union(*(proof.undigested for proof in proofs)),
        expected=sent.log_probs,
        answers=answers if is_complete else None,
        ranks=None if ranks is None else tuple(ranks),
    )


def _hand_out(actor: WorkerGroup[ActorWorker], transports: TransportPlan) -> list[Bucket]:
    """Return the packed bucket for each engine, by its transport. Bytes in host memory stay out of this process."""
    buckets: dict[Transport, Bucket] = {}
    if "host" in transports.engines:
        [bucket] = actor.on(0).call_and_keep(ActorWorker.packed, "host")
        buckets["host"] = bucket.as_argument()
    if "ipc" in transports.engines:
        buckets["ipc"] = merge(actor.on(*transports.sources).call(ActorWorker.packed, "ipc"))
    if "broadcast" in transports.engines:
        [buckets["broadcast"]] = actor.on(0).call(ActorWorker.packed, "broadcast")

    def as_rank(bucket: Bucket, rank: int) -> Bucket:
        assert isinstance(bucket.data, BroadcastData)
        return replace(bucket, data=replace(bucket.data, first_rank=rank))

    return [
        as_rank(buckets[transport], rank) if transport == "broadcast" else buckets[transport]
        for transport, rank in zip(transports.engines, transports.first_ranks, strict=True)
    ]
