"""Encoding of data for the page, within a budget of bytes."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def encoded(value: object) -> bytes:
    """Encode a value as JSON for a script element: without `<`, no text of a model can close the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A byte-level tokenizer can leave half a surrogate pair, which has no UTF-8.
    return text.replace("<", "\\u003c").encode("utf-8", "replace")


def largest_that_fits(make: Callable[[int], T], sizes: Sequence[int], budget: int) -> T:
    """Call `make` with the first of the descending `sizes` whose JSON has at most `budget` bytes, or with the last."""
    made: dict[int, T] = {}

    def fits(size: int) -> bool:
        made[size] = make(size)
        return len(encoded(made[size])) <= budget

    first = 0 if fits(sizes[0]) else bisect.bisect_left(sizes, True, lo=1, hi=len(sizes) - 1, key=fits)
    return made[sizes[first]] if sizes[first] in made else make(sizes[first])
