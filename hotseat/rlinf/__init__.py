"""RLinf's Python API over Hotseat's cluster: code for RLinf runs after its imports are changed to this module.

    from hotseat.rlinf import Channel, Cluster, HybridComponentPlacement, Worker

    cluster = Cluster(cluster_cfg=cfg.cluster)
    placement = HybridComponentPlacement(cfg, cluster)
    group = MyWorker.create_group(cfg).launch(cluster, name="env", placement_strategy=placement.get_strategy("env"))
    group.interact(input_channel=Channel.create("Env")).wait()

docs/rlinf.md lists what differs. Each name is imported at its first use; only `FSDPActor` loads torch.

queues         bounded queues: channels, messages between workers and device locks are made of them
broker         the process that has a node's queues (`broker_process.py`), and its clients
device_items   CUDA tensors inside items
channel        channels by name, with keys and weights; `keys.py` turns keys into text
cluster, group, worker, placement, actor  the classes of the API
config_keys    the table of RLinf's keys; `config_command.py` is `hotseat rlinf-config`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.rlinf.actor import FSDPActor
    from hotseat.rlinf.channel import DEFAULT_KEY, Channel
    from hotseat.rlinf.rlinf_cluster import Cluster
    from hotseat.rlinf.rlinf_placement import (
        ComponentPlacement,
        FlexiblePlacementStrategy,
        HybridComponentPlacement,
        ModelParallelComponentPlacement,
        NodePlacementStrategy,
        PackedPlacementStrategy,
        PlacementStrategy,
    )
    from hotseat.rlinf.rlinf_worker import Worker
    from hotseat.rlinf.work import AsyncWork
    from hotseat.rlinf.worker_group import WorkerGroup, WorkerGroupFuncResult

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

_HOMES = {
    "actor": ("FSDPActor",),
    "channel": ("DEFAULT_KEY", "Channel"),
    "rlinf_cluster": ("Cluster",),
    "worker_group": ("WorkerGroup", "WorkerGroupFuncResult"),
    "rlinf_placement": (
        *("ComponentPlacement", "HybridComponentPlacement", "ModelParallelComponentPlacement", "PlacementStrategy"),
        *("FlexiblePlacementStrategy", "NodePlacementStrategy", "PackedPlacementStrategy"),
    ),
    "work": ("AsyncWork",),
    "rlinf_worker": ("Worker",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value
