"""verl's built-in scoring, where a command names no reward function: that of GSM8K, by the source of the row.

This file runs in the worker process of rewards, so it needs only the standard library.
"""

from __future__ import annotations

import re
from typing import Any, Literal

GSM8K = "openai/gsm8k"

_NUMBER = r"-?[0-9.,]+"
_MARKED = re.compile(rf"#### ({_NUMBER})")


def verl_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    """Score 1 if the last number after `#### ` is the expected one, else 0. flexible: the last number of all."""
    if data_source != GSM8K:
        raise ValueError(f"there is no built-in scoring for data_source {data_source!r}: only for {GSM8K!r}")
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}, must be strict or flexible")
    return float(_answer(solution_str, method) == ground_truth)


def _answer(text: str, method: str) -> str | None:
    """Return the number that an answer ends with, as text without thousands separators; None if there is none."""
    if method == "strict":
        marked = _MARKED.findall(text)
        return marked[-1].replace(",", "") if marked else None
    numbers = [number for number in re.findall(_NUMBER, text) if number != "."]
    return numbers[-1] if numbers else None
