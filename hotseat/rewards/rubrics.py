"""Settings of a judge, and checks of its rubric and pattern. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hotseat.model_source import ModelSource

TOKEN = "HOTSEAT_JUDGE_TOKEN"  # environment variable with the bearer token

Combine = Literal["mean", "median", "majority"]


@dataclass(frozen=True)
class JudgeEngine:
    """Model and limits of the judge's engines. num_slots: requests that each takes at a time."""

    model: ModelSource
    max_length: int
    num_slots: int


@dataclass(frozen=True)
class JudgeSettings:
    urls: tuple[str, ...]  # up to and including /v1; none with an engine
    model: str
    rubric: str  # text, with {answer} in it
    name: str = "judge"  # of its verdicts in metrics and samples
    weight: float = 1.0
    pattern: str = ""  # with one group, which holds the verdict
    scale: tuple[float, float] = (0.0, 10.0)
    choices: Mapping[str, float] = field(default_factory=dict)  # words to verdicts; without any, verdicts are numbers
    votes: int = 1
    combine: Combine = "mean"
    temperature: float = 0.0
    max_tokens: int = 1024
    request: Mapping[str, Any] = field(default_factory=dict)  # further fields of requests
    timeout_s: float = 180.0
    retries: int = 4
    max_open: int = 64
    token: str | None = field(default=None, repr=False)
    engine: JudgeEngine | None = None  # None: it is behind endpoints
    cache: str | None = None  # the file of verdicts; None: they are kept in memory only


def rubric_problem(text: str) -> str | None:
    """Return why a text is no rubric; None if it is one."""
    return None if "{answer}" in text else "it has no {answer}, where the answer to judge goes"


def pattern_problem(pattern: str) -> str | None:
    """Return why a pattern cannot find verdicts; None if it can."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"{pattern!r} is no regular expression of Python's re: {error}"
    return None if compiled.groups == 1 else f"{pattern!r} has {compiled.groups} groups: it needs one, for the verdict"
