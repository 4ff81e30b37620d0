"""Signs of a cause, found by its rule: figures that show it, and options to change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotseat.observe.recorded import Recorded


@dataclass(frozen=True)
class Evidence:
    """A metric that shows a cause: its value at a step, the threshold that it passed, and its trend."""

    metric: str
    step: int
    value: float
    threshold: str
    first: float = math.nan
    last: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.value):
            return f"{self.metric} is {self.threshold} at step {self.step}"
        value, first, last = (f"{each:.3g}" for each in (self.value, self.first, self.last))
        trend = f"; it went from {first} to {last}" if first != last else f"; it began and ended at {first}"
        return f"{self.metric} is {value} at step {self.step} ({self.threshold}){trend * (not value == first == last)}"


@dataclass(frozen=True)
class OptionChange:
    """An option to change, and its new value."""

    option: str
    now: Any
    to: Any

    def __str__(self) -> str:
        return f"{self.option}: {shown(self.now)} -> {shown(self.to)}"

    @property
    def override(self) -> str:
        """Return the change as commands take it."""
        value = float(f"{self.to:.6g}") if isinstance(self.to, float) else self.to
        return f"{self.option}={value if isinstance(value, str) else json.dumps(value)}"


@dataclass(frozen=True)
class OptionAdvice(OptionChange):
    """An option to change whose new value only the user can know: `to` describes it."""


@dataclass(frozen=True)
class Signs:
    """Evidence of a cause, found by its rule.

    strength: how far the threshold was passed, as a factor. is_setting: a setting shows the same, so that no other
    cause brought it about.
    """

    began: int
    strength: float
    evidence: tuple[Evidence, ...]
    cure: tuple[OptionChange, ...]
    detail: str = ""
    is_setting: bool = False


def shown(value: Any) -> str:
    """Return a value as config files write it."""
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "true", False: "false"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def evidence_at(recorded: Recorded, metric: str, step: int, threshold: str) -> Evidence:
    curve = recorded.curve(metric)
    return Evidence(metric, step, curve.at(step), threshold, curve.raw[0], curve.last)


def lasting(
    recorded: Recorded, metric: str, holds: Callable[[float], bool], threshold: str
) -> tuple[int, Evidence] | None:
    """Return since when a condition on a metric lasts, with the evidence; None if it does not at the end."""
    began = recorded.curve(metric).lasts_from(holds)
    return None if began is None else (began, evidence_at(recorded, metric, began, threshold))


def entropy_metric(recorded: Recorded) -> str:
    """Return the metric that measures entropy: without it, recorded samples estimate it."""
    return "entropy" if recorded.curve("entropy") else "surprise"


def slower(recorded: Recorded, factor: float) -> OptionChange:
    rate = recorded.config.actor.optimizer.learning_rate
    return OptionChange("actor.optimizer.learning_rate", rate, rate / factor)


def scored_apart(recorded: Recorded) -> bool:
    return recorded.config.eval.reward is not None or bool(recorded.config.eval.graders)
