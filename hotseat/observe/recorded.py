"""Records of a run, as rules about a whole run read it: curves by step, settings, and what became of samples."""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hotseat.config import Config, loads_saved
from hotseat.observe.journal import DISTRIBUTIONS, METRICS, SAMPLES
from hotseat.observe.monitor import HEARTBEAT
from hotseat.observe.report.reading import finite, json_lines, parsed

NUM_END = 5  # values at an end of a curve whose median stands for that end, at most
LEDGER = "ledger.jsonl"
CONFIG = "config.yaml"
NOT_FINITE = ("nan", "inf", "-inf")  # as such numbers are written
_NEIGHBOURS = 0.954  # median distance of neighbouring values of white noise, in standard deviations


@dataclass(frozen=True)
class MetricCurve:
    """The finite values of a number by step."""

    steps: tuple[int, ...] = ()
    raw: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The values after a running median of three, which removes single outliers and keeps jumps at their step."""
        if len(self.raw) < 3:
            return self.raw
        inner = (statistics.median(self.raw[index - 1 : index + 2]) for index in range(1, len(self.raw) - 1))
        return (self.raw[0], *inner, self.raw[-1])

    @cached_property
    def noise(self) -> float:
        """Standard deviation of a value around the trend, by the distances of neighbours."""
        distances = [abs(after - before) for before, after in zip(self.raw, self.raw[1:], strict=False)]
        return statistics.median(distances) / _NEIGHBOURS if distances else 0.0

    @property
    def first(self) -> float:
        return statistics.median(self.raw[: self._num_end])

    @property
    def last(self) -> float:
        return statistics.median(self.raw[-self._num_end :])

    @property
    def _num_end(self) -> int:
        return max(1, min(NUM_END, len(self.raw) // 5))

    def at(self, step: int) -> float:
        """Return the smoothed value of a step, else of the last one before it, else the first."""
        return next((value for each, value in reversed(self.pairs) if each <= step), self.values[0])

    @property
    def pairs(self) -> list[tuple[int, float]]:
        return list(zip(self.steps, self.values, strict=True))

    def since(self, step: int) -> MetricCurve:
        first = self.steps.index(step)
        return MetricCurve(self.steps[first:], self.raw[first:])

    def until(self, step: int) -> MetricCurve:
        number = bisect.bisect_right(self.steps, step)
        return MetricCurve(self.steps[:number], self.raw[:number])

    def within(self, low: int, high: int) -> list[float]:
        """Return the values as recorded of the steps from `low` to `high`, both included."""
        return [value for step, value in zip(self.steps, self.raw, strict=True) if low <= step <= high]

    def lasts_from(self, holds: Callable[[float], bool], share: float = 0.8) -> int | None:
        """Return the first step from which on a condition holds of a share of the values, with the last one."""
        num_true, begin = 0, None
        for number, (step, value) in enumerate(reversed(self.pairs), start=1):
            num_true += holds(value)
            if num_true == 0:
                return None
            if holds(value) and num_true >= share * number:
                begin = step
        return begin


@dataclass(frozen=True)
class Recorded:
    """A run's records.

    curves: by the name of the metric, and `surprise`: the mean of -log p of sampled tokens in samples.jsonl, which
    estimates the entropy. rewards: of samples, the lowest and the highest. passes: their first steps, by number.
    num_prompts: different ones that were trained. num_samples, reasons: by state of samples. failed_shares: of
    the samples of a step, where any failed.
    not_finite: the first steps of numbers that were not finite.
    error: what the run ended with.
    """

    curves: Mapping[str, MetricCurve]
    config: Config = field(default_factory=Config)
    rewards: tuple[float, float] | None = None
    passes: Mapping[int, int] = field(default_factory=dict)
    num_prompts: int = 0
    num_samples: Mapping[str, int] = field(default_factory=dict)
    failed_shares: Mapping[int, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    not_finite: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None

    def until(self, step: int) -> Recorded:
        """Return the records as they were after a step, but for counts of samples and the range of rewards."""
        if step >= max((curve.steps[-1] for curve in self.curves.values() if curve), default=0):
            return self
        cut = {name: curve.until(step) for name, curve in self.curves.items()}
        return replace(
            self,
            curves={name: curve for name, curve in cut.items() if curve},
            passes={number: first for number, first in self.passes.items() if first <= step},
            failed_shares={each: share for each, share in self.failed_shares.items() if each <= step},
            not_finite={name: first for name, first in self.not_finite.items() if first <= step},
            error=None,
        )

    def curve(self, name: str) -> MetricCurve:
        """Return the curve of a metric; an empty one where it was never measured."""
        return self.curves.get(name, MetricCurve())


def read_recorded(run_dir: Path) -> Recorded:
    """Read the records of a run, whatever of them is there."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    broken: dict[str, int] = {}
    for line in json_lines(run_dir / METRICS):
        for name, value in line.items():
            number = finite(value)
            if number is not None and name != "step":
                points[name][line["step"]] = number
            elif value in NOT_FINITE:
                broken.setdefault(name, line["step"])
    bounds = [line["reward"] for line in json_lines(run_dir / DISTRIBUTIONS) if line.get("reward")]
    surprises: dict[int, list[float]] = defaultdict(list)
    for sample in json_lines(run_dir / SAMPLES):
        log_probs = [each for segment in sample["segments"] for each in segment["engine_log_probs"] if each is not None]
        surprises[sample["step"]] += [-each for each in log_probs]
    points["surprise"] = {step: statistics.fmean(each) for step, each in surprises.items() if each}
    config = run_dir / CONFIG
    beat = parsed((run_dir / HEARTBEAT).read_bytes()) if (run_dir / HEARTBEAT).is_file() else None
    return Recorded(
        {
            name: MetricCurve(tuple(sorted(each)), tuple(each[step] for step in sorted(each)))
            for name, each in points.items()
        },
        loads_saved(config.read_text(encoding="utf-8")) if config.is_file() else Config(),
        (min(pairs[0][0] for pairs in bounds), max(pairs[-1][0] for pairs in bounds)) if bounds else None,
        not_finite=broken,
        error=beat.get("error") if isinstance(beat, dict) else None,
        **_of_ledger(json_lines(run_dir / LEDGER)),
    )


def _of_ledger(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    passes: dict[int, int] = {}
    prompts = set()
    counts: Counter[str] = Counter()
    of_step: dict[int, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, str] = {}
    for entry in entries:
        counts[entry["state"]] += len(entry["samples"])
        of_step[entry["step"]][entry["state"]] += len(entry["samples"])
        if entry["state"] == "trained":
            passes.setdefault(entry["epoch"], entry["step"])
            prompts.add(entry["prompt"])
        else:
            reasons.setdefault(entry["state"], entry["reason"])
    shares = {step: each["failed"] / each.total() for step, each in of_step.items() if each["failed"]}
    return {
        "passes": passes,
        "num_prompts": len(prompts),
        "num_samples": counts,
        "failed_shares": shares,
        "reasons": reasons,
    }
