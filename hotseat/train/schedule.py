"""The learning rate of every optimizer step, as a pure function of its number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hotseat.errors import UserError

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """A schedule: warm-up, then constant, linear or cosine to `min_ratio` of the peak.

    With w warm-up steps of n in total, step s from 0, and x = (s − w) / (n − w), at most 1:

        s < w      peak · (s + 1) / (w + 1)
        constant   peak
        linear     peak · (1 − (1 − min_ratio) · x)
        cosine     peak · (min_ratio + (1 − min_ratio) · (1 + cos πx) / 2)

    The first step already learns, and step w is the first at the peak. (The schedules of transformers have
    peak · s / w, so that the first step has learning rate 0.)
    """

    kind: ScheduleKind = "constant"
    peak: float = 1e-6
    num_warmup_steps: int = 0
    num_steps: int = 0  # of the whole run; only linear and cosine need it
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise UserError(f"learning-rate schedule {self.kind!r}: choose one of {', '.join(get_args(ScheduleKind))}")
        if not (self.peak >= 0 and math.isfinite(self.peak)):
            raise UserError(f"learning rate {self.peak}: set it to a finite number, 0 or more")
        if self.num_warmup_steps < 0:
            raise UserError(f"{self.num_warmup_steps} warm-up steps: set them to 0 or more")
        if not 0 <= self.min_ratio <= 1:
            raise UserError(f"least learning rate {self.min_ratio} of the peak: set the ratio between 0 and 1")
        if self.kind != "constant" and self.num_steps <= self.num_warmup_steps:
            raise UserError(
                f"schedule {self.kind!r} over {self.num_steps} steps with {self.num_warmup_steps} of warm-up leaves"
                " none to decay in: set the number of steps above the warm-up, or choose 'constant'"
            )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of an update by its number, from 0."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / (self.num_warmup_steps + 1)
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.num_warmup_steps) / (self.num_steps - self.num_warmup_steps))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * left)
