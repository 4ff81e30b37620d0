"""Seconds of phases at sizes other than those that were measured.

A size is the number of samples that one engine, or one data-parallel rank, has in a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reading:
    """Seconds read off a curve. is_extrapolated: the size lies outside of those that were measured."""

    seconds: float
    is_extrapolated: bool


@dataclass(frozen=True)
class Curve:
    """Measured (size, seconds), ascending by size. Between two of them, and beyond, the seconds are linear in the size.

    Beyond the ends the nearest two continue; below the smallest size the seconds do not fall under its share of them:
    what half as many samples take is at least half as long. A single measurement stands for seconds in proportion.
    """

    points: tuple[tuple[float, float], ...]
    _sizes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = tuple(size for size, _ in self.points)
        assert sizes, "a curve needs a measurement"
        assert all(before < after for before, after in itertools.pairwise(sizes)), "sizes ascend"
        assert sizes[0] > 0
        object.__setattr__(self, "_sizes", sizes)

    @classmethod
    def through(cls, measured: Iterable[tuple[float, float]]) -> Curve:
        """Make a curve of measurements in any order; those of one size are averaged."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in measured:
            by_size.setdefault(size, []).append(seconds)
        return cls(tuple((size, sum(values) / len(values)) for size, values in sorted(by_size.items())))

    def at(self, size: float) -> Reading:
        sizes = self._sizes
        is_outside = not sizes[0] <= size <= sizes[-1]
        if len(sizes) == 1:
            return Reading(self.points[0][1] * size / sizes[0], is_outside)
        upper = next((index for index, known in enumerate(sizes) if known >= size), len(sizes) - 1)
        upper = max(1, upper)
        (x0, y0), (x1, y1) = self.points[upper - 1], self.points[upper]
        seconds = y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        if size < sizes[0]:
            seconds = max(seconds, self.points[0][1] * size / sizes[0])
        if size > sizes[-1]:
            seconds = max(seconds, self.points[-1][1])
        return Reading(seconds, is_outside)
