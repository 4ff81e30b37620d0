"""Graders that compare text, run in a worker process with a deadline. Answers are parsed, never evaluated.

Each takes three lists, like every function of a worker process: answers, the graders' options, and labels. It returns a
pair for each answer: the verdict, and None; or None, and why the grader cannot judge. A call with empty lists imports
what the grader needs.
"""

from __future__ import annotations

import json
import math as _math
import re
import runpy
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Verdict = tuple[float | None, str | None]
Judge = Callable[[str, dict[str, Any], Any], Verdict]  # takes an answer, the grader's options, and the label
Grader = Callable[[Sequence[str], Sequence[dict[str, Any]], Sequence[str | None]], list[Verdict]]

# By its path: importing the package would load modules that a worker does not need.
_builtin = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("builtin.py"))))


def _grader(*, needs_label: bool = False, module: str | None = None) -> Callable[[Judge], Grader]:
    """Make a grader from a function that judges one answer. module: what that imports when it is called."""

    def make(judge: Judge) -> Grader:
        def verdicts(
            answers: Sequence[str], options: Sequence[dict[str, Any]], labels: Sequence[str | None]
        ) -> list[Verdict]:
            if module is not None:
                import_module(module)
            return [
                (None, "the row has no label") if needs_label and label is None else judge(answer, each, label)
                for answer, each, label in zip(answers, options, labels, strict=True)
            ]

        return verdicts

    return make


@_grader(needs_label=True)
def exact(answer: str, options: dict[str, Any], label: str) -> Verdict:
    """Score 1 if the answer is the label, apart from surrounding spaces; else 0."""
    return float(answer.strip() == label.strip()), None


@_grader(needs_label=True)
def number(answer: str, options: dict[str, Any], label: str) -> Verdict:
    """Score 1 if the final number of the answer is that of the label, else 0.

    The final number is the first one after the last `####`, as GSM8K writes it; without `####`, the last one.
    """
    expected = _final_number(label)
    if expected is None:
        return None, f"the label has no number: {_shown(label)}"
    answered = _final_number(answer)
    return float(answered is not None and _math.isclose(answered, expected, rel_tol=1e-9)), None


@_grader(needs_label=True, module="math_verify")
def math(answer: str, options: dict[str, Any], label: str) -> Verdict:
    """Score 1 if math-verify finds the answer equal to the label, else 0."""
    from math_verify import parse, verify

    # This process has a deadline; the library's own, by signals, cannot interrupt long operations on integers.
    expected = parse(_as_latex(_without_percents(label)), parsing_timeout=None, fallback_mode="no_fallback")
    if not expected:
        return None, f"math-verify cannot read the label: {_shown(label)}"
    parsed = parse(_without_percents(_after_hashes(answer)), parsing_timeout=None)
    return float(verify(expected, parsed, timeout_seconds=None)), None


@_grader()
def regex(answer: str, options: dict[str, Any], label: str | None) -> Verdict:
    """Score 1 if the pattern occurs in the answer, else 0."""
    return float(re.search(options["pattern"], answer) is not None), None


@_grader(module="jsonschema.validators")
def json_schema(answer: str, options: dict[str, Any], label: str | None) -> Verdict:
    """Score 1 if the answer, or its last fenced block, is JSON that fits the schema; else 0."""
    from jsonschema.validators import validator_for

    try:
        value = json.loads(_builtin.last_block(answer), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0, None
    schema = options["json_schema"]
    return float(validator_for(schema)(schema).is_valid(value)), None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _after_hashes(text: str) -> str:
    return text.rpartition("####")[2]


def _final_number(text: str) -> float | None:
    _, hashes, end = text.rpartition("####")
    final: float | None = _builtin.number_in(end, 0 if hashes else -1)
    return final


def _as_latex(label: str) -> str:
    """Return a label in a form that math-verify reads as a whole: a bare formula becomes one in dollars."""
    label = _after_hashes(label).strip()
    is_latex = re.search(r"(?<!\\)\$|\\boxed|\\\(|\\\[", label) is not None  # \$ is an amount of dollars
    return label if is_latex else f"${label}$"


def _without_percents(text: str) -> str:
    r"""Drop each \%: math-verify ignores it in formulas, but reads none where it is the end of a \boxed{}."""
    return text.replace("\\%", "")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."
