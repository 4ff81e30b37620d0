"""The sync phase: the actor's weights to every engine, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def push_weights(actor: Group, engines: Group, version: int, canary: Canary) -> PushReport:
    """Send all weights under `version`. Raises `WeightError` naming the tensor if any engine does not serve them."""
    actor.call("begin_push", version)
    engines.call("begin_load", version)
    num_buckets = 0
    while actor.call("pack_next")[0]:
        [bucket] = actor.start("packed", ranks=[0], keep=True).result()
        engines.call("take_bucket", bucket)
        num_buckets += 1
    live = engines.start("finish_load", version)
    sent = actor.call("digest")[0]
    for rank, found in enumerate(live.result()):
        check_digests(version, sent, found, f"engine {rank}")
    return PushReport(version, num_buckets, _check_canary(actor, engines, version, canary))


def _check_canary(actor: Group, engines: Group, version: int, canary: Canary) -> float:
    sequences: Sequence[Sequence[int]] = canary.sequences
    expected = actor.call("canary", sequences, canary.temperature)[0]
    answers = engines.call("score", sequences, canary.temperature)
    return max(
        check_canary(version, expected, found, canary.tolerance, f"engine {rank}") for rank, found in enumerate(answers)
    )
