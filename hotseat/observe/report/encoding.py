"""How data goes into the page, and how much of it may."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def encoded(value: object) -> bytes:
    """JSON that may stand inside a script element: without `<`, no text of a model can close it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair is what a byte-level tokenizer can leave; it has no UTF-8.
    return text.replace("<", "\\u003c").encode("utf-8", "replace")


def largest_that_fits(make: Callable[[int], T], sizes: Sequence[int], budget: int) -> T:
    """What `make` gives for the first of the falling `sizes` whose JSON has at most `budget` bytes, or for the last."""
    made: dict[int, T] = {}

    def fits(size: int) -> bool:
        made[size] = make(size)
        return len(encoded(made[size])) <= budget

    first = 0 if fits(sizes[0]) else bisect.bisect_left(sizes, True, lo=1, hi=len(sizes) - 1, key=fits)
    return made[sizes[first]] if sizes[first] in made else make(sizes[first])
