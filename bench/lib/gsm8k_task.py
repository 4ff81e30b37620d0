r"""GSM8K with answers in \boxed{}: the instruction, and the reward, of TRL's form, which Hotseat and TRL both call."""

from __future__ import annotations

import re
from typing import Any

INSTRUCTION = r"Solve it step by step, and put the final number into \boxed{}."
BOXED = re.compile(r"boxed\{[^0-9-]*(-?[0-9.,]*[0-9])")


def reward_func(completions: list[list[dict[str, str]]], label: list[str], **columns: Any) -> list[float]:
    r"""Return 1 for each answer whose last \boxed{} has the label's number, else 0."""
    return [
        float(number_in(completion[0]["content"]) == float(right))
        for completion, right in zip(completions, label, strict=True)
    ]


def number_in(answer: str) -> float | None:
    """Return the number in the last box; None without any."""
    found = BOXED.findall(answer)
    try:
        return float(found[-1].replace(",", "")) if found else None
    except ValueError:
        return None
