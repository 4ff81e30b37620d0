"""How rewards and lengths are spread, step by step, as the cells of a heat map."""

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
SMALLEST = 1e-6  # of what is shown on a logarithmic scale: below it, engine and trainer agree


@dataclass(frozen=True)
class Spread:
    """A quantity's values over all steps, each with how often it came up."""

    steps: list[int]
    pairs: list[np.ndarray]  # by step: [values, 2]


def read_spreads(run_dir: Path) -> dict[str, Spread]:
    by_name: dict[str, dict[int, np.ndarray]] = {}
    for record in json_lines(run_dir / "distributions.jsonl"):
        step = record.pop("step", None)
        if not isinstance(step, int):
            continue
        for name, pairs in record.items():
            known = _known_pairs(pairs)
            if len(known):
                by_name.setdefault(name, {})[step] = known
    return {name: Spread(sorted(found), [found[step] for step in sorted(found)]) for name, found in by_name.items()}


def _known_pairs(pairs: object) -> np.ndarray:
    """Finite values only. What is not finite is written by name, which a number can be made of too."""
    try:
        found = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        return np.empty((0, 2))
    return found[np.isfinite(found).all(axis=1) & (found[:, 1] > 0)]


def make_heat_maps(spreads: dict[str, Spread], max_columns: int) -> dict[str, Any]:
    """By name: ranges of steps, bounds of the rows, and the share of samples in each cell. Neighbours are joined."""
    return {name: _heat_map(spread, name in LOGARITHMIC, max_columns) for name, spread in spreads.items()}


def _heat_map(spread: Spread, is_logarithmic: bool, max_columns: int) -> dict[str, Any]:
    steps = spread.steps
    edges = bucket_edges(len(steps), max_columns)
    column_of_step = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    columns = np.repeat(column_of_step, [len(pairs) for pairs in spread.pairs])
    values, weights = np.concatenate(spread.pairs).T
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
    """Bounds of the rows, and whether each row is one value: a 0/1 reward has two rows, not thirty empty ones."""
    if len(distinct) <= MAX_ROWS // 2:
        middles = [(low + high) / 2 for low, high in pairwise(distinct)]
        return [distinct[0], *middles, math.inf], True
    low, high = distinct[0], distinct[-1]
    if is_logarithmic:
        low = max(low, SMALLEST)
        return np.geomspace(low, max(high, low * 10), MAX_ROWS + 1).tolist(), False
    return np.linspace(low, high, MAX_ROWS + 1).tolist(), False
