"""Waits of tests for what happens in other threads and processes."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0  # longer than anything takes on a loaded machine


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it has not come true"
        time.sleep(0.01)
