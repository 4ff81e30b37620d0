"""The sync phase: the actor's weights to every engine, and the proof that they arrived."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat import faults
from hotseat.cluster.group import Group
from hotseat.weights import check_canary, check_digests


@dataclass(frozen=True)
class Canary:
    """Fixed token sequences on which trainer and engine must agree."""

    sequences: tuple[tuple[int, ...], ...]
    temperature: float
    tolerance: float


@dataclass(frozen=True)
class PushReport:
    """What a push carried, and the largest difference in the canary's log-probs afterwards."""

    version: int
    num_buckets: int
    canary_gap: float


@dataclass(frozen=True)
class Proof:
    """What one side holds after a push, and what it makes of the canary."""

    digests: dict[str, int]
    log_probs: list[list[float]]


def push_weights(actor: Group, engines: Group, version: int, canary: Canary) -> PushReport:
    """Send all weights under `version`. Raises `WeightError` naming the tensor if any engine does not serve them.

    Both sides work at the same time where they can: on a small model the calls themselves are most of the time.
    """
    packing = actor.start("begin_push", version)
    engines.call("begin_load", version)
    has_bucket = packing.result()[0]
    num_buckets = 0
    while has_bucket:
        [bucket] = actor.start("packed", ranks=[0], keep=True).result()
        taking = engines.start("take_bucket", bucket)
        has_bucket = actor.call("pack_next")[0]
        taking.result()
        if num_buckets == 0:
            faults.reach("push.during")
        num_buckets += 1
    sent: Proof = actor.call("finish_push", canary)[0]
    proofs: list[Proof] = engines.call("finish_load", version, canary)
    gaps = []
    for rank, found in enumerate(proofs):
        name = f"engine {rank}"
        check_digests(version, sent.digests, found.digests, name)
        gaps.append(check_canary(version, sent.log_probs, found.log_probs, canary.tolerance, name))
    return PushReport(version, num_buckets, max(gaps))
