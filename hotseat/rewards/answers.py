"""Reading of a reward function's answer, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeGuard

from hotseat.failed import Failed, NotApplicable

_KEYS = ("rewards", "scores", "extra_logs")
_MAX = (2 - 2**-23) * 2.0**127  # the largest number of 32 bits


@dataclass(frozen=True)
class Score:
    """The reward of one sample."""

    reward: float
    score: float  # used by dynamic filtering
    extra: Mapping[str, float] = field(default_factory=dict)


class BadAnswer(Exception):
    """An answer from which no rewards can be read."""


def read_answer(answer: Any, num_samples: int, *, is_optional: bool = False) -> list[Score | Failed]:
    """Return one score per sample, in order; `Failed` for a sample whose reward or score is null or not finite.

    The answer is one number per sample, or an object with them under "rewards", and optionally under "scores" (else
    the rewards), and with numbers to log under "extra_logs": one per sample, or one for all of them. [n, 1] is [n].
    is_optional: a reward that is null does not apply to the sample, which is no failure of the function.
    """
    rewards, scores, extra_logs = _parts(answer)
    rewards = _column("rewards", rewards, num_samples)
    scores = rewards if scores is None else _column("scores", scores, num_samples)
    logs = {
        name: _column(f"extra_logs[{name!r}]", each if isinstance(each, list) else [each] * num_samples, num_samples)
        for name, each in extra_logs.items()
    }
    samples: list[Score | Failed] = []
    for number, (reward, score) in enumerate(zip(rewards, scores, strict=True)):
        if reward is None and is_optional:
            samples.append(NotApplicable("the reward is None, so it does not apply"))
        elif not _is_finite(reward):
            samples.append(Failed(f"the reward is {_name(reward)}"))
        elif not _is_finite(score):
            samples.append(Failed(f"the score is {_name(score)}"))
        else:
            extra = {name: value for name, values in logs.items() if (value := values[number]) is not None}
            samples.append(Score(reward, score, extra))
    return samples


def _parts(answer: Any) -> tuple[Any, Any, dict[str, Any]]:
    if answer is None:
        raise BadAnswer("returned None")
    if not isinstance(answer, dict):
        return answer, None, {}
    if "__type__" in answer:
        raise BadAnswer(f"returned a {answer['__type__']}, neither numbers nor a dict with 'rewards'")
    for key in answer:
        near = get_close_matches(key, _KEYS, n=1, cutoff=0.8)
        if key not in _KEYS and near and near[0] not in answer:
            raise BadAnswer(f"returned a dict with the key {key!r}: did you mean {near[0]!r}?")
    if "rewards" not in answer:
        raise BadAnswer(f"returned a dict without the key 'rewards'; it has: {', '.join(answer) or 'none'}")
    logs = answer.get("extra_logs")
    if logs is None:
        logs = {}
    if not isinstance(logs, dict) or "__type__" in logs:
        raise BadAnswer("returned 'extra_logs' that is not a dict")
    return answer["rewards"], answer.get("scores"), logs


def _column(name: str, values: Any, num_samples: int) -> list[float | None]:
    """Check that an answer has one number, or null, per sample, and return them as floats."""
    if not isinstance(values, list):
        values = [values]  # a single number, for a single sample
    values = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, bool | int | float):
            raise BadAnswer(f"returned {name} with {_name(value)} for sample {number}, not a number")
    if len(values) != num_samples:
        raise BadAnswer(f"returned {len(values)} {name} for {num_samples} samples")
    return [None if value is None else _as_float(value) for value in values]


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a value is finite as a 32-bit float, the type in which advantages are computed."""
    return value is not None and abs(value) <= _MAX


def _name(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return f"a {value.get('__type__', 'dict')}"
    if isinstance(value, float) and math.isfinite(value) and not _is_finite(value):
        return f"{value}, too large for 32 bits"
    return "a list" if isinstance(value, list) else repr(value) if len(repr(value)) < 40 else f"{repr(value)[:36]}..."
