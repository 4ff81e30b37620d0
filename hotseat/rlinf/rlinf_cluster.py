"""RLinf's `Cluster`: one for each program, over Hotseat's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hotseat import cluster as machinery
from hotseat.cluster import Process
from hotseat.errors import PlacementError, RunError, TooFewDevicesError
from hotseat.machine import has_gpu
from hotseat.placement import Inventory
from hotseat.placement.locate import locate
from hotseat.planning.config_plan import inventory_of, with_node_groups
from hotseat.rlinf.configs import checked_cluster, placed_components, plain
from hotseat.rlinf.failures import Failures
from hotseat.rlinf.queues import QueueDirectory

_TIMEOUT = "RLINF_TIMEOUT"  # minutes
_DEFAULT_TIMEOUT_MIN = 180.0
_MAX_LOGICAL_DEVICES = 64


@dataclass(frozen=True)
class WorkerPlace:
    """Group, rank, node and devices of one worker, and the directory of the cluster's channels."""

    group: str
    rank: int
    world_size: int
    node: int
    devices: tuple[int, ...]
    node_rank: int  # among the group's workers on this node
    node_world_size: int
    inventory: Inventory
    directory: QueueDirectory


def _logical_devices(placement: Mapping[str, Any]) -> int | None:
    """Return how many devices a placement by ranks names, where this machine has none; None: they are counted."""
    if not placement or os.environ.get("RAY_ADDRESS") or has_gpu():
        return None
    for num_devices in range(1, _MAX_LOGICAL_DEVICES):
        try:
            locate(Inventory.parse(f"1x{num_devices}"), placed_components(placement))
        except TooFewDevicesError:
            continue
        return num_devices
    return None


_current_place: WorkerPlace | None = None  # of the worker whose process this is


def set_current_place(place: WorkerPlace) -> None:
    global _current_place
    _current_place = place


class Cluster:
    """Nodes and devices. The first one starts or joins Ray; every later one in the same program is the same object.

    num_nodes: nodes to use; by default all. cluster_cfg: RLinf's section `cluster`, whose `node_groups` name nodes and
    set their environment variables. num_devices: logical devices of a cluster that is started here, instead of its
    GPUs. on: a Hotseat cluster to use. In a worker, `Cluster()` knows the nodes but launches nothing.
    """

    _current: ClassVar[Cluster | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Cluster:
        return cls._current if cls._current is not None else super().__new__(cls)

    def __init__(
        self,
        num_nodes: int | None = None,
        cluster_cfg: Any = None,
        distributed_log_dir: str | None = None,
        *,
        num_devices: int | None = None,
        on: machinery.Cluster | None = None,
    ):
        if self is Cluster._current:
            if num_nodes is not None and num_nodes != self.num_nodes:
                raise PlacementError(f"this program has a cluster of {self.num_nodes} nodes already, not {num_nodes}")
            return
        self._directories: dict[int, QueueDirectory] = {}
        self._lockable: set[int] = set()
        self.groups: dict[str, Any] = {}  # that this program has launched
        self.failures = Failures()
        self._is_owner = False
        place = _current_place  # None in the driver
        if place is not None and on is None:
            self._cluster: machinery.Cluster | None = None
            self.inventory: Inventory = place.inventory
            self._directories[0] = place.directory
            return
        section = checked_cluster({} if cluster_cfg is None else cluster_cfg)
        self._is_owner = on is None
        if num_devices is None and on is None:
            num_devices = _logical_devices((plain(cluster_cfg) or {}).get("component_placement") or {})
        self._cluster = on or machinery.Cluster(num_devices=num_devices, timeout_s=self.default_timeout_s())
        try:
            num_asked = num_nodes if num_nodes is not None else section.num_nodes
            self.inventory = with_node_groups(inventory_of(self._cluster), num_asked, section.node_groups)
            if any(node.env for node in self.inventory.nodes):
                self._cluster.reserve(self._everywhere(), nodes=self.inventory.nodes)
        except BaseException:
            self._close_own()
            raise
        Cluster._current = self

    @classmethod
    def current(cls) -> Cluster | None:
        """Return the cluster of this program, if it has one."""
        return cls._current

    @staticmethod
    def default_timeout_s() -> float:
        """Return how long a call or a wait may take: `RLINF_TIMEOUT` minutes, 180 if that is not set."""
        return 60.0 * float(os.environ.get(_TIMEOUT, _DEFAULT_TIMEOUT_MIN))

    @property
    def num_nodes(self) -> int:
        return self.inventory.num_nodes

    @property
    def num_accelerators(self) -> int:
        """Return the number of devices of all nodes."""
        return self.inventory.num_devices

    def num_accelerators_in_node(self, node_rank: int) -> int:
        return self.inventory.nodes[node_rank].num_devices

    # --- for groups and channels ----------------------------------------------------------------------------------

    def directory(self, node_rank: int = 0) -> QueueDirectory:
        """Return the directory of the channels whose items wait on a node."""
        if node_rank not in self._directories:
            if not 0 <= node_rank < self.num_nodes:
                raise PlacementError(f"node_rank is {node_rank}; the nodes are 0 to {self.num_nodes - 1}")
            cluster, timeout_s = self._driver("make a channel"), self.default_timeout_s()
            self._directories[node_rank] = QueueDirectory.of_node(cluster, node_rank or None, timeout_s)
        return self._directories[node_rank]

    def launch(self, name: str, cls: type, processes: list[Process], **options: Any) -> machinery.WorkerGroup[Any]:
        """Launch a group of Hotseat's, after the locks of its devices exist."""
        cluster = self._driver(f"launch {name}")
        self._make_lockable(device for process in processes for device in process.devices)
        return cluster.launch(name, cls, processes=processes, timeout_s=self.default_timeout_s(), **options)

    def close(self) -> None:
        """End all groups, and Ray if it was started here. Also happens when the program ends."""
        if Cluster._current is self:
            Cluster._current = None
        for group in self.groups.values():
            group.close()
        self._close_own()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_own(self) -> None:
        if self._is_owner and self._cluster is not None:
            self._cluster.close()

    def _driver(self, action: str) -> machinery.Cluster:
        if self._cluster is None:
            raise RunError(f"a worker cannot {action}: do it in the program that made the cluster")
        return self._cluster

    def _everywhere(self) -> list[Process]:
        return [
            Process(node.rank, node.rank, tuple(self.inventory.devices_of(node.rank))) for node in self.inventory.nodes
        ]

    def _make_lockable(self, devices: Iterable[int]) -> None:
        for device in sorted(set(devices) - self._lockable):
            lock = self.directory().open(f"lock of device {device}", 1)
            lock.put(None)  # who takes it holds the device
            lock.leave()
            self._lockable.add(device)
