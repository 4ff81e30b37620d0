"""The actor that acts for the driver on another node: it ends processes there, and starts brokers."""

from __future__ import annotations

import os
import shutil

from hotseat.cluster.channel import Address, Broker
from hotseat.cluster.ports import free_port
from hotseat.processes import supervisor


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
        self._broker: Broker | None = None

    def free_port(self, host: str) -> int:
        return free_port(host)

    def process_state(self, pid: int, started: int | None) -> str:
        return supervisor.process_state(pid, started)

    def end_workers(self, workers: list[str]) -> None:
        supervisor.end_marked(supervisor.WORKER, workers, timeout_s=5.0)

    def start_broker(self, host: str | None) -> tuple[Address, bytes]:
        os.makedirs(self._directory, mode=0o700)
        self._broker = Broker(self._directory, host=host, env={supervisor.SESSION: self._session})
        return self._broker.address, self._broker.key

    def end_session(self) -> None:
        """End everything of this session on this node but this process, which `ray.kill` ends."""
        if self._broker:
            self._broker.close()
        killed = supervisor.end_marked(supervisor.SESSION, [self._session], timeout_s=5.0, spare=[os.getpid()])
        supervisor.remove_segments(self._shm_prefix, killed)
        shutil.rmtree(self._directory, ignore_errors=True)
        supervisor.dismiss_supervisor(self._guard)
