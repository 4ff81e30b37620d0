"""Quantiles of numbers that lie on several micro-batches and ranks, from histograms, since counts add up.

Bins are a sixteenth of a decade wide, from 1e-6 to 10, so a quantile is right to 15%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST, DECADES, PER_DECADE = 1e-6, 7, 16
NUM_BINS = DECADES * PER_DECADE + 2  # the first bin is for smaller values, the last for larger ones


def count_sizes(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Count how many of the values under the mask fall into each bin: [n] not negative -> [NUM_BINS] float64."""
    place = (torch.log10(values.double().clamp_min(SMALLEST / 2)) - math.log10(SMALLEST)) * PER_DECADE
    bins = (place.floor().nan_to_num(NUM_BINS) + 1).clamp_(0, NUM_BINS - 1).long()
    each = torch.ones_like(values, dtype=torch.float64) if mask is None else mask.double()
    return torch.zeros(NUM_BINS, dtype=torch.float64, device=values.device).index_add_(0, bins, each)


def quantile(counts: Sequence[float], share: float) -> float:
    """Return the upper edge of the bin in which this share of the counts is reached; 0 where nothing was counted."""
    total, seen = sum(counts), 0.0
    if total == 0:
        return 0.0
    for place, count in enumerate(counts):
        seen += count
        if seen >= share * total:
            return math.inf if place == NUM_BINS - 1 else SMALLEST * 10 ** (place / PER_DECADE)
    return math.inf
