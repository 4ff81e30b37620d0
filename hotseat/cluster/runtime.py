"""The contract between a cluster and what runs its processes. Implementations: `on_ray` and `local`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from hotseat.cluster.group import WorkerGroup
from hotseat.cluster.lease import DeviceMemory, Holder
from hotseat.cluster.nodes_and_processes import ClusterNode, ProcessLike
from hotseat.cluster.refs import Ref
from hotseat.cluster.services import NodeService

T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True)
class Launch(Generic[T]):
    """A group to be launched; `Cluster.launch` explains its fields.

    processes: one per rank, in rank order. env_on: variables to set in the processes of a node.
    """

    name: str
    cls: type[T]
    processes: Sequence[ProcessLike]
    env_on: Callable[[int], Mapping[str, str]]
    num_threads: int
    max_concurrency: int
    timeout_s: float
    start_timeout_s: float
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    per_rank: Sequence[Mapping[str, Any]] = ()
    wait: bool = True


class Runtime(Protocol):
    """Nodes and processes. A `Cluster` checks what it is asked for, then asks its runtime for it."""

    kind: Literal["ray", "local"]

    @property
    def nodes(self) -> tuple[ClusterNode, ...]: ...

    def reserve(self, devices: Mapping[int, Sequence[int]], num_cpus_per_node: float, timeout_s: float) -> None:
        """Reserve these devices of each node, for all groups to come."""

    def prepare(self, launch: Launch[Any]) -> None:
        """Start the processes of a group to be launched, and load the module of its class in them."""

    def launch(self, launch: Launch[T]) -> WorkerGroup[T]:
        """Start the processes of a group, and wait for their objects if the launch says so."""

    def service(self, service: type[NodeService[A]], node: int | None) -> A | None:
        """Return the address of a service on a node, by default the driver's; None: everything is in this process."""

    def put(self, value: T) -> Ref[T]:
        """Put a value where every worker can get it."""

    def device_memory(self, device: int) -> DeviceMemory | None:
        """Measure the memory in use on a device of this node; None on other nodes, and without a GPU behind it."""

    def is_gone(self, holder: Holder) -> bool:
        """Tell whether a process no longer exists."""

    def close(self, grace_s: float) -> None:
        """End all groups, and what the runtime itself has started. Objects with a `close` have `grace_s` for it."""

    def end_leftovers(self) -> list[int]:
        """Kill processes of the session that are left after `close`; return the pids that were killed."""
