"""RLinf's placement strategies, and the placement of components by a config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hotseat.cluster import Process
from hotseat.errors import PlacementError, TooFewDevicesError
from hotseat.placement.inventory import DEFAULT_POOL, Inventory
from hotseat.placement.locate import Located, locate
from hotseat.placement.plan import label_of
from hotseat.rlinf.configs import placed_components, section


class HasInventory(Protocol):
    """A cluster, as far as a strategy looks at it."""

    @property
    def inventory(self) -> Inventory: ...


class PlacementStrategy(ABC):
    """Places the processes of a group on nodes and devices."""

    @abstractmethod
    def get_placement(self, cluster: HasInventory) -> list[Process]:
        """Return rank, node and devices of each process."""


class FlexiblePlacementStrategy(PlacementStrategy):
    """One process for each list of devices. With a node group, devices are counted within its nodes."""

    def __init__(self, hardware_ranks_list: Sequence[Sequence[int]], node_group: str | None = None):
        self._ranks = [list(ranks) for ranks in hardware_ranks_list]
        self._node_group = node_group

    def get_placement(self, cluster: HasInventory) -> list[Process]:
        inventory = cluster.inventory
        nodes = inventory.pool_nodes(self._node_group or DEFAULT_POOL)
        devices = [device for node in nodes for device in inventory.devices_of(node)]
        return [self._process(rank, ranks, devices, inventory) for rank, ranks in enumerate(self._ranks)]

    def _process(self, rank: int, ranks: Sequence[int], devices: Sequence[int], inventory: Inventory) -> Process:
        if not ranks or len(set(ranks)) < len(ranks):
            raise PlacementError(f"rank {rank}: devices {list(ranks)} must be one or more different ones")
        if missing := [number for number in ranks if not 0 <= number < len(devices)]:
            raise TooFewDevicesError(f"rank {rank}: devices {missing} do not exist: there are {len(devices)}")
        chosen = tuple(devices[number] for number in ranks)
        nodes = {inventory.node_of(device) for device in chosen}
        if len(nodes) > 1:
            raise PlacementError(
                f"rank {rank}: devices {list(ranks)} are on nodes {sorted(nodes)}; a process is on one node"
            )
        return Process(rank, nodes.pop(), chosen)


class PackedPlacementStrategy(FlexiblePlacementStrategy):
    """Processes side by side on devices `start_hardware_rank` to `end_hardware_rank`.

    With a stride s and n devices per process, each s·n devices hold s processes, each on every s-th of them.
    """

    def __init__(
        self,
        start_hardware_rank: int,
        end_hardware_rank: int,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: str | None = None,
    ):
        count, block = end_hardware_rank - start_hardware_rank + 1, num_hardware_per_process * stride
        if start_hardware_rank < 0 or num_hardware_per_process < 1 or stride < 1 or count < 1 or count % block:
            raise PlacementError(
                f"devices {start_hardware_rank} to {end_hardware_rank} cannot be packed with"
                f" num_hardware_per_process {num_hardware_per_process} and stride {stride}: their number has to be a"
                " multiple of both together"
            )
        ranks = [
            range(first + lane, first + block, stride)
            for first in range(start_hardware_rank, end_hardware_rank + 1, block)
            for lane in range(stride)
        ]
        super().__init__(ranks, node_group)


class NodePlacementStrategy(PlacementStrategy):
    """One process without devices for each node rank; a rank may be named several times."""

    def __init__(self, node_ranks: Sequence[int], node_group: str | None = None):
        self._node_ranks = list(node_ranks)
        self._node_group = node_group

    def get_placement(self, cluster: HasInventory) -> list[Process]:
        nodes = cluster.inventory.pool_nodes(self._node_group or DEFAULT_POOL)
        if missing := [rank for rank in self._node_ranks if not 0 <= rank < len(nodes)]:
            raise PlacementError(f"nodes {missing} do not exist: there are {len(nodes)}")
        return [Process(rank, nodes[node]) for rank, node in enumerate(self._node_ranks)]


class LocatedStrategy(PlacementStrategy):
    """Processes as a config places them."""

    def __init__(self, located: Located):
        self.located = located

    def get_placement(self, cluster: HasInventory) -> list[Process]:
        return list(self.located.processes)


def default_strategy(inventory: Inventory) -> PlacementStrategy:
    """Return one process per device, or one on the first node if there are no devices."""
    if inventory.num_devices:
        return PackedPlacementStrategy(0, inventory.num_devices - 1)
    return NodePlacementStrategy([0])


class ComponentPlacement:
    """Places components by `cluster.component_placement` of a config, in RLinf's grammar and ours.

    docs/placement.md describes the selections. Components may have any names.
    """

    def __init__(self, config: Any, cluster: HasInventory):
        placement = section(section(config, "cluster"), "component_placement")
        if not isinstance(placement, Mapping) or not placement:
            raise PlacementError(
                "the config has no cluster.component_placement: name each component and its devices, such as actor: 0-7"
            )
        self._located = locate(cluster.inventory, placed_components(placement))

    @property
    def components(self) -> list[str]:
        return list(self._located)

    @property
    def placement_mode(self) -> str:
        """Return colocated, disaggregated or hybrid, derived from the devices."""
        return label_of(self._located)

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the strategy for `launch`."""
        return LocatedStrategy(self._of(component_name))

    def get_world_size(self, component_name: str) -> int:
        return len(self._of(component_name).processes)

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """Return the devices of a component, each once."""
        return sorted(set(self._of(component_name).devices))

    def _of(self, name: str) -> Located:
        if name not in self._located:
            raise PlacementError(
                f"cluster.component_placement places no {name}: it places {', '.join(self._located)}; add an entry"
            )
        return self._located[name]


class HybridComponentPlacement(ComponentPlacement):
    """Placement in which components may share devices in any way."""


class ModelParallelComponentPlacement(ComponentPlacement):
    """RLinf's placement of language-model tasks. Components may overlap in part, which RLinf refuses."""
