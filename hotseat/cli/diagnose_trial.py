"""`hotseat diagnose --try`: tries a cure from a checkpoint before the harm, and compares it with the record.

Where the cure acts after sampling, kept groups are replayed; else, or if the policy drifts too far from the one that
sampled them, the run is resumed with engines. Both are runs of their own beside the recorded one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotseat.checks.run_directory import CONFIG
from hotseat.cli.replay import replay, replay_config
from hotseat.config.changes import keys_to_allow
from hotseat.config.schema import acts_after_sampling
from hotseat.errors import UserError
from hotseat.loop.state.checkpoints import STATE, CheckpointStore
from hotseat.loop.state.fork import directory_of, fork, forked, resumable_steps
from hotseat.loop.state.run_dir import write_config
from hotseat.loop.steering import EndsAfter
from hotseat.observe.diagnosis import Cause, Ending, OptionAdvice, OptionChange, Unexplained
from hotseat.observe.diagnosis.trial import (
    DRIFT,
    MAX_DRIFT,
    NoWindow,
    TrialOutcome,
    Window,
    drift_of,
    outcome_of,
    window_of,
)
from hotseat.observe.recorded import Recorded, read_recorded


@dataclass(frozen=True)
class CureTrial:
    """A cure that was tried. path: of the trial's run. notes: why it was no replay, or how far a replay drifted."""

    cause: str | None
    overrides: tuple[str, ...]
    window: Window
    is_replay: bool
    path: Path
    notes: tuple[str, ...]
    outcome: TrialOutcome
    command: str  # that continues with the cure


def run_trial(
    run_dir: Path,
    recorded: Recorded,
    ending: Ending,
    causes: Sequence[Cause],
    unknown: Unexplained | None,
    overrides: Sequence[str],
    max_steps: int,
) -> CureTrial:
    """Try settings, or without any those of the first cause, over at most `max_steps` steps."""
    if max_steps < 1:
        raise UserError(f"--steps {max_steps}: give at least 1")
    if not (causes or unknown):
        raise UserError(f"{run_dir}: there is nothing to try a cure for: {ending}, and no rule fires")
    cause = causes[0] if causes else None
    cure = cause.cure if cause is not None else unknown.trials[:1] if unknown is not None else ()
    overrides = tuple(overrides) or _computed(cure)
    try:
        window = window_of(recorded, ending, cause, resumable_steps(run_dir, recorded.config), max_steps)
    except NoWindow as error:
        raise UserError(f"{run_dir}: {error}") from None
    reason = _no_replay(run_dir, recorded, window, overrides)
    tried, notes = None, (reason,) if reason else ()
    if not reason:
        path, tried, note = _replayed(run_dir, window, overrides)
        notes = (note,)
    is_replay = tried is not None
    if tried is None:
        path, tried = _resumed(run_dir, window, overrides)
    outcome = outcome_of(recorded, tried, window, cause, is_replay=is_replay)
    name = None if cause is None else cause.rule.name
    return CureTrial(name, overrides, window, is_replay, path, notes, outcome, _command(run_dir, path, overrides))


def trial_lines(trial: CureTrial) -> list[str]:
    """Return what a trial showed, for people."""
    window, outcome = trial.window, trial.outcome
    origin = f"the checkpoint of step {window.start}" if window.start else "the beginning"
    how = "a replay of kept groups" if trial.is_replay else "a resumed run with engines"
    said = [f"tried: {' '.join(trial.overrides)}", f"   from {origin} to step {window.end}, by {how}: {trial.path}"]
    said += [f"   {note}" for note in trial.notes]
    rows: list[tuple[str, ...]] = [("metric", "before", "as it was", "with the cure")]
    differing = [each for each in outcome.figures if each.tried != each.recorded]
    rows += [(each.name, *map(_number, (each.before, each.recorded, each.tried))) for each in differing]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    said += ["   " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    said = [*(line.rstrip() for line in said), verdict(trial)]
    return [*said, f"continue with it: {trial.command}"] if outcome.has_helped else said


def verdict(trial: CureTrial) -> str:
    """Return in one sentence whether the cure helped."""
    outcome, goal = trial.outcome, trial.outcome.goal
    said = "it helped" if outcome.has_helped else "it did not help"
    if goal is not None:
        said += f": {goal.name} is {goal.tried:.3g} at step {trial.window.end}, and was {goal.recorded:.3g} without it"
        said += "" if goal.before is None else f" ({goal.before:.3g} before)"
    else:
        said += ": no goal was measured in these steps"
    seen = {"gone": "is not seen any more", "there": "is still seen"}
    if outcome.symptom is not None:
        said += f"; {trial.cause} {seen[outcome.symptom]}"
    return said + f"; instead, there is {', '.join(outcome.new_causes)}" * bool(outcome.new_causes)


def trial_facts(trial: CureTrial) -> dict[str, Any]:
    """Return a trial as an object for JSON."""
    return {
        "cause": trial.cause,
        "changes": trial.overrides,
        "start": trial.window.start,
        "end": trial.window.end,
        "is_replay": trial.is_replay,
        "run": str(trial.path),
        "notes": trial.notes,
        **asdict(trial.outcome),
        "verdict": verdict(trial),
        "command": trial.command,
    }


def _computed(cure: Sequence[OptionChange]) -> tuple[str, ...]:
    """Return the changes of a cure that have values. Raises if none has."""
    computed = tuple(each.override for each in cure if not isinstance(each, OptionAdvice))
    if not computed:
        option = cure[0].option
        raise UserError(f"only you can know the new value ({cure[0]}): give it, as --try {option}=VALUE")
    return computed


def _no_replay(run_dir: Path, recorded: Recorded, window: Window, overrides: Sequence[str]) -> str | None:
    """Return why kept groups do not serve; None: they do."""
    from hotseat.loop.rl.stream import Recording

    for override in overrides:
        key = override.partition("=")[0].strip()
        if not acts_after_sampling(key):
            return f"no replay: {key} acts while sampling"
    if not recorded.config.log.keep_rollouts:
        return "no replay: groups were not kept (log.keep_rollouts)"
    if not window.has_goal:
        return "no replay: it would measure no goal, since nothing was evaluated at its end"
    try:
        Recording(run_dir, window.start, window.end)
    except UserError as error:
        return f"no replay: {error}"
    return None


def _replayed(run_dir: Path, window: Window, overrides: Sequence[str]) -> tuple[Path, Recorded | None, str]:
    """Replay a window. Return the run, its records, and how far it drifted; no records: too far to be trusted."""
    config = replay_config(run_dir, "try", window.start, overrides, evaluates=True)
    path = directory_of(config)

    def has_drifted(metrics: Any) -> bool:
        return bool(metrics.get(DRIFT, 0.0) > MAX_DRIFT)

    replay(run_dir, config, window.start, window.end, EndsAfter(window.end, has_drifted))
    resumed = forked(run_dir, "try", window.start, overrides)
    write_config(path, resumed.model_copy(update={"name": path.name}))
    tried = read_recorded(path)
    step, gap = max(drift_of(tried, window), key=lambda pair: pair[1])
    far = f"its policy was up to {gap:.2g} nats per token from the one that sampled, at step {step}"
    if gap > MAX_DRIFT:
        return path, None, f"a replay ({path}) was given up: {far}, where {MAX_DRIFT} are trusted"
    return path, tried, f"{far}; {MAX_DRIFT} are trusted"


def _resumed(run_dir: Path, window: Window, overrides: Sequence[str]) -> tuple[Path, Recorded]:
    from hotseat.loop.start import start

    config = forked(run_dir, "try", window.start, overrides)
    path = directory_of(config)
    with fork(run_dir, window.start, config):
        start(config, steering=EndsAfter(window.end))
    return path, read_recorded(path)


def _command(run_dir: Path, path: Path, overrides: Sequence[str]) -> str:
    """Return the command that continues with a cure: the trial itself where it has a checkpoint, else a new run."""
    config = read_recorded(path).config
    steps = resumable_steps(path, config)
    if not steps:
        words = ["hotseat", "run", str(run_dir / CONFIG), f"name={run_dir.name}-cured", *overrides]
        return shlex.join(words)
    state = json.loads((CheckpointStore(path / "checkpoints").path(steps[-1]) / STATE).read_text())
    allowed = keys_to_allow(str(state["config"]), config)
    return shlex.join(["hotseat", "resume", str(path), *(word for key in allowed for word in ("--allow-change", key))])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
