"""The sync phase: the actor's weights to every engine, and the proof that they arrived."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotseat import faults
from hotseat.cluster.group import Group
from hotseat.weights import Audience, BroadcastData, Bucket, Lane, Lanes, check_digests, merge


@dataclass(frozen=True)
class Canary:
    """Answers that the policy sampled, of whose tokens trainer and engines compute log-probs after every push."""

    sequences: tuple[tuple[int, ...], ...]  # prompt and answer
    num_prompt: tuple[int, ...]  # tokens of each that are the prompt's
    temperature: float

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.sequences)) - sum(self.num_prompt)

    def sampled(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """The scores of sampled tokens alone, sequence by sequence, from those of all tokens."""
        return [score for row, start in zip(scores, self.num_prompt, strict=True) for score in row[start:]]


@dataclass(frozen=True)
class Proof:
    """Proof of what one side holds after a push: digests, and log-probs of the canary's sampled tokens.

    log_probs: None where there is no canary yet, or where the engine needs its cache to score and does not have it.
    """

    digests: dict[str, int]
    log_probs: list[float] | None
    undigested: frozenset[str] = frozenset()  # weights that no digest reaches: the canary guards them


@dataclass(frozen=True)
class PushReport:
    """Report of a push: its size and times, and what both sides make of the canary afterwards."""

    version: int
    num_buckets: int
    num_bytes: int
    transfer_s: float  # from the first gathering of weights until every engine has loaded all
    proof_s: float  # digests and canary, on both sides at once
    undigested: frozenset[str]  # weights of some engine that only the canary guards
    expected: list[float] | None  # the trainer's log-probs of the canary; None: there is no canary yet
    answers: list[list[float]] | None  # those of each engine; None: some engine can answer only in its next turn


def push_weights(
    actor: Group,
    engines: Group,
    version: int,
    canary: Canary | None,
    lanes: Lanes,
    audience: Audience | None = None,
    what: str = "engine",
) -> PushReport:
    """Send all weights under `version`. Raises `WeightError` naming the tensor if any engine does not serve them.

    `what`: the word for one that takes them, in errors.

    Both sides work at the same time where they can: on a small model the calls themselves are most of the time. The
    next bucket is packed while engines take the last; the one after that waits, since its memory is being read.
    """
    started_s = time.monotonic()
    packing = actor.start("begin_push", version, audience)
    engines.call("begin_load", version)
    packed_bytes: int | None = packing.result()[0]
    num_buckets = num_bytes = 0
    while packed_bytes is not None:
        num_bytes += packed_bytes
        taking = engines.start_scatter("take_bucket", _hand_out(actor, lanes))
        sending = actor.start("broadcast", ranks=[0]) if audience is not None else None
        packing = actor.start("pack_next")
        taking.result()  # First: an engine that dies says so at once, and whoever sends to it only in the end.
        if sending is not None:
            sending.result()
        packed_bytes = packing.result()[0]
        if num_buckets == 0:
            faults.reach("push.during")
        num_buckets += 1
    transferred_s = time.monotonic()
    proving = actor.start("finish_push", canary)
    proofs: list[Proof] = engines.call("finish_load", version, canary)
    sent: Proof = proving.result()[0]
    for rank, found in enumerate(proofs):
        reached = {name: digest for name, digest in sent.digests.items() if name not in found.undigested}
        check_digests(version, reached, found.digests, f"{what} {rank}")
    answers = [found.log_probs for found in proofs if found.log_probs is not None]
    is_complete = len(answers) == len(proofs)
    return PushReport(
        version,
        num_buckets,
        num_bytes,
        transfer_s=transferred_s - started_s,
        proof_s=time.monotonic() - transferred_s,
        undigested=frozenset().union(*(found.undigested for found in proofs)),
        expected=sent.log_probs,
        answers=answers if is_complete else None,
    )


def _hand_out(actor: Group, lanes: Lanes) -> list[Any]:
    """The packed bucket for each engine, as its lane takes it. Bytes in host memory stay out of this process."""
    found: dict[Lane, Any] = {}
    if "host" in lanes.engines:
        [found["host"]] = actor.start("packed", "host", ranks=[0], keep=True).result()
    if "ipc" in lanes.engines:
        found["ipc"] = merge(actor.call("packed", "ipc", ranks=lanes.sources))
    if "broadcast" in lanes.engines:
        [found["broadcast"]] = actor.call("packed", "broadcast", ranks=[0])
    return [
        _as_rank(found[lane], rank) if lane == "broadcast" else found[lane]
        for lane, rank in zip(lanes.engines, lanes.first_ranks, strict=True)
    ]


def _as_rank(bucket: Bucket, rank: int) -> Bucket:
    assert isinstance(bucket.data, BroadcastData)
    return replace(bucket, data=replace(bucket.data, first_rank=rank))
