"""Reward functions of verl's form, which score one answer at a time and are called by names.

The worker process of rewards loads this file by its path, so it needs only the standard library.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that scores the answers to one prompt of one that scores a single answer.

    `function` gets `data_source`, `solution_str`, `ground_truth` and `extra_info`, and may be a coroutine. It returns a
    number, or a dict with `score`, whose other numbers are logged. Answers of a coroutine are scored at the same time.
    """

    def score(
        completions: Sequence[str | list[dict[str, Any]]],
        data_source: Sequence[str],
        reward_model: Sequence[dict[str, Any]],
        extra_info: Sequence[dict[str, Any] | None] | None = None,
    ) -> Any:
        results = [
            function(
                data_source=data_source[at],
                solution_str=_text(completion),
                ground_truth=copy.deepcopy(_truth(reward_model[at])),
                extra_info=copy.deepcopy((extra_info[at] if extra_info else None) or {}),
            )
            for at, completion in enumerate(completions)
        ]
        if any(map(inspect.isawaitable, results)):
            return _gathered(results)
        return _answer(results)

    score.adapts = function  # type: ignore[attr-defined]  # whose lines errors name
    return score


async def _gathered(results: Sequence[Any]) -> dict[str, Any]:
    return _answer(await asyncio.gather(*results))


def _text(completion: str | list[dict[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def _truth(reward_model: Any) -> Any:
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise KeyError("the row's column reward_model has no ground_truth")
    return reward_model["ground_truth"]


def _answer(results: Sequence[Any]) -> dict[str, Any]:
    """Return the rewards, and a list for each further number that any of the results has."""
    parts = [result if isinstance(result, dict) else {"score": result} for result in results]
    rewards = [_number(part.get("score", part)) for part in parts]
    names = dict.fromkeys(name for part in parts for name in part if name != "score" and _is_number(part[name]))
    logs = {name: [float(part[name]) if _is_number(part.get(name)) else None for part in parts] for name in names}
    return {"rewards": rewards, "extra_logs": logs}


def _number(value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"it returned {value!r}, neither a number nor a dict with the key 'score'")
    return float(value)


def _is_number(value: Any) -> bool:
    """Return whether a value is one number: Python's, numpy's, or a tensor with one element."""
    if isinstance(value, bool | int | float):
        return True
    numel = getattr(value, "numel", None)
    is_one = numel() == 1 if callable(numel) else getattr(value, "ndim", None) == 0
    return is_one and not isinstance(value, str | bytes)
