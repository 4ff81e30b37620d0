"""Deadlines of an episode's parts: of each answer of the policy, and of what is between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

SCORING_S = 60.0  # that an agent has to score an episode whose policy ran out of time


@dataclass(frozen=True)
class Deadlines:
    """Limits within an episode, whose own limit is `AgentHost`'s; None: none but that.

    turn_s: of the policy for one answer. tool_s: of environment, tools or program while the policy is not asked.
    scores_policy: a policy that runs out of time is cut there, and its episode is scored; else the sample fails. Tools
    that run out of time always fail it: the policy is not to blame.
    """

    turn_s: float | None = None
    tool_s: float | None = None
    scores_policy: bool = False


class ToolClock:
    """Calls `when_over` once nothing has been asked of the policy for `limit_s`. Used in one event loop."""

    def __init__(self, limit_s: float | None, when_over: Callable[[], object]):
        self._limit_s = limit_s
        self._when_over = when_over
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        if self._limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._when_over)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
