"""The watch over what Ray needs: the daemons of a Ray that was started here, or the nodes of one that exists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotseat.cluster import _guard
from hotseat.errors import ClusterError

_DAEMONS = {"gcs_server": "GCS server", "raylet": "raylet"}  # Ray's name and ours, of those without which it cannot be
_DAEMON_PERIOD_S = 0.25
_NODE_PERIOD_S = 1.0  # Ray itself takes several missed heartbeats to give a node up


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


class NodeWatch:
    """A thread that asks Ray for the nodes that it has, and calls `on_loss` once when one of ours is gone.

    Processes are bound to their nodes, so nothing on a lost one can be replaced: a start there would wait for ever.
    Woken by `close`.
    """

    def __init__(
        self,
        names: Callable[[], Mapping[int, str]],
        live_nodes: Callable[[], set[int]],
        on_loss: Callable[[ClusterError], object],
        period_s: float = _NODE_PERIOD_S,
    ):
        """`names`: returns the nodes to watch, by their ranks, as messages name them."""
        self._names = names
        self._live_nodes = live_nodes
        self._on_loss = on_loss
        self._period_s = period_s
        self._error: ClusterError | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-nodes", daemon=True)
        self._thread.start()

    def lost(self) -> ClusterError | None:
        """Return the error that says which node is gone; None while all are there. It does not ask Ray."""
        return self._error

    def close(self) -> None:
        self._is_closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _watch(self) -> None:
        while not self._is_closing.wait(self._period_s):
            try:
                live = self._live_nodes()
            except Exception:
                continue  # Ray cannot be asked at this moment; calls that need it say so
            lost = [name for rank, name in self._names().items() if rank not in live]
            if lost and not self._is_closing.is_set():
                self._error = ClusterError(
                    f"Ray has lost {' and '.join(lost)}: the processes of this run there are gone, and cannot be"
                    " started elsewhere, so the run ends. Its machine or its raylet went down, or the network to it"
                    " did; start Ray there again (`ray start --address ...`), then resume the run"
                )
                self._on_loss(self._error)
                return
