"""`hotseat diagnose`: why a run collapsed, for people as text and for programs as JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from hotseat.cli.ending import OK
from hotseat.errors import UserError
from hotseat.observe.diagnosis import Cause, Ending, Unexplained, diagnose, unexplained
from hotseat.observe.diagnosis.run_ending import MIN_STEPS
from hotseat.observe.recorded import Recorded, read_recorded
from hotseat.observe.report.reading import check_is_run

MAX_STEPS = 30  # of a trial
FAILED = 3  # exit code of a run that failed or that a rule fires for; 1 and 2 are the command's own, as everywhere


def run_diagnose(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    check_is_run(run_dir)
    recorded = read_recorded(run_dir)
    if not recorded.config.has_rollouts:
        raise UserError(
            f"{run_dir} is a run of {recorded.config.task}, and the rules are about rollouts and rewards:"
            f" `hotseat report {run_dir}` draws its curves"
        )
    ending, causes = diagnose(recorded)
    unknown = unexplained(recorded, ending, causes)
    if arguments.steps is not None and arguments.trial is None:
        raise UserError("--steps is for a trial: add --try")
    if arguments.trial is not None:
        return _try(arguments, recorded, ending, causes, unknown)
    if arguments.json:
        print(json.dumps(facts(run_dir, ending, causes, unknown, recorded.error), indent=1))
    else:
        for line in lines(run_dir, ending, causes, unknown, recorded.error):
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return FAILED if is_healthy(ending, causes, unknown, recorded.error) is False else OK


def _try(
    arguments: argparse.Namespace,
    recorded: Recorded,
    ending: Ending,
    causes: list[Cause],
    unknown: Unexplained | None,
) -> int:
    """Try a cure, print what it showed, and return 0 if it helped."""
    from hotseat.cli.diagnose_trial import run_trial, trial_facts, trial_lines

    run_dir = Path(arguments.run_dir)
    max_steps = MAX_STEPS if arguments.steps is None else arguments.steps
    # The runs of a trial print as runs do, and standard output is for the JSON object alone.
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
        trial = run_trial(run_dir, recorded, ending, causes, unknown, arguments.trial, max_steps)
    if arguments.json:
        said = facts(run_dir, ending, causes, unknown, recorded.error) | {"trial": trial_facts(trial)}
        print(json.dumps(said, indent=1))
    else:
        for line in [*lines(run_dir, ending, causes, unknown, recorded.error), "", *trial_lines(trial)]:
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return OK if trial.outcome.has_helped else FAILED


def lines(
    run_dir: Path, ending: Ending, causes: list[Cause], unknown: Unexplained | None, error: str | None
) -> list[str]:
    """Return the diagnosis for people."""
    said = [str(ending)]
    if error is not None:
        said.append(f"it ended with an error: {error.splitlines()[0]}")
    if unknown is not None:
        return [*said, *_unknown_lines(run_dir, ending, unknown)]
    if not causes:
        words = {
            None: f"no rule fires; fewer than {MIN_STEPS} steps are too few to judge by",
            True: "healthy: no rule fires",
            False: "no rule fires: until that error it learned as healthy runs do",
        }
        return [*said, words[is_healthy(ending, causes, unknown, error)]]
    for number, cause in enumerate(causes, start=1):
        signs = cause.signs
        origin = f", a consequence of {cause.follows}" if cause.follows else ""
        said.append(f"\n{number}. {cause.rule.name}: {cause.rule.words} (seen from step {signs.began}{origin})")
        said += [f"   {signs.detail}"] * bool(signs.detail)
        said += [f"   {each}" for each in signs.evidence]
        said += [f"   try {each}" for each in cause.cure]
    return said


def is_healthy(ending: Ending, causes: list[Cause], unknown: Unexplained | None, error: str | None) -> bool | None:
    """Tell whether a run is healthy; None: it has too few steps to say so."""
    if causes or unknown:
        return False
    return None if ending.is_poor or ending.kind == "unknown" else error is None


def _unknown_lines(run_dir: Path, ending: Ending, unknown: Unexplained) -> list[str]:
    said = [
        "failed, cause unknown: no rule fires",
        f"   looked at: {', '.join(unknown.looked_at)}",
        f"   not recorded: {', '.join(unknown.not_recorded)}",
    ]
    place = f"the samples around step {unknown.step}" if ending.kind == "fell" else "the samples with the most reward"
    return [
        *said,
        f"   next: `hotseat report {run_dir}`, to read {place}",
        "   next: short runs in which one setting differs: any of these can do such harm without a sign in the metrics",
        *(f"      {each}" for each in unknown.trials),
    ]


def facts(
    run_dir: Path, ending: Ending, causes: list[Cause], unknown: Unexplained | None, error: str | None
) -> dict[str, Any]:
    """Return the diagnosis as one JSON object."""
    return {
        "run": str(run_dir),
        "healthy": is_healthy(ending, causes, unknown, error),
        "error": error,
        "ending": _finite(vars(ending)),
        "causes": [
            {
                "name": cause.rule.name,
                "words": cause.rule.words,
                "began": cause.signs.began,
                "strength": cause.signs.strength,
                "follows": cause.follows,
                "detail": cause.signs.detail,
                "evidence": [_finite(vars(each)) for each in cause.signs.evidence],
                "cure": [vars(each) for each in cause.cure],
            }
            for cause in causes
        ],
        "unknown": None if unknown is None else asdict(unknown),
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have by null."""
    return {
        name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in values.items()
    }
