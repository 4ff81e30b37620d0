"""Our processes on each node, and the services there: here directly, on other nodes through an agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from hotseat.cluster.on_ray.connection import RayConnection
from hotseat.cluster.ports import free_port
from hotseat.cluster.runtime import NodeService, NodeServices
from hotseat.cluster.session import Session
from hotseat.errors import DeadlineError, RunError, WorkerError
from hotseat.processes import supervisor

_AGENT_TIMEOUT_S = 60.0

P = ParamSpec("P")
R = TypeVar("R")
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


class NodeProcesses:
    """Finds and ends our processes on every node, and starts services where they are needed."""

    def __init__(self, connection: RayConnection, session: Session):
        self._connection = connection
        self._session = session
        self._agents: dict[int, Any] = {}
        self._services_here = NodeServices(session.directory, {supervisor.SESSION: session.id})
        self._service_addresses: dict[tuple[type[NodeService[Any]], int], Any] = {}
        self._lock = threading.RLock()

    def free_port(self, node: int) -> int:
        host = self._connection.nodes[node].address
        return free_port(host) if node == self._connection.home else self._ask(node, NodeAgent.free_port, host)

    def process_state(self, node: int, pid: int, started: int | None) -> str:
        """Return "gone", "stopped" or "running"."""
        if node == self._connection.home:
            return supervisor.process_state(pid, started)
        try:
            return self._ask(node, NodeAgent.process_state, pid, started)
        except RunError:
            return "gone" if node not in self._connection.live_nodes() else "running"

    def end_workers(self, marks: Mapping[int, Iterable[str]]) -> None:
        """End the processes that carry these marks, node by node, and whatever they started."""
        for node, workers in marks.items():
            if node == self._connection.home:
                supervisor.end_marked(supervisor.WORKER, workers, timeout_s=5.0)
            else:
                with contextlib.suppress(RunError):
                    if node in self._connection.live_nodes():  # on a lost one they ended with it
                        self._ask(node, NodeAgent.end_workers, list(workers))

    def service(self, service: type[NodeService[A]], node: int) -> A:
        """Return the address of a service on this node; it is started when first asked for."""
        with self._lock:
            if (service, node) not in self._service_addresses:
                host = None if self._connection.is_own else self._connection.nodes[node].address
                if node == self._connection.home:
                    address = self._services_here.address(service, host)
                else:
                    address = self._ask(node, NodeAgent.service, service, host)
                self._service_addresses[service, node] = address
            return self._service_addresses[service, node]

    def end_agents(self) -> None:
        """End the agents, and with each what is left of the session on its node."""
        for node, agent in self._agents.items():
            with contextlib.suppress(Exception):
                self._wait(self._start(node, NodeAgent.end_session), node, "end_session", timeout_s=15.0)
            with contextlib.suppress(Exception):
                self._connection.ray.kill(agent)

    def close_services(self) -> None:
        """End the services on this node, and this process's connections to those on others."""
        self._services_here.close()
        for (service, _), address in self._service_addresses.items():
            service.disconnect(address)

    def _agent(self, node: int) -> Any:
        with self._lock:
            if node not in self._agents:
                from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                node_id = self._connection.nodes[node].id
                options = {
                    "num_cpus": 0,
                    "max_concurrency": 4,
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
                    "runtime_env": {"env_vars": self._session.env()},
                }
                agent = self._connection.ray.remote(NodeAgent).options(**options)
                session = self._session
                self._agents[node] = agent.remote(session.id, session.shm_prefix, f"{session.directory}-{node}")
            return self._agents[node]

    def _ask(self, node: int, method: Callable[Concatenate[NodeAgent, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._wait(self._start(node, method, *args, **kwargs), node, method.__name__, _AGENT_TIMEOUT_S)

    def _start(
        self, node: int, method: Callable[Concatenate[NodeAgent, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        return getattr(self._agent(node), method.__name__).remote(*args, **kwargs)

    def _wait(self, result: Any, node: int, method: str, timeout_s: float) -> Any:
        ray = self._connection.ray
        try:
            return ray.get(result, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"the agent on node {node} did not answer {method!r} in {timeout_s:.0f} s") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the agent on node {node} failed at {method!r}: {error}") from error
