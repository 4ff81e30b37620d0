"""The time at which this process's command began, so that reported durations include imports and checks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_began_s: float | None = None


def begin() -> None:
    """Record that a command begins now."""
    global _began_s
    _began_s = time.time()


def began_s() -> float:
    """Return when the command began, in seconds since 1970; the present time if `begin` was not called."""
    return time.time() if _began_s is None else _began_s


@contextmanager
def of_one_run() -> Iterator[None]:
    """Time one run: the first run of a command counts from the command's begin, any other from now."""
    global _began_s
    if _began_s is None:
        begin()
    try:
        yield
    finally:
        _began_s = None
