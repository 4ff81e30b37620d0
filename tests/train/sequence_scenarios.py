"""Scenarios of four ranks in two groups that each share sequences; alone, one rank does the work of both groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hotseat.train.backend import TrainOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.packing import split_by_count

from .conformance import OPTIONS, ClippedLoss, Make, Scenario, outcome, some_segments, tiny_model

NUM_SHARING = 2


def _trains(shares: tuple[int, int], options: TrainOptions = OPTIONS, compiler: str | None = None) -> Scenario:
    """How many of four micro-batches each group gets."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        sharing = replace(options, sequence_parallel_size=min(NUM_SHARING, num_ranks), compile=compiler is not None)
        model = tiny_model(num_key_value_heads=1)
        backend = FSDPBackend(model, sharing, unit_bytes=0, _compiler=compiler) if compiler else make(model, sharing)
        facts, scores = [], []
        for step in range(3):
            work = split_by_count(some_segments(12, seed=step), 3)
            mine = work if num_ranks == 1 else (work[: shares[0]], work[shares[0] :])[rank // NUM_SHARING]
            report = backend.update(mine, ClippedLoss(0.01), 0.9)
            facts.append(
                (report.loss, report.grad_norm, report.num_tokens, report.num_sampled, report.metrics["clipped"])
            )
            scores += backend.log_probs(work, 0.9)
        return outcome(backend, facts, scores)

    return scenario


SCENARIOS: dict[str, Scenario] = {
    "even": _trains((2, 2)),
    "uneven": _trains((3, 1)),
    "one_group_is_empty": _trains((4, 0)),
    "recomputed": _trains((1, 3), replace(OPTIONS, gradient_checkpointing=True)),
    "compiled": _trains((2, 2), compiler="aot_eager"),
}
