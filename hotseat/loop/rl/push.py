"""A push: the actor's weights go to every engine, and digests prove that they arrived."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hotseat import faults
from hotseat.algorithms.adapters import WeightForm
from hotseat.cluster import Calling, WorkerGroup
from hotseat.loop.workers.weight_check import Canary, WeightCheck
from hotseat.weights.broadcast import BroadcastData, BroadcastGroup
from hotseat.weights.bucket import Bucket
from hotseat.weights.device_ipc import merge
from hotseat.weights.transfer import check_digests
from hotseat.weights.transports import Transport, TransportPlan


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


class SendsWeights(Protocol):
    """Calls that a push makes to a rank of the actor. All ranks gather weights; the first can broadcast."""

    def begin_push(
        self, version: int, receivers: BroadcastGroup | None = None, form: WeightForm = "merged"
    ) -> int | None:
        """Gather the first bucket: return its bytes, or None if there is none."""

    def pack_next(self) -> int | None:
        """Gather the next bucket: return its bytes, or None if there is none."""

    def packed(self, transport: Transport) -> Bucket:
        """Return the gathered bucket, for engines on this transport."""

    def broadcast(self) -> None:
        """Send the gathered bucket to all engines on that transport."""

    def finish_push(self, canary: Canary | None) -> WeightCheck:
        """Return the proof of what was sent."""


class TakesWeights(Protocol):
    """Calls that a push makes to an engine or a rank of the inference role."""

    def begin_load(self, version: int) -> None:
        """Get ready for the buckets of a version."""

    def take_bucket(self, bucket: Bucket) -> None:
        """Load the weights of one bucket."""

    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        """Return the proof of what was loaded."""


def push_weights(
    actor: WorkerGroup[SendsWeights],
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
    packing = actor.start(SendsWeights.begin_push, version, receivers, form)
    chosen.call(TakesWeights.begin_load, version)
    packed_bytes = packing.result()[0]
    num_buckets = num_bytes = 0
    while packed_bytes is not None:
        num_bytes += packed_bytes
        taking = chosen.start_scatter(TakesWeights.take_bucket, _hand_out(actor, transports))
        sending = actor.on(0).start(SendsWeights.broadcast) if receivers is not None else None
        packing = actor.start(SendsWeights.pack_next)
        taking.result()  # First: the death of an engine shows here at once, but in `sending` only after its timeout.
        if sending is not None:
            sending.result()
        packed_bytes = packing.result()[0]
        if num_buckets == 0:
            faults.reach("push.during")
        num_buckets += 1
    transferred_s = time.monotonic()
    proving = actor.start(SendsWeights.finish_push, canary)
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


def _hand_out(actor: WorkerGroup[SendsWeights], transports: TransportPlan) -> list[Bucket]:
    """Return the packed bucket for each engine, by its transport. Bytes in host memory stay out of this process."""
    buckets: dict[Transport, Bucket] = {}
    if "host" in transports.engines:
        [bucket] = actor.on(0).call_and_keep(SendsWeights.packed, "host")
        buckets["host"] = bucket.as_argument()
    if "ipc" in transports.engines:
        buckets["ipc"] = merge(actor.on(*transports.sources).call(SendsWeights.packed, "ipc"))
    if "broadcast" in transports.engines:
        [buckets["broadcast"]] = actor.on(0).call(SendsWeights.packed, "broadcast")
    return [
        _as_rank(buckets[transport], rank) if transport == "broadcast" else buckets[transport]
        for transport, rank in zip(transports.engines, transports.first_ranks, strict=True)
    ]


def _as_rank(bucket: Bucket, rank: int) -> Bucket:
    assert isinstance(bucket.data, BroadcastData)
    return replace(bucket, data=replace(bucket.data, first_rank=rank))
