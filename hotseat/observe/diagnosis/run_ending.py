"""How a run ended: the goal by which that is judged, and from when on."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Literal

from hotseat.observe.recorded import MetricCurve, Recorded

GOALS = ("eval/accuracy", "eval/success", "eval/reward", "reward")  # what a run is for, the most telling first
MIN_STEPS = 8  # of a reward that is judged not to have risen
FALL = 0.25  # share of what was gained over the worst reward; a larger one is a fall
SOLVED = 0.9  # share of the range of rewards from which on a task counts as solved
NOISES = 4.0  # standard deviations of a single value that chance does not exceed
MOST = 0.7  # share of groups or samples


@dataclass(frozen=True)
class Ending:
    """How a run ended. metric: the goal by which that is judged. stalled: it rose, then found no more signal.

    since: the step before `began` at which the goal was measured. reward_began: the first step of a fall of the reward,
    where that is no later.
    """

    kind: Literal["fell", "did not rise", "stalled", "rose", "held", "unknown"]
    metric: str = "reward"
    began: int = 0  # the first step of the fall
    before: float = math.nan  # the highest value before the fall, else the first
    after: float = math.nan  # the last value, or the lowest of a fall that was made good
    since: int | None = None
    reward_began: int | None = None

    @property
    def is_poor(self) -> bool:
        return self.is_harm or self.kind == "stalled"

    @property
    def is_harm(self) -> bool:
        return self.kind in ("fell", "did not rise")

    def __str__(self) -> str:
        if self.kind == "unknown":
            return "too few steps were recorded to say how it went"
        place = f", beginning at step {self.began}" if self.kind in ("fell", "stalled") else ""
        if self.kind == "fell" and self.since is not None and self.began - self.since > 1:
            place = f", between steps {self.since} and {self.began}"
        if self.reward_began is not None:
            place += f"; reward fell from step {self.reward_began} on"
        return f"{self.metric} {self.kind}: {self.before:.3g} to {self.after:.3g}{place}"

    def depth(self, value: float) -> str:
        """Return in words how far a value is below the peak."""
        share = f"{(self.before - value) / self.before:.0%} " if self.before > 0 else ""
        return f"{share}below its peak of {self.before:.3g}"


def ending_of(recorded: Recorded) -> Ending:
    """Tell how a run ended: by the first of its goals that fell, else by its reward."""
    falls = {name: fall for name in GOALS if (fall := fall_of(name, recorded.curve(name), recorded)) is not None}
    for name, fall in falls.items():
        own = falls.get("reward")
        if name == "reward" or own is None or own.began > fall.began:
            return fall
        return replace(fall, reward_began=own.began)
    curve = recorded.curve("reward")
    if len(curve.raw) < MIN_STEPS:
        return Ending("unknown")
    low, high = reward_range(recorded)
    held_out = recorded.curve("eval/accuracy")
    gained = {"reward": curve.last - curve.first}
    if held_out:
        gained["eval/accuracy"] = (held_out.last - held_out.raw[0]) * (high - low)
    # What is left to gain at the start counts: little of it is nothing.
    least = max(0.1 * (high - curve.first), curve.noise)
    risen = next((name for name, gain in gained.items() if gain > least > 0.0), None)
    has_risen = risen is not None
    is_solved = high > low and curve.last >= low + SOLVED * (high - low)
    if has_risen and (began := _stalls_from(recorded)) is not None:
        return Ending("stalled", "reward", began, curve.at(began), curve.last)
    if risen == "eval/accuracy":
        return Ending("rose", risen, held_out.steps[0], held_out.raw[0], held_out.last)
    kind: Literal["rose", "held", "did not rise"] = "rose" if has_risen else "held" if is_solved else "did not rise"
    return Ending(kind, "reward", curve.steps[0], curve.first, curve.last)


def _stalls_from(recorded: Recorded) -> int | None:
    """Return the step from which on, for a third of a run or more, most groups are alike without being right."""
    reward, (low, high) = recorded.curve("reward"), reward_range(recorded)
    began = recorded.curve("groups_alike").lasts_from(lambda share: share >= MOST)
    if (
        began is None
        or recorded.config.rollout.samples_per_prompt == 1
        or began > reward.steps[-len(reward.steps) // 3]
    ):
        return None
    is_poor = reward.last < low + 0.75 * (high - low)
    return (
        began if is_poor and not rises(reward.since(reward.steps[len(reward.steps) // 2]), 0.1 * (high - low)) else None
    )


def fall_of(name: str, curve: MetricCurve, recorded: Recorded) -> Ending | None:
    """Return the fall of a goal from its peak, to its end or for a fifth of the run; None where it is noise."""
    if len(curve.raw) < 2:
        return None
    low = reward_range(recorded)[0] if name.endswith("reward") else 0.0
    # The few values of evaluations are no measure of their noise: they have to fall further.
    is_short = len(curve.raw) < MIN_STEPS
    least = 0.0 if is_short else NOISES * curve.noise
    fall = Ending("held", name)
    lows = [(len(curve.raw), curve.last, 2 * FALL if is_short else FALL)]
    width = len(curve.raw) // 5
    if not is_short:  # a run that fell and came back
        lows += [
            (index, statistics.median(curve.raw[index : index + width]), 2 * FALL)
            for index in range(1, len(curve.raw) - width + 1)
        ]
    for index, after, share in lows:
        before = max(curve.values[:index])
        is_deeper = fall.kind == "held" or before - after > fall.before - fall.after
        if before > low and before - after >= max(share * (before - low), least) and is_deeper:
            top = max(step for step, value in curve.pairs[:index] if value == before)
            middle = (before + after) / 2
            began = next((step for step, value in curve.pairs if step > top and value <= middle), curve.steps[-1])
            since = max(step for step in curve.steps if step < began)
            fall = Ending("fell", name, began, before, after, since)
    return fall if fall.is_harm else None


def reward_range(recorded: Recorded) -> tuple[float, float]:
    """Return the lowest and the highest reward of any sample, else of any step."""
    if recorded.rewards is not None:
        return recorded.rewards
    values = recorded.curve("reward").raw or (0.0,)
    return min(values), max(values)


def rises(curve: MetricCurve, least: float) -> bool:
    return bool(curve) and curve.last - curve.first > max(least, curve.noise)


def has_learned(recorded: Recorded) -> bool:
    """Tell whether the run's own reward rose, whatever became of held-out goals."""
    low, high = reward_range(recorded)
    return rises(recorded.curve("reward"), 0.1 * (high - low))
