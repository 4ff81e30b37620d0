"""Our processes on each node, and the services there: here directly, on other nodes through an agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from hotseat.cluster.node_facts import NodeFacts, node_facts
from hotseat.cluster.on_ray.connection import RayConnection
from hotseat.cluster.ports import free_port
from hotseat.cluster.runtime import NodeService
from hotseat.cluster.session import Session, activity_folder
from hotseat.cluster.sighting import Sighting, look_at
from hotseat.errors import DeadlineError, RunError, WorkerError
from hotseat.processes import supervisor

_AGENT_TIMEOUT_S = 60.0

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class NodeHere:
    """Our processes and services on the node of this process. directory: for files of services; env: theirs."""

    def __init__(self, directory: str, env: Mapping[str, str]):
        self._directory = directory
        self._env = dict(env)
        self._services: dict[type[NodeService[Any]], NodeService[Any]] = {}

    def free_port(self, host: str) -> int:
        return free_port(host)

    def process_states(self, processes: Sequence[tuple[int, int | None]]) -> list[str]:
        """Return the state of each process, which is named by its pid and the time of its start."""
        return [supervisor.process_state(pid, started) for pid, started in processes]

    def look(self, pid: int, name: str, with_stack: bool) -> Sighting:
        return look_at(pid, name, activity_folder(self._directory), with_stack=with_stack)

    def facts(self, folder: str | None, paths: Sequence[str]) -> NodeFacts:
        return node_facts(folder, paths)

    def end_workers(self, workers: list[str]) -> None:
        """End the processes that carry these marks, and whatever they started."""
        supervisor.end_marked(supervisor.WORKER, workers, timeout_s=5.0)

    def service(self, service: type[NodeService[A]], host: str | None) -> A:
        """Return the address of a service, which is started when first asked for."""
        if service not in self._services:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            self._services[service] = service(self._directory, host=host, env=self._env)
        return self._services[service].address

    def close_services(self) -> None:
        for service in self._services.values():
            service.close()


class NodeAgent(NodeHere):
    """Manages our processes on a node other than the driver's, and ends when the driver ends.

    Ray ends this process with the driver's job; its guard then ends what our workers there have left behind.
    """

    def __init__(self, session: str, shm_prefix: str, directory: str):
        supervisor.mark_this_process(session)
        super().__init__(directory, {supervisor.SESSION: session})
        self._session = session
        self._shm_prefix = shm_prefix
        self._guard = supervisor.start_supervisor(
            {"mark": (supervisor.SESSION, session), "shm_prefix": shm_prefix, "folders": [directory]}
        )

    def end_session(self) -> None:
        """End everything of this session on this node but this process, which `ray.kill` ends."""
        self.close_services()
        killed = supervisor.end_marked(supervisor.SESSION, [self._session], timeout_s=5.0, spare=[os.getpid()])
        supervisor.remove_segments(self._shm_prefix, killed)
        shutil.rmtree(self._directory, ignore_errors=True)
        supervisor.dismiss_supervisor(self._guard)


class NodeProcesses:
    """Finds and ends our processes on every node, and starts services where they are needed."""

    def __init__(self, connection: RayConnection, session: Session):
        self._connection = connection
        self._session = session
        self._here = NodeHere(session.directory, {supervisor.SESSION: session.id})
        self._agents: dict[int, Any] = {}
        self._service_addresses: dict[tuple[type[NodeService[Any]], int], Any] = {}
        self._lock = threading.RLock()

    def free_port(self, node: int) -> int:
        return self._ask(node, NodeHere.free_port, self._connection.nodes[node].address)

    def process_states(self, processes: Sequence[tuple[int, int, int | None]]) -> list[str]:
        """Return "gone", "stopped" or "running" for each (node, pid, start). Asks each node once, one after another."""
        on_nodes: dict[int, list[int]] = {}
        for index, (node, _, _) in enumerate(processes):
            on_nodes.setdefault(node, []).append(index)
        states: dict[int, str] = {}
        for node, indices in on_nodes.items():
            try:
                answers = self._ask(node, NodeHere.process_states, [processes[index][1:] for index in indices])
            except RunError:
                is_lost = node not in self._connection.live_nodes()
                answers = ["gone" if is_lost else "running"] * len(indices)
            states |= zip(indices, answers, strict=True)
        return [states[index] for index in range(len(processes))]

    def look(self, node: int, pid: int, name: str, *, with_stack: bool) -> Sighting:
        """Look at a process on its node; nothing is seen of one whose node does not answer."""
        try:
            return self._ask(node, NodeHere.look, pid, name, with_stack)
        except RunError as error:
            return Sighting(pid, stack=f"(no stack: {error})")

    def end_workers(self, marks: Mapping[int, Iterable[str]]) -> None:
        """End the processes that carry these marks, node by node, and whatever they started."""
        for node, workers in marks.items():
            with contextlib.suppress(RunError):  # on a lost node they ended with it
                if node == self._connection.home or node in self._connection.live_nodes():
                    self._ask(node, NodeHere.end_workers, list(workers))

    def facts(self, nodes: Sequence[int], folder: str | None, paths: Sequence[str]) -> dict[int, NodeFacts]:
        """Ask all nodes at once, since each may have to start its agent."""
        with ThreadPoolExecutor(max_workers=32) as threads:
            asked = {node: threads.submit(self._ask, node, NodeHere.facts, folder, paths) for node in nodes}
            return {node: answer.result() for node, answer in asked.items()}

    def service(self, service: type[NodeService[A]], node: int) -> A:
        """Return the address of a service on this node; it is started when first asked for."""
        with self._lock:
            if (service, node) not in self._service_addresses:
                host = None if self._connection.is_own else self._connection.nodes[node].address
                self._service_addresses[service, node] = self._ask(node, NodeHere.service, service, host)
            return self._service_addresses[service, node]

    def end_agents(self) -> None:
        """End the agents, and with each what is left of the session on its node."""
        for node, agent in self._agents.items():
            with contextlib.suppress(Exception):
                self._wait(agent.end_session.remote(), node, "end_session", timeout_s=15.0)
            with contextlib.suppress(Exception):
                self._connection.ray.kill(agent)

    def close_services(self) -> None:
        """End the services on this node, and this process's connections to those on others."""
        self._here.close_services()
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
                self._agents[node] = agent.remote(session.id, session.shm_prefix, session.directory_on(node))
            return self._agents[node]

    def _ask(self, node: int, method: Callable[Concatenate[NodeHere, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        if node == self._connection.home:
            return method(self._here, *args, **kwargs)
        asked = getattr(self._agent(node), method.__name__).remote(*args, **kwargs)
        return self._wait(asked, node, method.__name__, _AGENT_TIMEOUT_S)

    def _wait(self, result: Any, node: int, method: str, timeout_s: float) -> Any:
        ray = self._connection.ray
        try:
            return ray.get(result, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"the agent on node {node} did not answer {method!r} in {timeout_s:.0f} s") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"the agent on node {node} failed at {method!r}: {error}") from error
