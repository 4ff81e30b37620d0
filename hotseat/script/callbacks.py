"""Callbacks: code of a script that is called at moments of its run, in the process that called `hotseat.run`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotseat.errors import UserError

if TYPE_CHECKING:
    from hotseat.script.live_run import LiveRun


class Callback:
    """Base class of callbacks; override what you need.

    The training waits meanwhile. `run.stop()`, `run.finish()` and `run.change(...)` steer it. An exception ends it.
    """

    def on_start(self, run: LiveRun) -> None:
        """Handle the start: the run's directory is there, no model is loaded. Not called again after a change."""

    def on_step(self, run: LiveRun, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float] | None:
        """Handle a finished step. Numbers that are returned are recorded with the step's metrics."""

    def on_evaluation(self, run: LiveRun, step: int, metrics: Mapping[str, Any]) -> None:
        """Handle an evaluation, after `on_step`; that of step 0 is before training."""

    def on_checkpoint(self, run: LiveRun, step: int, path: Path) -> None:
        """Handle a checkpoint once it is complete: after a later step, since it is written meanwhile, or at the end."""

    def on_end(self, run: LiveRun) -> None:
        """Handle the end, however it came. `run.error` is what it failed with, if it did."""


class _Watching(Callback):
    """Looks at one metric, which is of steps, or of evaluations if its name begins with `eval/`."""

    def __init__(self, metric: str):
        self.metric = metric

    def on_step(self, run: LiveRun, step: int, metrics: Mapping[str, Any]) -> None:
        if self.metric in metrics:
            self.look(run, step, float(metrics[self.metric]))
        elif step > 0 and not self.metric.startswith("eval/"):
            raise UserError(f"{type(self).__name__}: step {step} has no {self.metric!r}; it has: {', '.join(metrics)}")

    def look(self, run: LiveRun, step: int, value: float) -> None:
        raise NotImplementedError


class StopAt(_Watching):
    """Ends the run, saved and with its model exported, once a metric has reached a value."""

    def __init__(self, metric: str, value: float, mode: Literal["max", "min"] = "max"):
        """Set the metric and the value. mode: `max` is reached from below, `min` from above."""
        super().__init__(metric)
        self.value, self.mode = value, mode

    def look(self, run: LiveRun, step: int, value: float) -> None:
        if value >= self.value if self.mode == "max" else value <= self.value:
            run.say(f"step {step}: {self.metric} is {value:g}, and the run ends at {self.value:g}")
            run.finish()


class EarlyStopping(_Watching):
    """Ends the run, saved and with its model exported, when a metric has not improved for a while."""

    def __init__(self, metric: str, patience: int, mode: Literal["max", "min"] = "max", min_delta: float = 0.0):
        """Set the metric. patience: values without a new best that are taken. min_delta: what counts as better."""
        super().__init__(metric)
        self.patience, self.mode, self.min_delta = patience, mode, min_delta
        self.best, self.best_step, self.num_worse = -math.inf, 0, 0

    def look(self, run: LiveRun, step: int, value: float) -> None:
        signed = value if self.mode == "max" else -value
        if signed > self.best + self.min_delta or self.best == -math.inf:
            self.best, self.best_step, self.num_worse = signed, step, 0
            return
        self.num_worse += 1
        if self.num_worse >= self.patience:
            best = self.best if self.mode == "max" else -self.best
            run.say(f"step {step}: {self.metric} is no better than {best:g} of step {self.best_step}, and the run ends")
            run.finish()
