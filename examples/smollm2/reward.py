"""1 if the last number of the answer is the right one, else 0. What else the answer says does not matter."""

from __future__ import annotations

import re

# A minus between two numbers is no sign: the last number of "9-4" is 4, that of "4 - 9 = -5" is -5.
NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def last_number(text: str) -> float | None:
    found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("−", "-")))
    return float(found[-1]) if found else None


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """`queries` are prompts with their answers."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return [float(last_number(answer) == float(label)) for answer, label in zip(answers, labels, strict=True)]
