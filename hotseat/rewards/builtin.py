"""Reward functions that need no file of one's own. Answers are compared as text or as numbers, never evaluated.

Run in a worker process like any other reward file, so it needs only the standard library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

FUNCTIONS = ("exact_match", "number_match")

# What tokenizers write for the tokens that end an answer, such as </s>, <|im_end|>, <eos>.
_END_TOKENS = re.compile(r"(?:\s*<[|/]?[\w▁|-]+[|]?>)+\s*$")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d+)?")


def exact_match(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | None]) -> list[float | None]:
    """1 if what follows the prompt is the label, spaces around and end tokens behind it aside; else 0."""
    return [
        None if label is None else float(answer_of(query, prompt) == label.strip())
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def number_match(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | None]) -> list[float | None]:
    """1 if the last number after the prompt is the label's last number; else 0. No number in the label: no reward."""
    rewards: list[float | None] = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        wanted = None if label is None else last_number(label)
        given = last_number(answer_of(query, prompt))
        if wanted is None:
            rewards.append(None)
        else:
            rewards.append(float(given is not None and math.isclose(given, wanted, rel_tol=1e-9)))
    return rewards


def answer_of(query: str, prompt: str) -> str:
    """What follows the prompt, without end tokens and the spaces around it."""
    answer = query[len(prompt) :] if query.startswith(prompt) else query
    return _END_TOKENS.sub("", answer).strip()


def last_number(text: str) -> float | None:
    """The last number in a text, as a float; None if there is none."""
    found = [part for part in _NUMBER.findall(text) if part]
    try:
        return float(found[-1].replace(",", "")) if found else None
    except ValueError:
        return None
