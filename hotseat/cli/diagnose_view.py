"""`hotseat diagnose`: why a run collapsed, for people as text and for programs as JSON."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from hotseat.cli.ending import OK
from hotseat.observe.diagnosis import Cause, Ending, diagnose
from hotseat.observe.recorded import read_recorded
from hotseat.observe.report.reading import check_is_run

CAUSE = 3  # exit code of a run that a rule fires for; 1 and 2 are the command's own, as everywhere


def run_diagnose(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    check_is_run(run_dir)
    recorded = read_recorded(run_dir)
    ending, causes = diagnose(recorded)
    if arguments.json:
        print(json.dumps(facts(run_dir, ending, causes, recorded.error), indent=1))
    else:
        for line in lines(ending, causes, recorded.error):
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return CAUSE if causes else OK


def lines(ending: Ending, causes: list[Cause], error: str | None) -> list[str]:
    """Return the diagnosis for people."""
    said = [str(ending)]
    if error is not None:
        said.append(f"it ended with an error: {error.splitlines()[0]}")
    if not causes:
        return [*said, "healthy: no rule fires"]
    for number, cause in enumerate(causes, start=1):
        signs = cause.signs
        origin = f", which {cause.follows} brings about" if cause.follows else ""
        said.append(f"\n{number}. {cause.rule.name}: {cause.rule.words} (from step {signs.began}{origin})")
        said += [f"   {signs.detail}"] * bool(signs.detail)
        said += [f"   {each}" for each in signs.evidence]
        said += [f"   try {each}" for each in signs.cure]
    return said


def facts(run_dir: Path, ending: Ending, causes: list[Cause], error: str | None) -> dict[str, Any]:
    """Return the diagnosis as one JSON object."""
    return {
        "run": str(run_dir),
        "healthy": not causes,
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
                "cure": [vars(each) for each in cause.signs.cure],
            }
            for cause in causes
        ],
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have by null."""
    return {
        name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in values.items()
    }
