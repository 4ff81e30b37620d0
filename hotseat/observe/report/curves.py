"""Curves of metrics and heat maps of distributions by step, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hotseat.observe.machine_use import PREFIX
from hotseat.observe.report.reading import encoded, finite, json_lines, significant

NOT_FINITE = ("nan", "inf", "-inf")

# Work of the driver that overlaps the phases, so it is not part of their sum.
NO_PHASE = ("driver_cpu", "save")
REST = "between phases"
MAX_PHASE_COLUMNS = 240
MAX_MACHINE_POINTS = 400
MAX_ROWS = 32
LOGARITHMIC = ("engine_gap",)
SMALLEST = 1e-6  # lower end of logarithmic scales; below it, engine and trainer agree


@dataclass(frozen=True)
class MetricTable:
    """Columns of `metrics.jsonl`, with NaN where a value is absent or not finite."""

    steps: np.ndarray  # [rows] int64, ascending
    columns: dict[str, np.ndarray]  # name -> [rows] float64
    is_given: dict[str, np.ndarray]  # name -> [rows] bool, true also for values that are not finite

    @property
    def seconds(self) -> np.ndarray | None:
        """Wall time at the end of each step [rows], or None if the run did not measure it."""
        step_s = self.columns.get("step_s")
        return None if step_s is None else np.nancumsum(step_s)

    def values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and finite values of a metric; empty if it was not recorded."""
        column = self.columns.get(name)
        if column is None:
            return self.steps[:0], np.empty(0)
        kept = np.isfinite(column)
        return self.steps[kept], column[kept]


def read_table(run_dir: Path) -> MetricTable:
    rows: dict[int, dict[str, Any]] = {}
    for record in json_lines(run_dir / "metrics.jsonl"):
        step = record.pop("step", None)
        if isinstance(step, int):
            rows.setdefault(step, {}).update(record)
    steps = sorted(rows)
    columns: dict[str, np.ndarray] = {}
    is_given: dict[str, np.ndarray] = {}
    for row, step in enumerate(steps):
        for name, value in rows[step].items():
            number = finite(value)
            if number is None and str(value) not in NOT_FINITE:
                continue
            if name not in columns:
                columns[name] = np.full(len(steps), np.nan)
                is_given[name] = np.zeros(len(steps), dtype=bool)
            columns[name][row] = np.nan if number is None else number
            is_given[name][row] = True
    return MetricTable(np.array(steps, dtype=np.int64), columns, is_given)


def thin(values: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, lowest and highest value of each bucket of neighbours; NaN if a bucket has no finite value.

    Extremes are kept beside the means because people look for spikes; only the means may be smoothed.
    """
    edges = bucket_edges(len(values), num_buckets)
    is_finite = np.isfinite(values)
    counts = np.add.reduceat(is_finite, edges[:-1])
    sums = np.add.reduceat(np.where(is_finite, values, 0.0), edges[:-1])
    lows = np.minimum.reduceat(np.where(is_finite, values, np.inf), edges[:-1])
    highs = np.maximum.reduceat(np.where(is_finite, values, -np.inf), edges[:-1])
    has_any = counts > 0
    means = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=has_any)
    return means, np.where(has_any, lows, np.nan), np.where(has_any, highs, np.nan)


def bucket_edges(num_values: int, num_buckets: int) -> np.ndarray:
    """Return [buckets + 1] indices that cut values into buckets of nearly the same size."""
    return np.linspace(0, num_values, min(num_buckets, num_values) + 1).astype(np.int64)


def make_curves(table: MetricTable, max_points: int) -> dict[str, Any]:
    """Make a curve of at most `max_points` points for each metric. Metrics of the same steps share their x values."""
    grids: list[dict[str, Any]] = []
    numbers: dict[bytes, int] = {}
    series: dict[str, Any] = {}
    for name, column in table.columns.items():
        has_value = table.is_given[name]
        key = has_value.tobytes()
        if key not in numbers:
            numbers[key] = len(grids)
            grids.append(_grid(table, has_value, max_points))
        values = column[has_value]
        # Half as many buckets as points, since their extremes take room, too.
        parts = (values,) if len(values) <= max_points else thin(values, max_points // 2)
        named = zip(("mean", "low", "high"), parts, strict=False)
        series[name] = {"grid": numbers[key]} | {part: _rounded(each) for part, each in named}
        num_odd = int((~np.isfinite(values)).sum())
        if num_odd:
            series[name]["not_finite"] = num_odd
    return {"grids": grids, "series": series}


def without_surplus(curves: dict[str, Any], budget: int) -> dict[str, Any]:
    """Keep the metrics that fit into `budget` bytes, in their order, and count the others."""
    left = budget - len(encoded(curves["grids"]))
    kept: dict[str, Any] = {}
    for name, points in curves["series"].items():
        left -= len(encoded({name: points}))
        if left < 0:
            break
        kept[name] = points
    return {"grids": curves["grids"], "series": kept, "num_left_out": len(curves["series"]) - len(kept)}


def _grid(table: MetricTable, has_value: np.ndarray, max_points: int) -> dict[str, Any]:
    steps, seconds = table.steps[has_value], table.seconds
    picked = slice(None)
    if len(steps) > max_points:
        edges = bucket_edges(len(steps), max_points // 2)
        picked = (edges[:-1] + edges[1:] - 1) // 2
    grid: dict[str, Any] = {"steps": steps[picked].tolist(), "num_steps": len(steps)}
    if seconds is not None:
        grid["seconds"] = _rounded(seconds[has_value][picked], 6)
    return grid


def _rounded(values: np.ndarray, num_digits: int = 5) -> list[float | int | None]:
    return [significant(value, num_digits) if math.isfinite(value) else None for value in values.tolist()]


def make_phases(table: MetricTable) -> dict[str, Any] | None:
    """Return the seconds of each phase by step; 0 for a phase that a step did not have."""
    names = [name.removeprefix("time/") for name in table.columns if name.startswith("time/")]
    names = [name for name in names if name not in NO_PHASE]
    if not names:
        return None
    is_step = table.steps > 0
    spent = {name: np.nan_to_num(table.columns[f"time/{name}"])[is_step] for name in names}
    if "step_s" in table.columns:
        rest = np.nan_to_num(table.columns["step_s"])[is_step] - sum(spent.values())
        spent[REST] = np.maximum(rest, 0.0)
    steps = table.steps[is_step]
    if not len(steps):
        return None
    edges = bucket_edges(len(steps), MAX_PHASE_COLUMNS)
    total = float(sum(values.sum() for values in spent.values()))
    return {
        "steps": [[int(steps[first]), int(steps[last - 1])] for first, last in pairwise(edges)],
        "phases": [
            {
                "name": name,
                "seconds": _rounded(thin(values, MAX_PHASE_COLUMNS)[0]),
                "total": significant(float(values.sum())),
                "mean": significant(float(values.mean())),
                "share": significant(float(values.sum()) / total) if total else 0.0,
            }
            for name, values in spent.items()
        ],
    }


def make_machine(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the use of the machine over the time since its first record: shares, and GiB of memory, by name."""
    kept = [line for line in lines if finite(line.get("time")) is not None]
    if not kept:
        return None
    names = [name for name in dict.fromkeys(chain.from_iterable(kept)) if name.startswith(PREFIX)]
    made: dict[str, Any] = {"shares": {}, "gib": {}}
    for name in names:
        values = np.array([np.nan if (value := finite(line.get(name))) is None else value for line in kept])
        is_memory = name.endswith("memory")
        mean, _, high = thin(values, MAX_MACHINE_POINTS)
        made["gib" if is_memory else "shares"][name.removeprefix(PREFIX)] = _rounded(high if is_memory else mean, 4)
    edges = bucket_edges(len(kept), MAX_MACHINE_POINTS)
    made["seconds"] = _rounded(np.array([kept[end - 1]["time"] - kept[0]["time"] for end in edges[1:]]), 6)
    return made


# --- distributions of rewards, lengths and others, as the cells of heat maps ------------------------------------------


def read_distributions(run_dir: Path) -> dict[str, dict[int, np.ndarray]]:
    """Read the values of each quantity by step: [values, 2], value and count."""
    by_name: dict[str, dict[int, np.ndarray]] = {}
    for record in json_lines(run_dir / "distributions.jsonl"):
        step = record.pop("step", None)
        if not isinstance(step, int):
            continue
        for name, pairs in record.items():
            known = _known_pairs(pairs)
            if len(known):
                by_name.setdefault(name, {})[step] = known
    return {name: dict(sorted(by_step.items())) for name, by_step in by_name.items()}


def _known_pairs(pairs: object) -> np.ndarray:
    """Return the [value, count] pairs with finite values. Others are written by name (nan), which numpy reads."""
    try:
        numbers = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        return np.empty((0, 2))
    return numbers[np.isfinite(numbers).all(axis=1) & (numbers[:, 1] > 0)]


def make_heat_maps(distributions: dict[str, dict[int, np.ndarray]], max_columns: int) -> dict[str, Any]:
    """Make heat maps by name: ranges of steps, bounds of the rows, and the share of samples in each cell.

    Neighbouring steps are joined, so that there are at most `max_columns` columns.
    """
    return {
        name: _heat_map(distribution, name in LOGARITHMIC, max_columns) for name, distribution in distributions.items()
    }


def _heat_map(distribution: dict[int, np.ndarray], is_logarithmic: bool, max_columns: int) -> dict[str, Any]:
    steps, pairs_of_steps = list(distribution), list(distribution.values())
    edges = bucket_edges(len(steps), max_columns)
    column_of_step = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    columns = np.repeat(column_of_step, [len(pairs) for pairs in pairs_of_steps])
    values, weights = np.concatenate(pairs_of_steps).T
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
