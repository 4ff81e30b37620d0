"""The contract between a cluster and what runs its processes. Implementations: `on_ray` and `local`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hotseat.cluster.group import WorkerGroup
from hotseat.cluster.lease import DeviceMemory, Holder
from hotseat.cluster.node_facts import NodeFacts
from hotseat.placement.locate import Process

T = TypeVar("T")
A = TypeVar("A")
Address_co = TypeVar("Address_co", covariant=True)


@dataclass(frozen=True)
class ClusterNode:
    """Machine of the cluster. Its devices are numbered after those of the node before it."""

    rank: int
    num_devices: int
    address: str = "127.0.0.1"
    hostname: str = ""
    id: str = ""  # Ray's
    device_bytes: int | None = None  # memory of each device; None where it cannot be known


def devices_of(nodes: Sequence[ClusterNode], node: int) -> range:
    """Return the numbers of a node's devices."""
    first = sum(before.num_devices for before in nodes[:node])
    return range(first, first + nodes[node].num_devices)


@dataclass(frozen=True)
class RuntimeOptions:
    """Options with which a runtime is opened; `Cluster` explains them."""

    num_devices: int | None = None
    num_cpus: int | None = None
    object_store_bytes: int = 2 << 30
    template: Any = None
    has_dashboard: bool = False


@dataclass(frozen=True)
class Launch(Generic[T]):
    """A group to be launched; `Cluster.launch` explains its fields.

    processes: one per rank, in rank order. env_on: variables to set in the processes of a node.
    """

    name: str
    cls: type[T]
    processes: Sequence[Process]
    env_on: Callable[[int], Mapping[str, str]]
    num_threads: int
    max_concurrency: int
    timeout_s: float
    start_timeout_s: float
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    per_rank: Sequence[Mapping[str, Any]] = ()
    wait: bool = True


class NodeService(Protocol[Address_co]):
    """A process on a node. Making an object of the class starts the process; it has to end when its parent does.

    `Cluster.service` takes the class, which has to be importable on all nodes.
    """

    def __init__(self, directory: str, *, host: str | None, env: dict[str, str]):
        """Start the process. directory: for its files. host: to be reached at by other machines; None: by none."""

    @property
    def address(self) -> Address_co:
        """Return how processes of the cluster reach it, as a value that can be pickled."""

    def close(self) -> None:
        """End the process."""

    @staticmethod
    def disconnect(address: Any) -> None:
        """Close this process's connections to one that has ended."""


class Runtime(Protocol):
    """Nodes and processes. A `Cluster` checks its arguments, then calls its runtime."""

    @property
    def nodes(self) -> tuple[ClusterNode, ...]: ...

    @property
    def home(self) -> int:
        """Return the node of this process."""

    @property
    def dashboard_url(self) -> str | None:
        """Return the address of a dashboard that was started with it; None if there is none."""

    def reserve(self, devices: Mapping[int, Sequence[int]], timeout_s: float) -> None:
        """Reserve these devices of each node, for all groups to come."""

    def prepare(self, launch: Launch[Any]) -> None:
        """Start the processes of a group to be launched, and load the module of its class in them."""

    def launch(self, launch: Launch[T]) -> WorkerGroup[T]:
        """Start the processes of a group, and wait for their objects if the launch says so."""

    def service(self, service: type[NodeService[A]], node: int | None) -> A | None:
        """Return the address of a service on a node, by default the driver's; None: everything is in this process."""

    def facts(self, nodes: Sequence[int], folder: str | None, paths: Sequence[str]) -> dict[int, NodeFacts]:
        """Return what these nodes have; nothing if everything is in this process."""

    def device_memory(self, device: int) -> DeviceMemory | None:
        """Measure the memory in use on a device of this node; None on other nodes, and without a GPU behind it."""

    def device_busy(self, device: int) -> float | None:
        """Return the share of the last moments in which a device of this node computed; None where it is not known."""

    def is_gone(self, holder: Holder) -> bool:
        """Tell whether a process no longer exists."""

    def close(self, grace_s: float) -> None:
        """End all groups, and what the runtime itself has started. Objects with a `close` have `grace_s` for it."""

    def end_leftovers(self) -> list[int]:
        """Kill processes of the session that are left after `close`; return the pids that were killed."""
