"""The watch over the daemons of a Ray that was started here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotseat.cluster import _guard
from hotseat.errors import ClusterError

_DAEMONS = {"gcs_server": "GCS server", "raylet": "raylet"}  # Ray's name and ours, of those without which it cannot be
_DAEMON_PERIOD_S = 0.25


class DaemonWatch:
    """A thread that checks whether Ray's own processes live, and calls `on_loss` once when one is gone.

    Without it a call would wait until Ray gives up, and Ray gives up by ending this process. Woken by `close`.
    """

    def __init__(self, processes: Mapping[str, Sequence[Any]], on_loss: Callable[[ClusterError], object]):
        """`processes`: Ray's, by its own names for them, each with a `process` that has a `pid`."""
        self._watched = [
            (words, entry.process.pid, _guard.start_time(entry.process.pid))
            for name, words in _DAEMONS.items()
            for entry in processes.get(name, ())
        ]
        self._on_loss = on_loss
        self._error: ClusterError | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-daemons", daemon=True)
        self._thread.start()

    def lost(self) -> ClusterError | None:
        """Return the error that says which of them is gone; None while all live."""
        if self._error is None:
            for words, pid, started in self._watched:
                if _guard.process_state(pid, started) == "gone":
                    self._error = ClusterError(
                        f"Ray's {words} (pid {pid}) died: without it no process of this run can be reached, so the run"
                        " ends. It was killed, by hand or for want of memory (`dmesg` tells), or it crashed"
                    )
                    break
        return self._error

    def close(self) -> None:
        self._is_closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _watch(self) -> None:
        while not self._is_closing.wait(_DAEMON_PERIOD_S):
            if (error := self.lost()) is not None:
                self._on_loss(error)
                return
