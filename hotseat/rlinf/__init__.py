"""RLinf's Python API over Hotseat's cluster: code for RLinf runs after its imports are changed to this module.

    from hotseat.rlinf import Channel, Cluster, HybridComponentPlacement, Worker

    cluster = Cluster(cluster_cfg=cfg.cluster)
    placement = HybridComponentPlacement(cfg, cluster)
    group = MyWorker.create_group(cfg).launch(cluster, name="env", placement_strategy=placement.get_strategy("env"))
    group.interact(input_channel=Channel.create("Env")).wait()

docs/rlinf.md lists what differs. Only `FSDPActor` loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotseat.rlinf.channel import DEFAULT_KEY, Channel
from hotseat.rlinf.cluster import Cluster
from hotseat.rlinf.group import WorkerGroup, WorkerGroupFuncResult
from hotseat.rlinf.placement import (
    ComponentPlacement,
    FlexiblePlacementStrategy,
    HybridComponentPlacement,
    ModelParallelComponentPlacement,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)
from hotseat.rlinf.work import AsyncWork
from hotseat.rlinf.worker import Worker

if TYPE_CHECKING:
    from hotseat.rlinf.actor import FSDPActor

__all__ = [
    "DEFAULT_KEY",
    "AsyncWork",
    "Channel",
    "Cluster",
    "ComponentPlacement",
    "FSDPActor",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "ModelParallelComponentPlacement",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "PlacementStrategy",
    "Worker",
    "WorkerGroup",
    "WorkerGroupFuncResult",
]


def __getattr__(name: str) -> Any:
    if name == "FSDPActor":
        from hotseat.rlinf.actor import FSDPActor

        return FSDPActor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
