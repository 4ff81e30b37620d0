"""Announces each role of a run when its processes are ready, while others are still starting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hotseat.cluster import WorkerGroup

ENGINES = "rollout"  # the role whose processes are announced one by one


class Readiness:
    """Shows a line for each role, and for each engine, when it is ready. Groups report from threads of their own."""

    def __init__(self, show: Callable[[str], object]):
        self._show = show
        self._lock = threading.Lock()
        self._waiting: dict[str, set[int]] = {}  # ranks of each role that are not ready yet
        self._is_closed = False

    def watch(self, group: WorkerGroup[Any], started_s: float) -> None:
        """Announce a group that was launched at `started_s`, by `time.monotonic`."""
        self._waiting[group.name] = set(group.ranks)
        group.when_started(partial(self._note, group.name, group.size, started_s))

    def close(self) -> None:
        """Announce nothing from now on."""
        with self._lock:
            self._is_closed = True

    def _note(self, role: str, size: int, started_s: float, rank: int) -> None:
        with self._lock:
            waiting = self._waiting[role]
            if self._is_closed or rank not in waiting:
                return
            waiting.remove(rank)
            after = f"ready after {time.monotonic() - started_s:.1f} s"
            if role == ENGINES:
                self._show(f"engine {rank} {after}")
            elif not waiting:
                self._show(f"{role} {after}{f' ({size} ranks)' if size > 1 else ''}")
