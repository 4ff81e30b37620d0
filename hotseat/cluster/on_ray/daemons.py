"""The watch over what Ray needs: the daemons of a Ray that was started here, or the nodes of one that exists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotseat.errors import ClusterError
from hotseat.processes import supervisor

_DAEMONS = {"gcs_server": "GCS server", "raylet": "raylet"}  # Ray's name and ours, of those without which it cannot be
_DAEMON_PERIOD_S = 0.25
_NODE_PERIOD_S = 1.0  # Ray itself takes several missed heartbeats to give a node up

OnLoss = Callable[[ClusterError], object]


class RayWatch:
    """A thread that looks every `period_s` for what Ray has lost, and calls `on_loss` once. Woken by `close`.

    find: returns the error that says what is lost now. is_cheap: to look, so that `lost` does so at every call.
    """

    def __init__(
        self, name: str, find: Callable[[], ClusterError | None], on_loss: OnLoss, period_s: float, *, is_cheap: bool
    ):
        self._find = find
        self._on_loss = on_loss
        self._period_s = period_s
        self._is_cheap = is_cheap
        self._error: ClusterError | None = None
        self._lock = threading.Lock()  # held while somebody looks
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def lost(self, *, asks_ray: bool = False) -> ClusterError | None:
        """Return the error that says what is lost; None while all is there.

        asks_ray: look now, because a process has died, and its node may be the cause.
        """
        return self._look() if asks_ray or self._is_cheap else self._error

    def close(self) -> None:
        self._is_closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _look(self) -> ClusterError | None:
        with self._lock:
            if self._error is None and not self._is_closing.is_set():
                self._error = self._find()
            return self._error

    def _watch(self) -> None:
        while not self._is_closing.wait(self._period_s):
            if (error := self._look()) is not None:
                self._on_loss(error)
                return


def watch_daemons(processes: Mapping[str, Sequence[Any]], on_loss: OnLoss) -> RayWatch:
    """Watch whether Ray's own processes live. Without that a call would wait until Ray ends this process.

    processes: Ray's, by its own names for them, each with a `process` that has a `pid`.
    """
    watched = [
        (words, entry.process.pid, supervisor.start_time(entry.process.pid))
        for name, words in _DAEMONS.items()
        for entry in processes.get(name, ())
    ]

    def find() -> ClusterError | None:
        for words, pid, started in watched:
            if supervisor.process_state(pid, started) == "gone":
                return ClusterError(
                    f"Ray's {words} (pid {pid}) died: without it no process of this run can be reached, so the run"
                    " ends. It was killed, by hand or for want of memory (`dmesg` tells), or it crashed"
                )
        return None

    return RayWatch("ray-daemons", find, on_loss, _DAEMON_PERIOD_S, is_cheap=True)


def watch_nodes(
    names: Callable[[], Mapping[int, str]],
    live_nodes: Callable[[], set[int]],
    on_loss: OnLoss,
    period_s: float = _NODE_PERIOD_S,
) -> RayWatch:
    """Watch the nodes that Ray has. Processes are bound to theirs, so nothing on a lost one can be replaced.

    names: returns the nodes to watch, by their ranks, as messages name them.
    """

    def find() -> ClusterError | None:
        try:
            live = live_nodes()
        except Exception:
            return None  # Ray cannot be asked at this moment; calls that need it say so
        lost = [name for rank, name in names().items() if rank not in live]
        if not lost:
            return None
        return ClusterError(
            f"Ray has lost {' and '.join(lost)}: the processes of this run there are gone, and cannot be"
            " started elsewhere, so the run ends. Its machine or its raylet went down, or the network to it"
            " did; start Ray there again (`ray start --address ...`), then resume the run"
        )

    return RayWatch("ray-nodes", find, on_loss, period_s, is_cheap=False)
