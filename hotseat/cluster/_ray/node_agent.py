"""The actor that acts for the driver on another node: it ends processes there, and starts services."""

from __future__ import annotations

import os
import shutil
from typing import TypeVar

from hotseat.cluster import _guard
from hotseat.cluster.ports import free_port
from hotseat.cluster.services import NodeService, NodeServices

A = TypeVar("A")


class NodeAgent:
    """Manages our processes on a node other than the driver's, and ends when the driver ends.

    Ray ends this process with the driver's job; its guard then ends what our workers there have left behind.
    """

    def __init__(self, session: str, shm_prefix: str, directory: str):
        _guard.mark_this_process(session)
        self._session = session
        self._shm_prefix = shm_prefix
        self._directory = directory
        self._guard = _guard.start_guard(session, shm_prefix, [directory])
        self._services = NodeServices(directory, {_guard.SESSION: session})

    def free_port(self, host: str) -> int:
        return free_port(host)

    def process_state(self, pid: int, started: int | None) -> str:
        return _guard.process_state(pid, started)

    def end_workers(self, workers: list[str]) -> None:
        _guard.end_marked(_guard.WORKER, workers, timeout_s=5.0)

    def service(self, service: type[NodeService[A]], host: str | None) -> A:
        return self._services.address(service, host)

    def end_session(self) -> None:
        """End everything of this session on this node but this process, which `ray.kill` ends."""
        self._services.close()
        killed = _guard.end_marked(_guard.SESSION, [self._session], timeout_s=5.0, spare=[os.getpid()])
        _guard.remove_segments(self._shm_prefix, killed)
        shutil.rmtree(self._directory, ignore_errors=True)
        _guard.dismiss_guard(self._guard)
