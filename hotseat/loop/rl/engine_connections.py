"""Connections of rollout hosts to engines, which have to be made anew when one side was replaced."""

from __future__ import annotations

from collections.abc import Sequence

from hotseat.loop.rl.groups import Groups
from hotseat.loop.workers.engine_worker import EngineWorker


class Connections:
    """Connects rollout hosts to the policy's engines, and to the judge's if there are any."""

    def __init__(self, groups: Groups):
        self._hosts = groups.hosts
        self._engines = groups.engines
        self._judge = groups.judge

    def reconnect(self, ranks: Sequence[int] | None = None) -> None:
        """Connect hosts of these ranks, or all, to the current engines; drop requests of earlier connections."""
        # Hosts first: an episode that is still waited for would fail when its request is dropped.
        connected = self._hosts.connect(self._engines, ranks)
        self._engines.call(EngineWorker.drop_requests, connected)
        if self._judge is not None and ranks is not None:  # all: engines changed, not hosts or the judge
            self.reconnect_judge(ranks)

    def reconnect_judge(self, ranks: Sequence[int] | None = None) -> None:
        """Connect hosts of these ranks, or all, to the judge's engines; drop requests of earlier connections."""
        assert self._judge is not None
        self._judge.call(EngineWorker.drop_requests, self._hosts.connect_judge(self._judge, ranks))

    def rejoin(self, ranks: Sequence[int]) -> None:
        """Have all hosts send requests to the engines of these ranks, which were replaced and have the weights."""
        self._hosts.rejoin(self._engines, ranks)
