"""Statistics that judge whether an engine and the trainer compute the same policy, from gaps between their log-probs.

gap_t = engine log-prob − trainer log-prob of the sampled token t, both of the same weights. Two correct 16-bit
implementations of one model differ by tenths of a nat on unlikely tokens, so no single token is judged, but three
statistics over a thousand tokens or more:

    median    of |gap|       most tokens differ: a layer, a norm or the positions are wrong
    p90       of |gap|       many tokens differ: some inputs or some experts are wrong
    mean      |mean gap|     gaps lean to one side: rounding cancels out, an error does not (over the engine's own
                             samples the mean gap is the KL divergence between the two policies)

The limit of each statistic is a factor times its yardstick, and at least a floor. The yardstick is the same statistic
of the error that rounding alone causes in log-probs. A mean of noise can be near zero by chance, so the yardstick of
the mean is at least an eighth of the mean of |gap|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Statistic = Literal["median", "p90", "mean"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
_MEAN_PER_SIZE = 0.125


@dataclass(frozen=True)
class GapStatistics:
    """Statistics of gaps, in nats."""

    median: float  # of |gap|
    p90: float  # of |gap|
    mean: float  # of the gap, with its sign
    mean_size: float = 0.0  # mean of |gap|: not judged, since a few wild tokens move it

    def size(self, statistic: Statistic) -> float:
        return abs(float(getattr(self, statistic)))


def gap_statistics(gaps: Tensor | Sequence[float]) -> GapStatistics:
    """Compute the statistics of gaps [num_tokens]. A gap that is not finite counts as infinite."""
    values = torch.as_tensor(gaps, dtype=torch.float64)
    assert values.numel() > 0, "no gap to judge"
    if not values.isfinite().all():
        values = torch.where(values.isfinite(), values, math.inf)
    sizes = values.abs().sort().values
    return GapStatistics(_quantile(sizes, 0.5), _quantile(sizes, 0.9), float(values.mean()), float(sizes.mean()))


def _quantile(ascending: Tensor, share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return float(ascending[max(0, math.ceil(share * len(ascending)) - 1)])


def largest(each: Sequence[GapStatistics]) -> GapStatistics:
    """Return the largest value of each statistic; for the mean, the one with the largest magnitude."""
    return GapStatistics(
        max(statistics.median for statistics in each),
        max(statistics.p90 for statistics in each),
        max((statistics.mean for statistics in each), key=abs),
        max(statistics.mean_size for statistics in each),
    )


@dataclass(frozen=True)
class GapLimits:
    """The largest values of the statistics that count as rounding. basis: their origin, in words for messages."""

    median: float
    p90: float
    mean: float
    basis: str

    def of(self, statistic: Statistic) -> float:
        return float(getattr(self, statistic))


def limits_from(
    yardstick: GapStatistics, factor: float, floor: GapStatistics, basis: str, scale: GapStatistics | None = None
) -> GapLimits:
    """Compute factor · max(yardstick, floor) for each statistic, times the entry of `scale` where that is above 1."""

    def limit(statistic: Statistic) -> float:
        size = yardstick.size(statistic)
        if statistic == "mean":
            size = max(size, _MEAN_PER_SIZE * yardstick.mean_size)
        grown = max(1.0, scale.size(statistic)) if scale is not None else 1.0
        return factor * max(size, floor.size(statistic)) * grown

    return GapLimits(limit("median"), limit("p90"), limit("mean"), basis)


def growth(now: GapStatistics, first: GapStatistics, floor: GapStatistics) -> GapStatistics:
    """Return the factor by which rounding has grown, for each statistic; below the floor it counts as the floor."""

    def ratio(statistic: Statistic) -> float:
        return max(now.size(statistic), floor.size(statistic)) / max(first.size(statistic), floor.size(statistic))

    # A mean of noise is noise: it grows as the median does.
    return GapStatistics(ratio("median"), ratio("p90"), ratio("median"))


@dataclass(frozen=True)
class Verdict:
    """The statistic that comes closest to its limit, or exceeds it by most."""

    statistic: Statistic
    value: float
    limit: float
    basis: str

    @property
    def use(self) -> float:
        """The value divided by its limit: above 1 it is an alarm."""
        return self.value / self.limit

    @property
    def is_alarm(self) -> bool:
        return not self.value <= self.limit


def judge(statistics: GapStatistics, limits: Sequence[GapLimits]) -> Verdict:
    """Return the verdict on the statistic that is worst under any of the limits."""
    verdicts = [
        Verdict(statistic, statistics.size(statistic), each.of(statistic), each.basis)
        for each in limits
        for statistic in STATISTICS
    ]
    return max(verdicts, key=lambda verdict: verdict.use)
