"""The cluster: nodes, devices, and the groups that run there.

    with Cluster() as cluster:
        cluster.reserve([*plan.actor.processes, *plan.rollout.processes])
        actor = cluster.launch("actor", Actor, args=(config,), processes=plan.actor.processes)
        losses = actor.within(60).call(Actor.update, batch)

On Ray it attaches to an existing cluster (`RAY_ADDRESS`, which `ray job submit` sets) or starts its own. With
`runtime="local"` the same calls run in this process. Whatever ends the process that made the cluster, nothing of ours
outlives it by more than some seconds: a guard process watches (`processes/supervisor.py`).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hotseat.closing import on_failure
from hotseat.cluster.environment import own_folder
from hotseat.cluster.group import CallObserver, WorkerGroup
from hotseat.cluster.lease import DeviceMemory, Holder
from hotseat.cluster.node_facts import NodeFacts
from hotseat.cluster.on_ray.template import Template
from hotseat.cluster.runtime import ClusterNode, Launch, NodeService, Runtime, RuntimeOptions, devices_of
from hotseat.cluster.session import Session
from hotseat.errors import PlacementError, RunError
from hotseat.extensions import load
from hotseat.placement.locate import Process
from hotseat.registry.runtimes import DEFAULT_RUNTIME, runtime_entry

T = TypeVar("T")
A = TypeVar("A")
_LEAST_START_S = 300.0


class Cluster:
    """Nodes and devices, and what runs on them.

    runtime: its name in the registry: "ray", the cluster at `RAY_ADDRESS` or one that is started here; or "local",
        everything in this process.
    num_devices: logical devices of a cluster started here; by default its GPUs (one in the local runtime).
    timeout_s: the deadline of calls that state none.
    template: a process with libraries loaded, from which processes of a cluster started here are forked.
    has_dashboard: Ray's dashboard is started with a cluster that is started here.
    """

    def __init__(
        self,
        runtime: str = DEFAULT_RUNTIME,
        *,
        num_devices: int | None = None,
        num_cpus: int | None = None,
        object_store_bytes: int = 2 << 30,
        timeout_s: float = 600.0,
        template: Template | None = None,
        has_dashboard: bool = False,
    ):
        self.timeout_s = timeout_s
        entry = runtime_entry(runtime)
        self.runtime = entry.name
        self.is_in_process = entry.is_in_process
        self.on_call: CallObserver | None = None  # is called for each call to groups that are launched from then on
        self.groups: dict[str, WorkerGroup[Any]] = {}
        self._node_env: dict[int, Mapping[str, str]] = {}
        self._is_reserved = False
        self._is_closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._session = Session()
        with on_failure(lambda: self._session.close(killed=[])):
            options = RuntimeOptions(num_devices, num_cpus, object_store_bytes, template, has_dashboard)
            self._runtime: Runtime = load(entry.opener)(self._session, options)  # Ray is imported only now
        atexit.register(self.close)

    @property
    def session(self) -> str:
        """Return the id by which processes of this cluster are marked."""
        return self._session.id

    @property
    def dashboard_url(self) -> str | None:
        """Return the address of Ray's dashboard, if it was started here."""
        return self._runtime.dashboard_url

    @property
    def nodes(self) -> tuple[ClusterNode, ...]:
        return self._runtime.nodes

    def devices_of(self, node: int) -> range:
        return devices_of(self.nodes, node)

    # --- devices and groups ---------------------------------------------------------------------------------------

    def reserve(
        self,
        processes: Iterable[Process],
        *,
        nodes: Iterable[Any] = (),
        timeout_s: float = 60.0,
    ) -> None:
        """Reserve the devices of all groups at once. `nodes` may carry an `env` for each `rank`, set in its processes.

        Without it, the first launch reserves every device there is.
        """
        if self._is_reserved:
            raise PlacementError("devices are reserved once, for all groups, before the first launch")
        devices: dict[int, set[int]] = {}
        for process in processes:
            self._check_place("a process", process)
            devices.setdefault(process.node, set()).update(process.devices)
        if not devices:
            raise PlacementError("there is no process to reserve devices for")
        numbered = {node: sorted(numbers) for node, numbers in devices.items()}
        self._runtime.reserve(numbered, timeout_s)
        self._node_env = {node.rank: dict(getattr(node, "env", None) or {}) for node in nodes}
        self._is_reserved = True

    def launch(
        self,
        name: str,
        cls: type[T],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
        processes: Sequence[Process] | Any = 1,
        env: Mapping[str, str] | None = None,
        num_threads: int = 1,
        max_concurrency: int | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> WorkerGroup[T]:
        """Make an object of the plain class `cls` in each process, and return when all are made.

        per_rank: further constructor arguments, one mapping for each rank.
        processes: the place of each rank; or an object with such places as its `processes`, such as a role of a plan;
            or a number of processes without devices on the first node.
        num_threads: of torch and the libraries under it, in each process; set, never inherited.
        timeout_s: the deadline of each call, and of the start, which has at least 300 s.
        max_concurrency: calls that may run at once in a process; by default `cls.max_concurrency`, else 1. A class with
            coroutine methods runs them all on one event loop.
        wait: False returns at once, so that several groups can start together; `WorkerGroup.ready` waits, and so does
            the first call. A group has to be ready before it is passed to another worker.
        """
        launch = self._launch(name, cls, processes, num_threads, timeout_s)
        num_ranks = len(launch.processes)
        if per_rank is not None and len(per_rank) != num_ranks:
            raise PlacementError(
                f"{name}: per_rank has {len(per_rank)} entries for {num_ranks} processes; give one per rank"
            )
        group = self._runtime.launch(
            replace(
                launch,
                env_on=lambda node: {**self._node_env.get(node, {}), **(env or {})},
                max_concurrency=max_concurrency or launch.max_concurrency,
                args=tuple(args),
                kwargs=kwargs or {},
                per_rank=per_rank or [{}] * num_ranks,
                wait=wait,
            )
        )
        group.on_call = self.on_call
        self.groups[name] = group
        if group.relay_group is not None:
            self.groups[group.relay_group.name] = group.relay_group
        return group

    def prepare(
        self,
        name: str,
        cls: type,
        *,
        processes: Sequence[Process] | Any = 1,
        num_threads: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        """Start the processes of a group ahead: they load the module of `cls`, and `launch` makes the objects in them.

        Give the same class, processes and threads to `launch`, and no `env`.
        """
        self._runtime.prepare(self._launch(name, cls, processes, num_threads, timeout_s))

    def _launch(self, name: str, cls: type[T], processes: Any, num_threads: int, timeout_s: float | None) -> Launch[T]:
        timeout_s = timeout_s or self.timeout_s
        return Launch(
            name,
            cls,
            self._placed_anew(name, processes),
            env_on=lambda node: self._node_env.get(node, {}),
            num_threads=num_threads,
            max_concurrency=getattr(cls, "max_concurrency", None) or 1,
            timeout_s=timeout_s,
            start_timeout_s=max(_LEAST_START_S, timeout_s),
        )

    def _placed_anew(self, name: str, processes: Any) -> list[Process]:
        """Return the places of a group to be launched. Raises if it exists."""
        self._refuse_if_closed()
        if name in self.groups and not self.groups[name].is_closed:
            raise PlacementError(f"there is a group {name!r} already; close it first or choose another name")
        processes = getattr(processes, "processes", processes)
        if isinstance(processes, int):
            processes = [Process(rank) for rank in range(processes)]
        placed = sorted(processes, key=lambda process: process.rank)
        if not placed or [process.rank for process in placed] != list(range(len(placed))):
            raise PlacementError(
                f"{name}: ranks are {[process.rank for process in placed]}; they have to run from 0 without a gap"
            )
        for process in placed:
            self._check_place(f"{name} rank {process.rank}", process)
        return placed

    def _check_place(self, who: str, process: Process) -> None:
        if not 0 <= process.node < len(self.nodes):
            raise PlacementError(
                f"{who} is placed on node {process.node}; the cluster has nodes 0 to {len(self.nodes) - 1}"
            )
        there = self.devices_of(process.node)
        if unknown := [device for device in process.devices if device not in there]:
            has = f"devices {there.start} to {there.stop - 1}" if there else "no devices"
            raise PlacementError(f"{who} is given devices {unknown}, but node {process.node} has {has}")

    # --- what groups share ----------------------------------------------------------------------------------------

    def service(self, service: type[NodeService[A]], *, node: int | None = None) -> A | None:
        """Return the address of a service on a node, by default the driver's, for any process of this cluster.

        It is started when first asked for, and ends with the cluster. None: everything is in this process.
        """
        self._refuse_if_closed()
        return self._runtime.service(service, node)

    @property
    def home(self) -> int:
        """Return the node of this process."""
        return self._runtime.home

    def facts(self, nodes: Sequence[int], paths: Sequence[str]) -> dict[int, NodeFacts]:
        """Return facts about nodes, and about these paths there; see `NodeFacts`."""
        return self._runtime.facts(nodes, own_folder(), paths)

    def device_memory(self, device: int) -> DeviceMemory | None:
        """Measure the memory in use on a device of this node; None on other nodes, and without a GPU behind it."""
        return self._runtime.device_memory(device)

    def device_busy(self, device: int) -> float | None:
        """Return the share of the last moments in which a device computed; None as for `device_memory`."""
        return self._runtime.device_busy(device)

    def is_gone(self, holder: Holder) -> bool:
        """Tell whether a process no longer exists, for leases. In the local runtime it is never gone."""
        return self._runtime.is_gone(holder)

    # --- ending ---------------------------------------------------------------------------------------------------

    def close(self, *, grace_s: float = 5.0) -> None:
        """End everything of ours. Objects with a `close` method are asked first and have `grace_s` for it."""
        with self._lock:
            # A fork that ends takes nothing down: the cluster belongs to its parent.
            if self._is_closed or os.getpid() != self._pid:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        try:
            self._runtime.close(grace_s)
        finally:
            self._session.close(killed=[] if self._session.guard is None else self._runtime.end_leftovers())

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the workers may be stuck in what caused it: they are not asked.
        self.close(grace_s=5.0 if kind is None else 0.0)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RunError("the cluster is closed")
