"""Distributions of rewards, lengths and others by step, as the cells of heat maps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hotseat.observe.report.curves import bucket_edges
from hotseat.observe.report.reading import json_lines, significant

MAX_ROWS = 32
LOGARITHMIC = ("engine_gap",)
SMALLEST = 1e-6  # lower end of logarithmic scales; below it, engine and trainer agree


@dataclass(frozen=True)
class Distribution:
    """The values of a quantity at each step, with their counts."""

    steps: list[int]
    pairs: list[np.ndarray]  # for each step: [values, 2], value and count


def read_distributions(run_dir: Path) -> dict[str, Distribution]:
    by_name: dict[str, dict[int, np.ndarray]] = {}
    for record in json_lines(run_dir / "distributions.jsonl"):
        step = record.pop("step", None)
        if not isinstance(step, int):
            continue
        for name, pairs in record.items():
            known = _known_pairs(pairs)
            if len(known):
                by_name.setdefault(name, {})[step] = known
    return {
        name: Distribution(sorted(by_step), [by_step[step] for step in sorted(by_step)])
        for name, by_step in by_name.items()
    }


def _known_pairs(pairs: object) -> np.ndarray:
    """Return the [value, count] pairs with finite values. Others are written by name (nan), which numpy reads."""
    try:
        numbers = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        return np.empty((0, 2))
    return numbers[np.isfinite(numbers).all(axis=1) & (numbers[:, 1] > 0)]


def make_heat_maps(distributions: dict[str, Distribution], max_columns: int) -> dict[str, Any]:
    """Make heat maps by name: ranges of steps, bounds of the rows, and the share of samples in each cell.

    Neighbouring steps are joined, so that there are at most `max_columns` columns.
    """
    return {
        name: _heat_map(distribution, name in LOGARITHMIC, max_columns) for name, distribution in distributions.items()
    }


def _heat_map(distribution: Distribution, is_logarithmic: bool, max_columns: int) -> dict[str, Any]:
    steps = distribution.steps
    edges = bucket_edges(len(steps), max_columns)
    column_of_step = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    columns = np.repeat(column_of_step, [len(pairs) for pairs in distribution.pairs])
    values, weights = np.concatenate(distribution.pairs).T
    distinct = np.unique(values).tolist()
    bounds, is_discrete = _row_bounds(distinct, is_logarithmic)
    num_rows = len(bounds) - 1
    rows = np.clip(np.searchsorted(bounds, values, side="right") - 1, 0, num_rows - 1)
    shape = (len(edges) - 1, num_rows)
    counts = np.bincount(columns * num_rows + rows, weights, shape[0] * shape[1]).reshape(shape)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return {
        "steps": [[steps[first], steps[last - 1]] for first, last in pairwise(edges)],
        "rows": [significant(value) for value in (distinct if is_discrete else bounds)],
        "is_discrete": is_discrete,
        "cells": [[column, row, significant(shares[column, row], 3)] for column, row in np.argwhere(counts).tolist()],
    }


def _row_bounds(distinct: list[float], is_logarithmic: bool) -> tuple[list[float], bool]:
    """Return the bounds of the rows, and whether each row is one value: a 0/1 reward has two rows, not thirty."""
    if len(distinct) <= MAX_ROWS // 2:
        middles = [(low + high) / 2 for low, high in pairwise(distinct)]
        return [distinct[0], *middles, math.inf], True
    low, high = distinct[0], distinct[-1]
    if is_logarithmic:
        low = max(low, SMALLEST)
        return np.geomspace(low, max(high, low * 10), MAX_ROWS + 1).tolist(), False
    return np.linspace(low, high, MAX_ROWS + 1).tolist(), False
