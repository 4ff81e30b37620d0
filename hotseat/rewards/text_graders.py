"""Graders that compare text, run in a worker process with a deadline. Answers are parsed, never evaluated.

Each function takes three lists, like every function of a worker process: answers, the graders' options, and labels. It
returns a pair for each answer: the verdict, and None; or None, and why the grader cannot judge. A call with empty lists
imports what the grader needs.
"""

from __future__ import annotations

import json
import math as _math
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Verdict = tuple[float | None, str | None]
_NO_LABEL: Verdict = (None, "the row has no label")


# By its path: importing the package would load modules that a worker does not need.
_builtin = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("builtin.py"))))


def exact(answers: Sequence[str], options: Sequence[dict[str, Any]], labels: Sequence[str | None]) -> list[Verdict]:
    """Score 1 if the answer is the label, apart from surrounding spaces; else 0."""
    return [
        _NO_LABEL if label is None else (float(answer.strip() == label.strip()), None)
        for answer, label in zip(answers, labels, strict=True)
    ]


def number(answers: Sequence[str], options: Sequence[dict[str, Any]], labels: Sequence[str | None]) -> list[Verdict]:
    """Score 1 if the final number of the answer is that of the label, else 0.

    The final number is the first one after the last `####`, as GSM8K writes it; without `####`, the last one.
    """
    verdicts: list[Verdict] = []
    for answer, label in zip(answers, labels, strict=True):
        expected = None if label is None else _final_number(label)
        if label is None:
            verdicts.append(_NO_LABEL)
        elif expected is None:
            verdicts.append((None, f"the label has no number: {_shown(label)}"))
        else:
            number = _final_number(answer)
            verdicts.append((float(number is not None and _math.isclose(number, expected, rel_tol=1e-9)), None))
    return verdicts


def math(answers: Sequence[str], options: Sequence[dict[str, Any]], labels: Sequence[str | None]) -> list[Verdict]:
    """Score 1 if math-verify finds the answer equal to the label, else 0."""
    from math_verify import parse, verify

    verdicts: list[Verdict] = []
    for answer, label in zip(answers, labels, strict=True):
        if label is None:
            verdicts.append(_NO_LABEL)
            continue
        # This process has a deadline; the library's own, by signals, cannot interrupt long operations on integers.
        expected = parse(_as_latex(label), parsing_timeout=None, fallback_mode="no_fallback")
        if not expected:
            verdicts.append((None, f"math-verify cannot read the label: {_shown(label)}"))
            continue
        parsed = parse(_after_hashes(answer), parsing_timeout=None)
        verdicts.append((float(verify(expected, parsed, timeout_seconds=None)), None))
    return verdicts


def regex(answers: Sequence[str], options: Sequence[dict[str, Any]], labels: Sequence[str | None]) -> list[Verdict]:
    """Score 1 if the pattern occurs in the answer, else 0."""
    return [
        (float(re.search(each["pattern"], answer) is not None), None)
        for answer, each in zip(answers, options, strict=True)
    ]


def json_schema(
    answers: Sequence[str], options: Sequence[dict[str, Any]], labels: Sequence[str | None]
) -> list[Verdict]:
    """Score 1 if the answer, or its last fenced block, is JSON that fits the schema; else 0."""
    from jsonschema.validators import validator_for

    verdicts: list[Verdict] = []
    for answer, each in zip(answers, options, strict=True):
        try:
            value = json.loads(_builtin.last_block(answer), parse_constant=_refuse)
        except (ValueError, RecursionError):
            verdicts.append((0.0, None))
            continue
        schema = each["json_schema"]
        verdicts.append((float(validator_for(schema)(schema).is_valid(value)), None))
    return verdicts


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _after_hashes(text: str) -> str:
    return text.rpartition("####")[2]


def _final_number(text: str) -> float | None:
    _, hashes, end = text.rpartition("####")
    find: Callable[[str], float | None] = _builtin.first_number if hashes else _builtin.last_number
    return find(end)


def _as_latex(label: str) -> str:
    """Return a label in a form that math-verify reads as a whole: a bare formula becomes one in dollars."""
    label = _after_hashes(label).strip()
    return label if "$" in label or "\\boxed" in label or "\\(" in label or "\\[" in label else f"${label}$"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."
