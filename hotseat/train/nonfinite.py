"""The guard against updates whose loss or gradient norm is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hotseat.errors import NonFiniteError
from hotseat.types import MicroBatch

_MAX_NAMED = 16  # samples in an error message


class NonFiniteGuard:
    """Counts skipped updates, remembers their samples, and ends the run after too many in a row."""

    def __init__(self, max_in_a_row: int):
        self._max_in_a_row = max_in_a_row
        self._samples: list[tuple[str, ...]] = []  # of the last updates in a row that were not finite
        self.num_skipped = 0  # in the whole run, those before a `load` included

    def restore(self, num_skipped: int) -> None:
        """Continue from a checkpoint, which ends a row of skipped updates."""
        self.num_skipped = num_skipped
        self._samples = []

    def record_step(self) -> None:
        """Record an update that was finite: a row of skipped ones is over."""
        self._samples = []

    def record_overflow(self) -> None:
        """Record an update that was skipped because the loss scale was too high: no sample is to blame."""
        self.num_skipped += 1

    def record_skip(self, samples: Sequence[str], *, loss: float, grad_norm: float, version: int) -> None:
        """Record an update that was skipped; raise `NonFiniteError` if it is one too many in a row.

        samples: those that may be to blame. version: of the weights, which the update has left as they were.
        """
        self.num_skipped += 1
        self._samples.append(tuple(samples))
        if len(self._samples) < self._max_in_a_row:
            return
        named = list(dict.fromkeys(sample for samples in self._samples for sample in samples))
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        raise NonFiniteError(
            f"{len(self._samples)} updates in a row were not finite (last: loss {loss}, gradient norm"
            f" {grad_norm}), after version {version}; samples: {', '.join(named[:_MAX_NAMED])}{more}. Look at"
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
