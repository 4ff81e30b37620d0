"""The sync phase: the actor's weights to every engine, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
class Proof:
    """What one side holds after a push, and what it makes of the canary; None: it cannot say yet."""

    digests: dict[str, int]
    log_probs: list[list[float]] | None


@dataclass(frozen=True)
class PushReport:
    """What a push carried, and the largest difference in the canary's log-probs afterwards.

    canary_gap: None while some engine owes its answer: it needs a cache to score, and gets that with its next turn.
    """

    version: int
    num_buckets: int
    expected: list[list[float]]  # the trainer's log-probs of the canary
    canary_gap: float | None


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
    assert sent.log_probs is not None
    proofs: list[Proof] = engines.call("finish_load", version, canary)
    for rank, found in enumerate(proofs):
        check_digests(version, sent.digests, found.digests, f"engine {rank}")
    answers = [found.log_probs for found in proofs if found.log_probs is not None]
    is_complete = len(answers) == len(proofs)
    gap = largest_gap(version, sent.log_probs, answers, canary.tolerance) if is_complete else None
    return PushReport(version, num_buckets, sent.log_probs, gap)


def ask_canary(engines: Group, pushed: PushReport, canary: Canary) -> PushReport:
    """The answers that engines owed after a push."""
    answers = engines.call("score", canary)
    return replace(pushed, canary_gap=largest_gap(pushed.version, pushed.expected, answers, canary.tolerance))


def largest_gap(
    version: int, expected: list[list[float]], answers: Sequence[list[list[float]]], tolerance: float
) -> float:
    """Over all engines. Raises `WeightError` above the tolerance."""
    return max(
        check_canary(version, expected, found, tolerance, f"engine {rank}") for rank, found in enumerate(answers)
    )
