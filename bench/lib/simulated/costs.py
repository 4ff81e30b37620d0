"""What engines and trainers cost, as measured on one device, and how simulated work takes that long."""

from __future__ import annotations

import os
import threading

# bench/results/h200_loop.txt: Qwen2.5-0.5B's shape on one H200, 256 samples of 256 tokens a step.
DECODE_STEP_S = 1.23 / 256  # one token for each of up to 256 sequences
TRAINED_TOKEN_S = 1.17 / 65_536
SCORED_TOKEN_S = 0.0276 / 65_536
PUSH_S = 1.02
NUM_SLOTS = 256  # sequences for which a decode step was measured

SPEED = "HOTSEAT_SIMULATED_SPEED"  # in the environment: simulated seconds in one real second

_spent = threading.local()


def real_s(simulated_s: float) -> float:
    """Return how long simulated work really takes here."""
    return simulated_s / float(os.environ.get(SPEED, "1"))


def spend(simulated_s: float) -> None:
    """Have the call that this thread carries out take so much longer; the process that carries it waits."""
    _spent.seconds = getattr(_spent, "seconds", 0.0) + real_s(simulated_s)


def take_spent() -> float:
    """Return the real seconds that were spent in this thread since the last look."""
    seconds, _spent.seconds = getattr(_spent, "seconds", 0.0), 0.0
    return seconds
