"""Built-in reward functions. Answers are compared as text or as numbers, never evaluated.

This file runs in a worker process like any other reward file, so it needs only the standard library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

FUNCTIONS = ("exact_match", "number_match")

# Text of a token that ends an answer, such as </s>, <|im_end|>, <eos>.
_END_TOKEN = re.compile(r"<[|/]?[\w▁|-]+[|]?>")
_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d+)?")


def exact_match(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | None]) -> list[float | None]:
    """Score 1 if the answer is the label, apart from surrounding spaces and end tokens; else 0."""
    return [
        None if label is None else float(answer_of(query, prompt) == label.strip())
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def number_match(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str | None]) -> list[float | None]:
    """Score 1 if the last number of the answer is that of the label, else 0; no reward if the label has no number."""
    rewards: list[float | None] = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        expected = None if label is None else number_in(label)
        answered = number_in(answer_of(query, prompt))
        if expected is None:
            rewards.append(None)
        else:
            rewards.append(float(answered is not None and math.isclose(answered, expected, rel_tol=1e-9)))
    return rewards


def answer_of(query: str, prompt: str) -> str:
    """Return the text after the prompt, without end tokens and surrounding spaces."""
    answer = query[len(prompt) :] if query.startswith(prompt) else query
    while True:
        answer = answer.strip()
        start = answer.rfind("<")
        if start < 0 or _END_TOKEN.fullmatch(answer, start) is None:
            return answer
        answer = answer[:start]


def number_in(text: str, position: int = -1) -> float | None:
    """Return a number in a text, the last one or that at a position, as a float; None if there is none."""
    numbers = [part for part in _NUMBER.findall(text) if part]
    try:
        return float(numbers[position].replace(",", "")) if numbers else None
    except ValueError:
        return None


def last_block(text: str) -> str:
    """Return the content of the last fenced block of a text; the whole text if there is none."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text
