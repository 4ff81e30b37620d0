"""The facts of an update that ranks exchange, and the guard against updates that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotseat.errors import NonFiniteError
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


# --- updates that are not finite --------------------------------------------------------------------------------------


_MAX_NAMED = 16  # samples in an error message


class UpdateHistory:
    """Counts updates, remembers the samples of skipped ones, and ends the run after too many of those in a row."""

    def __init__(self, max_in_a_row: int):
        self._max_in_a_row = max_in_a_row
        self._samples: list[tuple[str, ...]] = []  # of the last updates in a row that were not finite
        self.version = 0  # of the weights: how many updates they have had, those before a `load` included
        self.num_skipped = 0  # in the whole run, those before a `load` included

    def counters(self) -> dict[str, Tensor]:
        """Return what a checkpoint has of this, by name."""
        return {"counter.version": torch.tensor(self.version), "counter.num_skipped": torch.tensor(self.num_skipped)}

    def restore(self, counters: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint, which ends a row of skipped updates."""
        self.version, self.num_skipped = int(counters["counter.version"]), int(counters["counter.num_skipped"])
        self._samples = []

    def record_step(self) -> None:
        """Record an update that was finite: a row of skipped ones is over."""
        self.version += 1
        self._samples = []

    def record_overflow(self) -> None:
        """Record an update that was skipped because the loss scale was too high: no sample is to blame."""
        self.num_skipped += 1

    def record_skip(self, samples: Sequence[str], *, loss: float, grad_norm: float) -> None:
        """Record an update that was skipped; raise `NonFiniteError` if it is one too many in a row.

        samples: those that may be to blame.
        """
        self.num_skipped += 1
        self._samples.append(tuple(samples))
        if len(self._samples) < self._max_in_a_row:
            return
        named = list(dict.fromkeys(sample for samples in self._samples for sample in samples))
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        raise NonFiniteError(
            f"{len(self._samples)} updates in a row were not finite (last: loss {loss}, gradient norm"
            f" {grad_norm}), after version {self.version}; samples: {', '.join(named[:_MAX_NAMED])}{more}. Look at"
            " their rewards and advantages, or lower the learning rate"
        )


def suspects(micro_batches: Sequence[MicroBatch], losses: Sequence[float]) -> tuple[str, ...]:
    """List samples of the micro-batches whose loss is not finite: those with a value that is not, or else all.

    losses: one for each micro-batch that has tokens.
    """
    samples: list[str] = []
    real = [batch for batch in micro_batches if batch.num_tokens > 0]
    for batch, loss in zip(real, losses, strict=True):
        if math.isfinite(loss):
            continue
        is_bad = torch.zeros(batch.num_segments, dtype=torch.bool)
        segment = batch.layout.token_segment.cpu()
        for values in (batch.weights, *batch.fields.values()):
            bad = ~values.detach().cpu().double().isfinite().reshape(values.shape[0], -1).all(-1)
            is_bad[segment[bad] if values.shape[0] == batch.num_tokens else bad] = True
        chosen = is_bad.nonzero().squeeze(-1).tolist() or range(batch.num_segments)
        samples += [batch.sample_ids[place] for place in chosen]
    return tuple(dict.fromkeys(samples))


def sample_ids(micro_batches: Sequence[MicroBatch]) -> tuple[str, ...]:
    """List every sample of the micro-batches once, in order."""
    return tuple(dict.fromkeys(sample for batch in micro_batches for sample in batch.sample_ids))
