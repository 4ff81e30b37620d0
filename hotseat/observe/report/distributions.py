"""How rewards and lengths are spread, step by step, as the cells of a heat map."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hotseat.observe.report.curves import bucket_edges
from hotseat.observe.report.reading import finite, json_lines, significant

MAX_ROWS = 32
LOGARITHMIC = ("engine_gap",)
SMALLEST = 1e-6  # of what is shown on a logarithmic scale: below it, engine and trainer agree


def read_distributions(run_dir: Path, max_columns: int) -> dict[str, Any]:
    """By name: ranges of steps, bounds of the rows, and the share of samples in each cell. Neighbours are joined."""
    by_name: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for record in json_lines(run_dir / "distributions.jsonl"):
        step = record.pop("step", None)
        if not isinstance(step, int):
            continue
        for name, pairs in record.items():
            known = _known_pairs(pairs)
            if known:
                by_name.setdefault(name, {})[step] = known
    return {name: _heat_map(steps, name in LOGARITHMIC, max_columns) for name, steps in by_name.items()}


def _known_pairs(pairs: object) -> list[tuple[float, float]]:
    if not isinstance(pairs, list):
        return []
    numbers = [(finite(pair[0]), finite(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    return [(value, count) for value, count in numbers if value is not None and count]


def _heat_map(by_step: dict[int, list[tuple[float, float]]], is_logarithmic: bool, max_columns: int) -> dict[str, Any]:
    steps = sorted(by_step)
    distinct = sorted({value for pairs in by_step.values() for value, _ in pairs})
    bounds, is_discrete = _row_bounds(distinct, is_logarithmic)
    edges = bucket_edges(len(steps), max_columns)
    counts = np.zeros((len(edges) - 1, len(bounds) - 1))  # [columns, rows]
    for column, (first, last) in enumerate(pairwise(edges)):
        for step in steps[first:last]:
            for value, count in by_step[step]:
                row = int(np.searchsorted(bounds, max(value, bounds[0]), side="right")) - 1
                counts[column, min(row, len(bounds) - 2)] += count
    cells = [
        [column, row, significant(counts[column, row] / counts[column].sum(), 3)]
        for column, row in np.argwhere(counts).tolist()
    ]
    return {
        "steps": [[steps[first], steps[last - 1]] for first, last in pairwise(edges)],
        "rows": [significant(value) for value in (distinct if is_discrete else bounds)],
        "is_discrete": is_discrete,
        "cells": cells,
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
