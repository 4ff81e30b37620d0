"""Values of tokens by sample id: what one role computed of them reaches another, however each cuts its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotseat.types import MicroBatch


class BySample(dict[str, list[Tensor]]):
    """Values of tokens by sample id: a tensor [num_tokens] for each segment."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all segments as one flat array: they are views, and each would be pickled with the bytes of all."""
        segments = [segment for each in self.values() for segment in each]
        lengths = {name: [len(segment) for segment in each] for name, each in self.items()}
        flat = torch.cat(segments) if segments else None
        is_bf16 = flat is not None and flat.dtype == torch.bfloat16  # which numpy has not: its bits travel
        if flat is not None and is_bf16:
            flat = flat.view(torch.int16)
        return _rebuild_by_sample, (lengths, None if flat is None else flat.numpy(), is_bf16)


def _rebuild_by_sample(lengths: Mapping[str, list[int]], flat: Any, is_bf16: bool) -> BySample:
    sizes = [length for each in lengths.values() for length in each]
    whole = None if flat is None else torch.from_numpy(flat.copy())
    if whole is not None and is_bf16:
        whole = whole.view(torch.bfloat16)
    segments = iter(() if whole is None else whole.split(sizes))
    return BySample({name: [next(segments) for _ in each] for name, each in lengths.items()})


class TeacherScores(BySample):
    """A teacher's log-probs of tokens by sample id. fields: its further values of them, by name."""

    def __init__(self, log_probs: Mapping[str, list[Tensor]], fields: Mapping[str, BySample]):
        super().__init__(log_probs)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return TeacherScores, (BySample(self), dict(self.fields))


def by_sample(pieces: Sequence[MicroBatch], scores: Sequence[Tensor]) -> BySample:
    """Cut each piece's values, [num_tokens], into segments, and return these in order, by sample id."""
    segments_of = BySample()
    for piece, values in zip(pieces, scores, strict=True):
        segments = values.split((piece.offsets[1:] - piece.offsets[:-1]).tolist())
        for name, segment in zip(piece.sample_ids, segments, strict=True):
            segments_of.setdefault(name, []).append(segment)
    return segments_of


def given_by_teacher(batch: MicroBatch, scores: Sequence[BySample]) -> dict[str, Tensor]:
    """Return what a teacher computed beside log-probs, on any number of ranks, as fields of a batch; often none."""
    by_rank = [each.fields for each in scores if isinstance(each, TeacherScores)]
    names = dict.fromkeys(name for fields in by_rank for name in fields)
    return {name: in_order(batch, [fields[name] for fields in by_rank if name in fields]) for name in names}


def in_order(batch: MicroBatch, values: Iterable[BySample]) -> Tensor:
    """Join what `by_sample` cut, on any number of ranks, in the order of the batch: [num_tokens]."""
    segments = {name: iter(each) for rank in values for name, each in rank.items()}
    pieces = [next(segments[name]) for name in batch.sample_ids]
    return torch.cat(pieces) if pieces else torch.zeros(0)
