"""The facts of an update that ranks exchange: losses, metrics, counts, and samples that may be to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotseat.train.nonfinite import sample_ids, suspects
from hotseat.types import MicroBatch


@dataclass(frozen=True)
class UpdateFacts:
    """One rank's facts about an update, or with `total` those of all ranks."""

    loss: float
    metrics: Mapping[str, Any]
    num_tokens: int
    num_sampled: int
    suspects: tuple[str, ...]  # samples whose loss is not finite
    samples: tuple[str, ...]  # all samples, if the gradient norm is not finite

    @staticmethod
    def of(
        micro_batches: Sequence[MicroBatch],
        losses: Sequence[Tensor],
        metrics: Sequence[Mapping[str, Tensor | float]],
        grad_norm: float,
    ) -> UpdateFacts:
        """Collect the facts of this rank. losses, metrics: one for each micro-batch that has tokens."""
        values: list[float] = torch.stack(list(losses)).tolist() if losses else []
        return UpdateFacts(
            loss=sum(values),
            metrics=sum_metrics(metrics),
            num_tokens=sum(batch.num_tokens for batch in micro_batches),
            num_sampled=sum(int(batch.mask.sum()) for batch in micro_batches),
            suspects=() if math.isfinite(sum(values)) else suspects(micro_batches, values),
            samples=() if math.isfinite(grad_norm) else sample_ids(micro_batches),
        )

    @staticmethod
    def total(ranks: Sequence[UpdateFacts]) -> UpdateFacts:
        """Add up the facts of all ranks, in rank order."""
        return UpdateFacts(
            loss=sum(rank.loss for rank in ranks),
            metrics=add_up([rank.metrics for rank in ranks]),
            num_tokens=sum(rank.num_tokens for rank in ranks),
            num_sampled=sum(rank.num_sampled for rank in ranks),
            suspects=tuple(sample for rank in ranks for sample in rank.suspects),
            samples=tuple(sample for rank in ranks for sample in rank.samples),
        )


def sum_metrics(metrics: Sequence[Mapping[str, Tensor | float]]) -> dict[str, Any]:
    """Add up each metric over micro-batches, with one transfer from the device."""
    values = [(name, value) for sums in metrics for name, value in sums.items()]
    tensors = [value.detach().double().reshape(-1) for _, value in values if isinstance(value, Tensor)]
    numbers = iter(torch.cat(tensors).tolist() if tensors else [])

    def number(value: Tensor | float) -> Any:
        if not isinstance(value, Tensor):
            return value
        return next(numbers) if value.ndim == 0 else [next(numbers) for _ in range(value.numel())]

    return add_up([{name: number(value)} for name, value in values])


def add_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up numbers, and lists entry by entry; of a metric whose name ends in `_max` keep the largest."""
    totals: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in totals:
                totals[name] = value
            elif isinstance(value, list):
                totals[name] = [a + b for a, b in zip(totals[name], value, strict=True)]
            else:
                totals[name] = max(totals[name], value) if name.endswith("_max") else totals[name] + value
    return totals
