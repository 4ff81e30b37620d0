"""Nodes of a cluster and their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
