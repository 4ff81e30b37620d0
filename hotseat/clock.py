"""When the command of this process began: imports and checks are part of the time that people wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_began_s: float | None = None


def begin() -> None:
    """Note that a command begins now."""
    global _began_s
    _began_s = time.time()


def began_s() -> float:
    """Return when the command began, in seconds since 1970; now, if that was not noted."""
    return time.time() if _began_s is None else _began_s


@contextmanager
def of_one_run() -> Iterator[None]:
    """Around a run: it began with its command or, if there is none or it has had a run already, now."""
    global _began_s
    if _began_s is None:
        begin()
    try:
        yield
    finally:
        _began_s = None
