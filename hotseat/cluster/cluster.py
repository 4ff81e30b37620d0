"""The cluster: nodes, devices, and the groups that run there.

    with Cluster() as cluster:
        cluster.reserve([*plan.actor.processes, *plan.rollout.processes])
        actor = cluster.launch("actor", Actor, args=(config,), processes=plan.actor.processes)
        losses = actor.call("update", batch, timeout_s=60)

On Ray it attaches to an existing cluster (`RAY_ADDRESS`, which `ray job submit` sets) or starts its own. With
`runtime="local"` the same calls run in this process. Whatever ends the process that made the cluster, nothing of ours
outlives it by more than some seconds: a guard process watches (`_guard.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hotseat.cluster import _guard, activity
from hotseat.cluster._host import free_port
from hotseat.cluster._local import LocalGroup, LocalRef, LocalRuntime, restore_environment
from hotseat.cluster.channel import Channel
from hotseat.cluster.devices import device_memory
from hotseat.cluster.group import CallObserver, Group, Process, ProcessLike, Ref
from hotseat.cluster.lease import DeviceMemory, Holder
from hotseat.errors import PlacementError, RunError
from hotseat.openmp import wait_policy

__all__ = ["Cluster", "Node"]

# Longer paths than this do not leave room for Ray's socket names: a socket's path has at most 107 characters.
_MAX_DIRECTORY = 40


@dataclass(frozen=True)
class Node:
    """One machine of the cluster. Its devices are numbered on from those of the node before it."""

    rank: int
    num_devices: int
    address: str = "127.0.0.1"
    hostname: str = ""
    num_cpus: int = 0
    memory_bytes: int = 0
    device_bytes: int | None = None  # memory of each device; None where it cannot be known
    env: Mapping[str, str] = field(default_factory=dict)


class Cluster:
    """Nodes and devices, and what runs on them.

    runtime: "ray", or "local" for everything in this process.
    address: of the Ray cluster to attach to; by default `RAY_ADDRESS`; if that is not set, a cluster is started here.
    num_devices: logical devices of a cluster started here; by default its GPUs (one in the local runtime).
    timeout_s: the deadline of calls that state none.
    """

    def __init__(
        self,
        runtime: Literal["ray", "local"] = "ray",
        *,
        address: str | None = None,
        num_devices: int | None = None,
        num_cpus: int | None = None,
        object_store_bytes: int = 2 << 30,
        timeout_s: float = 600.0,
        log_to_driver: bool = False,
    ):
        if runtime not in ("ray", "local"):
            raise PlacementError(f"runtime is {runtime!r}; it can be 'ray' or 'local'")
        self.timeout_s = timeout_s
        self.on_call: CallObserver | None = None  # told of the calls to groups that are launched from then on
        name = secrets.token_hex(6)
        outer = os.environ.get(_guard.SESSION)
        self.session = f"{outer}/{name}" if outer else name
        self.shm_prefix = f"hotseat-{name}-"
        self._name = name
        self._directory = _make_directory()
        self._groups: dict[str, Group] = {}
        self._node_env: dict[int, Mapping[str, str]] = {}
        self._reserved = False
        self._is_closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._guard_process = _guard.start_guard(name, self.shm_prefix, [self._directory])
        self._env_before = {name: os.environ.get(name) for name in (_guard.SHM_PREFIX, activity.DIRECTORY)}
        os.environ[_guard.SHM_PREFIX] = self.shm_prefix
        os.environ[activity.DIRECTORY] = os.path.join(self._directory, "activity")
        self._local: LocalRuntime | None = None
        self._ray: Any = None
        try:
            if runtime == "local":
                self._local = LocalRuntime(1 if num_devices is None else num_devices)
                self.nodes: tuple[Node, ...] = (Node(0, self._local.num_devices, num_cpus=os.cpu_count() or 1),)
            else:
                from hotseat.cluster._ray import RayRuntime

                self._ray = RayRuntime(
                    session=self.session,
                    shm_prefix=self.shm_prefix,
                    directory=self._directory,
                    address=address,
                    num_devices=num_devices,
                    num_cpus=num_cpus,
                    object_store_bytes=object_store_bytes,
                    log_to_driver=log_to_driver,
                )
                # The devices of other nodes are taken to be like those of this one.
                first = device_memory(self._ray.own_name(0)) if self._ray.nodes[0].num_devices else None
                self.nodes = tuple(
                    Node(
                        rank,
                        node.num_devices,
                        node.address,
                        node.hostname,
                        node.num_cpus,
                        node.memory_bytes,
                        None if first is None else first.total,
                    )
                    for rank, node in enumerate(self._ray.nodes)
                )
        except BaseException:
            self.close(grace_s=0)
            raise
        atexit.register(self.close)

    @property
    def runtime(self) -> str:
        return "local" if self._local else "ray"

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    def devices_of(self, node: int) -> range:
        """The numbers of a node's devices."""
        first = sum(before.num_devices for before in self.nodes[:node])
        return range(first, first + self.nodes[node].num_devices)

    # --- devices and groups ---------------------------------------------------------------------------------------

    def reserve(
        self,
        processes: Iterable[ProcessLike],
        *,
        nodes: Iterable[Any] = (),
        num_cpus_per_node: float = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Reserve the devices of all groups at once. `nodes` may carry an `env` for each `rank`, set in its processes.

        Without it, the first launch reserves every device there is.
        """
        if self._reserved:
            raise PlacementError("devices are reserved once, for all groups, before the first launch")
        devices: dict[int, set[int]] = {}
        for process in processes:
            self._check_place("a process", process)
            devices.setdefault(process.node, set()).update(process.devices)
        if not devices:
            raise PlacementError("there is no process to reserve devices for")
        self._node_env = {node.rank: dict(getattr(node, "env", None) or {}) for node in nodes}
        if self._ray:
            first = [self.devices_of(node.rank).start for node in self.nodes]
            numbered = {node: sorted(numbers) for node, numbers in devices.items()}
            self._ray.reserve(numbered, first, num_cpus_per_node, timeout_s)
        self._reserved = True

    def launch(
        self,
        name: str,
        cls: type,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        per_rank: Sequence[Mapping[str, Any]] | None = None,
        processes: Sequence[ProcessLike] | Any = 1,
        env: Mapping[str, str] | None = None,
        num_threads: int = 1,
        max_concurrency: int | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        wait: bool = True,
    ) -> Group:
        """Make an object of the plain class `cls` in each process, and return when all are made.

        per_rank: further constructor arguments, one mapping for each rank.
        processes: where each rank runs, or what has these as `processes`, or a number of processes without devices on
            the first node.
        num_threads: of torch and the libraries under it, in each process; set, never inherited.
        max_concurrency: calls that may run at once in a process; by default `cls.max_concurrency`, else 1. A class with
            coroutine methods runs them all on one event loop.
        wait: False returns at once, so that several groups can start together; `Group.ready` waits, and so does the
            first call. To be ready it must be before it is passed to another worker.
        """
        self._refuse_if_closed()
        if name in self._groups and not self._groups[name].is_closed:
            raise PlacementError(f"there is a group {name!r} already; close it first or choose another name")
        placed = self._placed(name, processes)
        if per_rank is not None and len(per_rank) != len(placed):
            raise PlacementError(
                f"{name}: per_rank has {len(per_rank)} entries for {len(placed)} processes; give one per rank"
            )
        per_rank = per_rank or [{}] * len(placed)
        concurrency: int = max_concurrency or getattr(cls, "max_concurrency", None) or 1
        timeout_s = timeout_s or self.timeout_s
        if self._ray:
            if not self._reserved:
                self.reserve([Process(0, node.rank, tuple(self.devices_of(node.rank))) for node in self.nodes])
            group: Group = self._ray.launch(
                name,
                cls,
                tuple(args),
                dict(kwargs or {}),
                per_rank,
                placed,
                env=lambda process: {
                    **_thread_env(num_threads),
                    **self._node_env.get(process.node, {}),
                    **(env or {}),
                },
                timeout_s=timeout_s,
                start_timeout_s=start_timeout_s,
                max_concurrency=concurrency,
                wait=wait,
            )
        else:
            assert self._local is not None
            self._local.set_env(name, {**self._node_env.get(0, {}), **(env or {})})
            port = str(free_port("127.0.0.1"))
            group = LocalGroup(
                name,
                cls,
                tuple(args),
                dict(kwargs or {}),
                per_rank,
                placed,
                timeout_s=timeout_s,
                num_threads=num_threads,
                max_concurrency=concurrency,
                rank_env=lambda rank: {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(placed)),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(len(placed)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
            )
        group.on_call = self.on_call
        self._groups[name] = group
        return group

    @property
    def groups(self) -> Mapping[str, Group]:
        """All that were launched."""
        return self._groups

    def _placed(self, name: str, processes: Any) -> list[ProcessLike]:
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

    def _check_place(self, who: str, process: ProcessLike) -> None:
        if not 0 <= process.node < len(self.nodes):
            raise PlacementError(
                f"{who} is placed on node {process.node}; the cluster has nodes 0 to {len(self.nodes) - 1}"
            )
        there = self.devices_of(process.node)
        if strange := [device for device in process.devices if device not in there]:
            has = f"devices {there.start} to {there.stop - 1}" if there else "no devices"
            raise PlacementError(f"{who} is given devices {strange}, but node {process.node} has {has}")

    # --- what groups share ----------------------------------------------------------------------------------------

    def channel(
        self,
        name: str,
        item_type: type | tuple[type, ...],
        capacity: int,
        *,
        num_producers: int = 1,
        node: int | None = None,
        timeout_s: float | None = None,
    ) -> Channel[Any]:
        """A channel that any process of this cluster can use. Its items wait on `node`, by default the driver's."""
        self._refuse_if_closed()
        timeout_s = timeout_s or self.timeout_s
        broker = None
        if self._ray:
            broker = self._ray.broker(self._ray.home if node is None else node)
        return Channel(name, item_type, capacity, num_producers=num_producers, timeout_s=timeout_s, broker=broker)

    def put(self, value: Any) -> Ref:
        """Put a value where every worker can get it, once, instead of sending it with every call."""
        self._refuse_if_closed()
        return self._ray.put(value) if self._ray else LocalRef(value)

    def device_memory(self, device: int) -> DeviceMemory | None:
        """What is in use on a device of this node; None elsewhere, and where there is no GPU behind it."""
        if self._local or device not in self.devices_of(0):
            return None
        name = self._ray.device_name(device)
        return None if name is None else device_memory(name)

    def is_gone(self, holder: Holder) -> bool:
        """Whether a process no longer exists, for leases. In the local runtime they all live as long as this one."""
        if self._local or holder.pid is None:
            return False
        return self._ray.process_state(holder.node, holder.pid, holder.started) == "gone"

    # --- ending ---------------------------------------------------------------------------------------------------

    def close(self, *, grace_s: float = 5.0) -> None:
        """End everything of ours. Objects with a `close` method are asked first and have `grace_s` for it."""
        with self._lock:
            # A fork that ends takes nothing down: it is its parent's.
            if self._is_closed or os.getpid() != self._pid:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        try:
            if self._local:
                for group in self._groups.values():
                    group.close(grace_s=grace_s)
                self._local.close()
            elif self._ray:
                self._ray.close(grace_s)
        finally:
            killed = _guard.end_marked(_guard.SESSION, [self._name]) if self._ray and self._guard_process else []
            _guard.remove_segments(self.shm_prefix, killed)
            shutil.rmtree(self._directory, ignore_errors=True)
            restore_environment(self._env_before)
            _guard.dismiss_guard(self._guard_process)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the workers may be stuck in what caused it: they are not asked.
        self.close(grace_s=5.0 if kind is None else 0.0)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RunError("the cluster is closed")


def _make_directory() -> str:
    """A temporary directory, only for us, with a path short enough for sockets."""
    for base in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if len(base) <= _MAX_DIRECTORY and os.path.isdir(base):
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix="hotseat-", dir=base)
    raise RunError(f"no directory for temporary files with a path of at most {_MAX_DIRECTORY} characters; set TMPDIR")


def _thread_env(num_threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {**dict.fromkeys(names, str(num_threads)), **wait_policy()}
