"""How far a run is, and whether it gets on: for its status, its health and its metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

STARTING = "starting"
_MARGIN = 5.0  # a wait may take so many times the longest one before


@dataclass(frozen=True)
class QuietLimits:
    """Bounds, in seconds, on how long a run may show no progress: `cluster.silence_timeout_s` and `call_timeout_s`."""

    least_s: float = 30.0
    most_s: float = 1800.0


class RunProgress:
    """Step and phase of a run, and when it last got on. The loop's thread changes it; any thread reads it, unlocked.

    A run gets on when a phase, a step, or a stage of its start begins. `limit_s` is how long that may take: several
    times what this phase has ever taken, or as long as a call may take where that is not known: for a phase that has
    not ended yet in this process, or in which a process was lost and is replaced.
    """

    def __init__(
        self,
        num_steps: int,
        last_step: int | None = None,
        limits: QuietLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begin at the start of a command. last_step: that of the checkpoint that the run resumes from."""
        self.num_steps = num_steps
        self.step = -1 if last_step is None else last_step  # step 0 is the evaluation before training
        self.has_stepped = False  # in this process
        self.metrics: Mapping[str, float] = {}  # numbers of the last step
        self.num_events: Counter[str] = Counter()  # by kind
        self.uploads: Callable[[], Mapping[str, Any] | None] = lambda: None  # returns what is known of them
        self.doing = STARTING
        self.since_s = time.time()  # of `doing`
        self._limits = limits or QuietLimits()
        self._clock = clock
        self._marked_s = clock()
        self._longest_s: dict[str, float] = {}

    def begin(self, doing: str) -> None:
        """Take note that the run begins a phase, or a stage of its start."""
        self.mark()
        self.doing, self.since_s = doing, time.time()

    def mark(self) -> None:
        """Take note that the run has got on."""
        now = self._clock()
        self._longest_s[self.doing] = max(self._longest_s.get(self.doing, 0.0), now - self._marked_s)
        self._marked_s = now

    def end_step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Take note that a step was finished, with its metrics."""
        self.mark()
        self.step, self.has_stepped = step, self.has_stepped or step > 0
        self.metrics = {name: value for name, value in metrics.items() if isinstance(value, int | float)}

    def note(self, kind: str) -> None:
        """Take note of an event. A fault is a process that was lost: the present phase may take longer than ever."""
        self.num_events[kind] += 1
        if kind == "fault":
            self._longest_s.pop(self.doing, None)
            self._marked_s = self._clock()

    @property
    def steps_made(self) -> int:
        """Return the number of the last step that was finished, 0 before the first."""
        return max(0, self.step)

    @property
    def quiet_s(self) -> float:
        """Return the seconds since the run last got on."""
        return max(0.0, self._clock() - self._marked_s)

    @property
    def limit_s(self) -> float:
        """Return the seconds for which the run may show no progress now."""
        longest_s = self._longest_s.get(self.doing)
        least_s, most_s = self._limits.least_s, max(self._limits.least_s, self._limits.most_s)
        return most_s if longest_s is None else min(most_s, max(least_s, _MARGIN * longest_s))
