"""The actor that acts for the driver on another node: it ends processes there, and starts services."""

from __future__ import annotations

import os
import shutil
from typing import TypeVar

from hotseat.cluster.ports import free_port
from hotseat.cluster.services import NodeService, NodeServices
from hotseat.processes import supervisor

A = TypeVar("A")


class NodeAgent:
    """Manages our processes on a node other than the driver's, and ends when the driver ends.

    Ray ends this process with the driver's job; its guard then ends what our workers there have left behind.
    """

    def __init__(self, session: str, shm_prefix: str, directory: str):
        supervisor.mark_this_process(session)
        self._session = session
        self._shm_prefix = shm_prefix
        self._directory = directory
        self._guard = supervisor.start_supervisor(
            {"mark": (supervisor.SESSION, session), "shm_prefix": shm_prefix, "folders": [directory]}
        )
        self._services = NodeServices(directory, {supervisor.SESSION: session})

    def free_port(self, host: str) -> int:
        return free_port(host)

    def process_state(self, pid: int, started: int | None) -> str:
        return supervisor.process_state(pid, started)

    def end_workers(self, workers: list[str]) -> None:
        supervisor.end_marked(supervisor.WORKER, workers, timeout_s=5.0)

    def service(self, service: type[NodeService[A]], host: str | None) -> A:
        return self._services.address(service, host)

    def end_session(self) -> None:
        """End everything of this session on this node but this process, which `ray.kill` ends."""
        self._services.close()
        killed = supervisor.end_marked(supervisor.SESSION, [self._session], timeout_s=5.0, spare=[os.getpid()])
        supervisor.remove_segments(self._shm_prefix, killed)
        shutil.rmtree(self._directory, ignore_errors=True)
        supervisor.dismiss_supervisor(self._guard)
