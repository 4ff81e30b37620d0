"""Place of a worker, which is set before its constructor runs."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.placement import Inventory
from hotseat.rlinf.queues import QueueDirectory


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


_current: WorkerPlace | None = None


def current_place() -> WorkerPlace | None:
    """Return the place of the worker whose process this is; None in the driver."""
    return _current


def set_current_place(place: WorkerPlace) -> None:
    global _current
    _current = place
