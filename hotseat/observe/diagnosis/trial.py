"""A cure that is tried over a few steps from before the harm: which steps, and whether it helped.

The recorded run is the control: it made the same steps with the settings as they were.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hotseat.observe.diagnosis.policy_rules import GAP
from hotseat.observe.diagnosis.rules import Cause, diagnose, read_by_rules
from hotseat.observe.diagnosis.run_ending import GOALS, Ending, reward_range
from hotseat.observe.recorded import MetricCurve, Recorded
from hotseat.registry.metric_names import entry_of

MAX_DRIFT = GAP  # nats per token between the policies of a replay and of the recorded run
DRIFT = "engine_gap"  # in a replay: between the policy that learns and the one that sampled
_NUM_LATE = 3  # steps at the end of a window by whose median it is judged
_OF_SAMPLES = ("RL: samples", "RL: sampling ahead of training")  # a replay has those of the recorded run


class NoWindow(Exception):
    """There is no step from which a trial could begin, or none at which it would say something."""


@dataclass(frozen=True)
class Window:
    """The steps of a trial: after `start`, a checkpoint or 0, to `end`, where the rules see the harm in the record.

    ending: that of the whole recorded run. has_goal: a held-out goal was measured there.
    """

    start: int
    end: int
    ending: Ending
    has_goal: bool


@dataclass(frozen=True)
class Figure:
    """A metric at the start of a window, and at its end: as recorded, and with the cure."""

    name: str
    before: float | None
    recorded: float
    tried: float


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial. symptom: whether the rule still fires; None: a replay cannot tell, or no rule fired."""

    goal: Figure | None
    figures: tuple[Figure, ...]
    has_helped: bool
    symptom: Literal["gone", "there"] | None
    new_causes: tuple[str, ...]


def last_good_step(recorded: Recorded, ending: Ending, cause: Cause | None) -> int:
    """Return the last step after which the weights were not harmed yet, as far as the records tell; at least 0."""
    steps = [] if cause is None else [cause.signs.began]
    if ending.kind == "fell":
        steps.append(ending.began if ending.since is None else ending.since + 1)
        steps += [] if ending.reward_began is None else [ending.reward_began]
    began = min(steps, default=0)
    # What is seen in the samples of a step was done by an update before them.
    lag = recorded.curve("staleness_max")
    return max(0, began - 2 - (round(lag.at(began)) if lag else 0))


def window_of(
    recorded: Recorded, ending: Ending, cause: Cause | None, checkpoints: Sequence[int], max_steps: int
) -> Window:
    """Choose the steps of a trial. Raises `NoWindow`, saying why there are none within `max_steps`."""
    good = last_good_step(recorded, ending, cause)
    start = max([0, *(step for step in checkpoints if step <= good)])
    steps = [step for step in recorded.curve("reward").steps if step > max(good, start)]
    ends: list[Window] = []
    num_seen = 0
    for step in steps:
        at, causes = diagnose(recorded.until(step))
        is_seen = cause is None or cause.rule.name in {each.rule.name for each in causes}
        num_seen += is_seen and at.is_poor >= ending.is_poor
        if num_seen >= _NUM_LATE or (num_seen and step == steps[-1]):
            has_goal = any(step in recorded.curve(name).steps for name in GOALS if name != "reward")
            ends.append(Window(start, step, ending, has_goal))
        if ends and (ends[-1].has_goal or step - start >= max_steps):
            break
    if not ends:
        raise NoWindow("the recorded run shows no harm at any step by its metrics, so that there is nothing to compare")
    # Where a held-out goal was measured soon, the trial goes on until then.
    chosen = ends[-1] if ends[-1].has_goal and ends[-1].end - start <= max_steps else ends[0]
    num_steps = chosen.end - start
    if num_steps <= max_steps:
        return chosen
    seen = f"the harm is seen from step {chosen.end} on"
    if start > 0:
        raise NoWindow(
            f"{seen}, {num_steps} steps after the checkpoint of step {start}: allow them by --steps {num_steps}"
        )
    every = max(1, min(good, max_steps // 2))
    kept = f"the oldest one left is of step {min(checkpoints)}" if checkpoints else "none is left"
    keep = -(-recorded.curve("reward").steps[-1] // every)
    raise NoWindow(
        f"no checkpoint before the harm, of step {good} or earlier, is there: {kept}. From its beginning a trial takes"
        f" {num_steps} steps, since {seen}: allow them by --steps {num_steps}. Next time checkpoint.every={every} and"
        f" checkpoint.keep_last={keep} keep one"
    )


def outcome_of(
    recorded: Recorded, tried: Recorded, window: Window, cause: Cause | None, *, is_replay: bool
) -> TrialOutcome:
    """Compare the steps of a window in the recorded run and with the cure."""
    control, tried = recorded.until(window.end), tried.until(window.end)
    names = [name for name in read_by_rules(control) if not (is_replay and is_of_samples(name))]
    figures = tuple(each for name in names if (each := _figure(name, control, tried, window)) is not None)
    by_name = {each.name: each for each in figures}
    names_of_goals = [window.ending.metric, *GOALS]
    goal = next((by_name[name] for name in names_of_goals if name in by_name), None)
    symptom: Literal["gone", "there"] | None = None
    new: tuple[str, ...] = ()
    if cause is not None and not (is_replay and any(is_of_samples(each.metric) for each in cause.signs.evidence)):
        symptom = "gone" if cause.rule.find(tried, window.ending) is None else "there"
    if not is_replay:
        before = {each.rule.name for each in diagnose(control)[1]}
        new = tuple(each.rule.name for each in diagnose(tried)[1] if each.rule.name not in before)
    if window.ending.is_poor:
        has_helped = goal is not None and _is_better(goal, control, window.ending)
    else:
        has_helped = symptom == "gone"
    return TrialOutcome(goal, figures, has_helped, symptom, new)


def is_of_samples(name: str) -> bool:
    """Tell whether a metric describes samples, so that a replay has it as it was recorded."""
    entry = entry_of(name)
    return name == "surprise" or (entry is not None and entry.heading in _OF_SAMPLES)


def drift_of(tried: Recorded, window: Window) -> list[tuple[int, float]]:
    """Return by step how far the policy of a replay was from the one that sampled, in nats per token."""
    return [
        pair for pair in zip(tried.curve(DRIFT).steps, tried.curve(DRIFT).raw, strict=True) if pair[0] > window.start
    ]


def _figure(name: str, control: Recorded, tried: Recorded, window: Window) -> Figure | None:
    before = control.curve(name).within(0, window.start)
    values = [_late(each.curve(name), window, name.startswith("eval/")) for each in (control, tried)]
    if values[0] is None or values[1] is None:
        return None
    return Figure(name, before[-1] if before else None, values[0], values[1])


def _late(curve: MetricCurve, window: Window, is_held_out: bool) -> float | None:
    """Return the median of a window's last steps, and of evaluations, which are fewer and less noisy, the last one."""
    values = curve.within(window.start + 1, window.end)
    return statistics.median(values[-1:] if is_held_out else values[-_NUM_LATE:]) if values else None


def _is_better(goal: Figure, control: Recorded, ending: Ending) -> bool:
    """Tell whether a cure made good at least half of a fall, or else gained what counts as a rise."""
    gained = goal.tried - goal.recorded
    if ending.kind == "fell":
        peak = ending.before if goal.name == ending.metric else max(control.curve(goal.name).raw)
        return gained > 0 and gained >= 0.5 * (peak - goal.recorded)
    low, high = reward_range(control)
    width = 1.0 if goal.name in ("eval/accuracy", "eval/success") else high - low
    return gained > 0.1 * width
