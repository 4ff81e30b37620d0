"""Environment and signals of processes that tests start."""

from __future__ import annotations

import os
import signal

# Ray's workers otherwise run at niceness 15: beside other tests they would hardly run at all.
RAY_PRIORITY = {"RAY_worker_niceness": "0"}


def own_environment(*prefixes: str) -> dict[str, str]:
    """Return this process's environment without what another test's Ray may have left there, nor these prefixes."""
    left_out = ("RAY_", "HOTSEAT_", *prefixes)
    return {key: value for key, value in os.environ.items() if not key.startswith(left_out)} | RAY_PRIORITY


def hear_interrupts() -> None:
    """Hear SIGINT in a child: a shell starts what runs in its background with it ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
