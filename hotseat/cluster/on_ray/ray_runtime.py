"""The `Runtime` on Ray: groups as Ray actors, in a cluster of our own or in one that was there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from hotseat.closing import on_failure
from hotseat.cluster.device_memory import device_busy, device_memory
from hotseat.cluster.lease import DeviceMemory, Holder
from hotseat.cluster.node_facts import NodeFacts
from hotseat.cluster.on_ray.connection import RayConnection
from hotseat.cluster.on_ray.daemons import RayWatch, watch_daemons, watch_nodes
from hotseat.cluster.on_ray.launching import ActorStarter, refuse_unreserved
from hotseat.cluster.on_ray.node_processes import NodeProcesses
from hotseat.cluster.on_ray.ray_group import RankProcess, RayGroup
from hotseat.cluster.on_ray.relays import Relay, Relays, relay_of
from hotseat.cluster.on_ray.reservation import Reservation
from hotseat.cluster.runtime import Launch, NodeService, RuntimeOptions, devices_of
from hotseat.cluster.session import Session
from hotseat.cluster.sighting import Sighting
from hotseat.errors import ClusterError, PlacementError
from hotseat.placement.locate import Process
from hotseat.processes import supervisor

T = TypeVar("T")
A = TypeVar("A")


class RayRuntime:
    """Launches groups of Ray actors. It owns the connection, the reservation and our processes on every node."""

    def __init__(self, connection: RayConnection, session: Session):
        self._connection = connection
        self._session = session
        self._processes = NodeProcesses(connection, session)
        self._groups: dict[str, RayGroup[Any]] = {}
        self._prepared: dict[str, tuple[ActorStarter, list[RankProcess]]] = {}  # groups that are not launched yet
        self._reservation: Reservation | None = None
        self._num_launched = 0
        self._watch: RayWatch | None = None
        with on_failure(lambda: self.close(grace_s=0)):
            self.nodes = connection.nodes
            if connection.is_own:
                self._watch = watch_daemons(connection.daemons(), self._lose)
            elif len(self.nodes) > 1:
                self._watch = watch_nodes(self._nodes_in_use, connection.live_nodes, self._lose)

    # --- launching ------------------------------------------------------------------------------------------------

    def reserve(self, devices: Mapping[int, Sequence[int]], timeout_s: float) -> None:
        if self._reservation is not None:
            raise PlacementError("devices are reserved once, for all groups, before the first launch")
        first = [devices_of(self.nodes, node.rank).start for node in self.nodes]
        self._reservation = Reservation(self._connection, self._session, devices, first, timeout_s)

    def prepare(self, launch: Launch[Any]) -> None:
        starter = self.make_starter(launch)
        processes = [RankProcess(process) for process in launch.processes]
        self._prepared[launch.name] = starter, processes
        starter.prepare(processes)

    def launch(self, launch: Launch[T]) -> RayGroup[T]:
        starter, processes = self._prepared.pop(launch.name, (None, None))
        if starter is None or processes is None:
            starter, processes = self.make_starter(launch), [RankProcess(process) for process in launch.processes]
        starter.launch = launch
        group: RayGroup[T] = RayGroup(
            launch.name,
            processes,
            timeout_s=launch.timeout_s,
            log_directory=self._connection.log_directory,
            owner=self,
            start=starter.start,
            has_close=callable(getattr(launch.cls, "close", None)),
            relays=self._relays_of(launch),
        )
        try:
            group.begin(group.ranks, launch.start_timeout_s)
            if launch.wait:
                group.ready()
        except BaseException:
            self.end_processes(group.processes)
            if group.relay_group is not None:
                group.relay_group.close(grace_s=0)
            raise
        self._groups[launch.name] = group
        return group

    def _relays_of(self, launch: Launch[Any]) -> Relays | None:
        """Start the relays of a group, each on the node of its first rank; None: it is called without."""
        nodes = {relay_of(process.rank): process.node for process in reversed(launch.processes)}
        if len(nodes) == 1:
            return None
        places = [Process(relay, node) for relay, node in sorted(nodes.items())]
        of_relays = replace(
            launch,
            name=f"{launch.name}-relays",
            cls=Relay,
            processes=places,
            num_threads=1,
            max_concurrency=1,
            args=(),
            kwargs={},
            per_rank=[{}] * len(places),
            wait=False,
        )
        group = self.launch(of_relays)

        def start(relay: int, method: str, args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
            group.ready()
            process = group.processes[relay]
            future: Any = process.actor.invoke.remote(method, args, {}, timeout_s).future()
            future.called = relay, process.incarnation
            return future

        return Relays(group, start)

    def make_starter(self, launch: Launch[Any]) -> ActorStarter:
        if self._reservation is None:
            everything = {node.rank: devices_of(self.nodes, node.rank) for node in self.nodes}
            self.reserve(everything, timeout_s=60.0)
        assert self._reservation is not None
        refuse_unreserved(launch, self._reservation)
        node = launch.processes[0].node

        def meeting() -> tuple[str, int]:
            return self._connection.nodes[node].address, self._processes.free_port(node)

        self._num_launched += 1
        return ActorStarter(
            self._connection.ray, launch, self._reservation, self._session.name, meeting, self._num_launched
        )

    def service(self, service: type[NodeService[A]], node: int | None) -> A:
        return self._processes.service(service, self._connection.home if node is None else node)

    @property
    def home(self) -> int:
        return self._connection.home

    @property
    def dashboard_url(self) -> str | None:
        return self._connection.dashboard_url

    def facts(self, nodes: Sequence[int], folder: str | None, paths: Sequence[str]) -> dict[int, NodeFacts]:
        return self._processes.facts(nodes, folder, paths)

    # --- devices and processes ------------------------------------------------------------------------------------

    def device_memory(self, device: int) -> DeviceMemory | None:
        name = self._name_here(device)
        return None if name is None else device_memory(name)

    def device_busy(self, device: int) -> float | None:
        name = self._name_here(device)
        return None if name is None else device_busy(name)

    def _name_here(self, device: int) -> str | None:
        """Return the name of a device of the first node; None on other nodes, and without a GPU behind it."""
        if self._reservation is None or device not in devices_of(self.nodes, 0):
            return None
        return self._reservation.device_name(device)

    def is_gone(self, holder: Holder) -> bool:
        if holder.pid is None:
            return False
        return self.process_states([(holder.node, holder.pid, holder.started)]) == ["gone"]

    def process_states(self, processes: Sequence[tuple[int, int, int | None]]) -> list[str]:
        return self._processes.process_states(processes)

    def look(self, node: int, pid: int, name: str, *, with_stack: bool) -> Sighting:
        return self._processes.look(node, pid, name, with_stack=with_stack)

    def end_processes(self, processes: Iterable[RankProcess]) -> None:
        """End these processes and whatever they started; return when they are gone."""
        started = [process for process in processes if process.actor is not None]
        for process in started if not self._is_without_ray() else ():  # without its server Ray waits for it, for ever
            with contextlib.suppress(Exception):
                self._connection.ray.kill(process.actor)
        marks: dict[int, list[str]] = {}
        for process in started:
            marks.setdefault(process.place.node, []).append(process.mark)
        self._processes.end_workers(marks)

    def forget(self, group: RayGroup[Any]) -> None:
        self._groups.pop(group.name, None)

    def lost(self, *, asks_ray: bool = False) -> ClusterError | None:
        """Return why the run has to end: a daemon that was started here is gone, or a node of the cluster is."""
        return None if self._watch is None else self._watch.lost(asks_ray=asks_ray)

    def _nodes_in_use(self) -> dict[int, str]:
        used = {process.place.node for group in list(self._groups.values()) for process in group.processes}
        nodes = {rank: self.nodes[rank] for rank in sorted(used)}
        return {rank: f"node {rank} ({node.hostname}, {node.address})" for rank, node in nodes.items()}

    def _is_without_ray(self) -> bool:
        return self._connection.is_own and self.lost() is not None

    def _lose(self, error: ClusterError) -> None:
        for group in list(self._groups.values()):
            group.lose(error)

    # --- ending ---------------------------------------------------------------------------------------------------

    def close(self, grace_s: float) -> None:
        """Take down what is ours. Called once; each step is tried even if the one before it failed."""
        groups = list(self._groups.values())
        if self._watch is not None:
            self._watch.close()
            if self._is_without_ray():
                self._close_without_ray(groups)
                return
            self._watch = None  # from here on what it watches ends because we end it
        if grace_s > 0:
            threads = [threading.Thread(target=g.ask_to_close, args=(grace_s,), daemon=True) for g in groups]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(grace_s + 1.0)
        with contextlib.suppress(Exception):
            for group in groups:
                group.is_closed = True
            prepared = [process for _, processes in self._prepared.values() for process in processes]
            self.end_processes([*prepared, *(process for group in groups for process in group.processes)])
            for group in groups:
                group.wake_waiters()
        if self._reservation is not None:
            with contextlib.suppress(Exception):
                self._reservation.release()
        self._processes.end_agents()
        self._processes.close_services()
        self._connection.close()

    def end_leftovers(self) -> list[int]:
        return supervisor.end_marked(supervisor.SESSION, [self._session.name])

    def _close_without_ray(self, groups: list[RayGroup[Any]]) -> None:
        """Take down a cluster whose daemons are gone: by the marks of its processes, since Ray cannot be asked."""
        for group in groups:
            group.is_closed = True
        supervisor.end_marked(supervisor.SESSION, [self._session.name])
        self._processes.close_services()
        self._connection.forget()


def open_runtime(session: Session, options: RuntimeOptions) -> RayRuntime:
    """Attach to the cluster at `RAY_ADDRESS`, or start one here."""
    return RayRuntime(connect(session, options), session)


def connect(session: Session, options: RuntimeOptions) -> RayConnection:
    return RayConnection(
        session,
        num_devices=options.num_devices,
        num_cpus=options.num_cpus,
        object_store_bytes=options.object_store_bytes,
        template=options.template,
        has_dashboard=options.has_dashboard,
    )
