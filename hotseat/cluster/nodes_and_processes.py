"""Nodes of a cluster, and the places of a group's processes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ClusterNode:
    """Machine of the cluster. Its devices are numbered after those of the node before it."""

    rank: int
    num_devices: int
    address: str = "127.0.0.1"
    hostname: str = ""
    id: str = ""  # Ray's
    device_bytes: int | None = None  # memory of each device; None where it cannot be known


class ProcessLike(Protocol):
    """Place of one process of a group. The planner's processes look like this, and so does `Process`."""

    @property
    def rank(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]:
        """Return the devices by their number in the whole cluster."""


@dataclass(frozen=True)
class Process:
    """One process of a group: its rank, the node it runs on and the devices it sees."""

    rank: int
    node: int = 0
    devices: tuple[int, ...] = ()


def devices_of(nodes: Sequence[ClusterNode], node: int) -> range:
    """Return the numbers of a node's devices."""
    first = sum(before.num_devices for before in nodes[:node])
    return range(first, first + nodes[node].num_devices)
