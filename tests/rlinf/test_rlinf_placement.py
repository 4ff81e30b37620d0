"""RLinf's placement strategies, and the placement of components by a config."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hotseat.errors import ConfigError, PlacementError, TooFewDevicesError
from hotseat.placement import Inventory
from hotseat.planning.config_plan import with_node_groups
from hotseat.rlinf import (
    ComponentPlacement,
    FlexiblePlacementStrategy,
    HybridComponentPlacement,
    NodePlacementStrategy,
    PackedPlacementStrategy,
)
from hotseat.rlinf.configs import checked_cluster


@dataclass(frozen=True)
class Machines:
    inventory: Inventory


EIGHT = Machines(Inventory.parse("1x8"))
TWO_NODES = Machines(Inventory.parse("a=1x4,b=1x4"))


def devices(strategy, machines=EIGHT):
    return [process.devices for process in strategy.get_placement(machines)]


def placed(placement, machines=EIGHT, **cluster):
    return ComponentPlacement({"cluster": {"component_placement": placement, **cluster}}, machines)


def test_packed_processes_have_devices_side_by_side_or_a_stride_apart():
    assert devices(PackedPlacementStrategy(2, 5)) == [(2,), (3,), (4,), (5,)]
    assert devices(PackedPlacementStrategy(0, 7, num_hardware_per_process=4)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    strided = PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2)
    assert devices(strided) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert devices(PackedPlacementStrategy(0, 1, node_group="b"), TWO_NODES) == [(4,), (5,)]


def test_packed_devices_have_to_be_a_multiple_of_what_a_process_takes():
    with pytest.raises(PlacementError, match="devices 0 to 4 cannot be packed with num_hardware_per_process 2"):
        PackedPlacementStrategy(0, 4, num_hardware_per_process=2)


def test_flexible_processes_have_the_devices_that_are_listed_on_one_node():
    assert devices(FlexiblePlacementStrategy([[0, 1], [3]])) == [(0, 1), (3,)]
    with pytest.raises(PlacementError, match=r"devices \[3, 4\] are on nodes \[0, 1\]; a process is on one node"):
        devices(FlexiblePlacementStrategy([[3, 4]]), TWO_NODES)
    with pytest.raises(TooFewDevicesError, match=r"rank 1: devices \[8\] do not exist: there are 8"):
        devices(FlexiblePlacementStrategy([[0], [8]]))
    with pytest.raises(PlacementError, match="must be one or more different ones"):
        devices(FlexiblePlacementStrategy([[1, 1]]))


def test_processes_by_node_have_no_devices():
    made = NodePlacementStrategy([1, 0, 1]).get_placement(TWO_NODES)
    assert [(process.rank, process.node, process.devices) for process in made] == [(0, 1, ()), (1, 0, ()), (2, 1, ())]
    with pytest.raises(PlacementError, match=r"nodes \[2\] do not exist: there are 2"):
        NodePlacementStrategy([2]).get_placement(TWO_NODES)


def test_the_hybrid_placement_of_rlinf():
    config = {"cluster": {"num_nodes": 1, "component_placement": {"actor": "0-7", "env": "0-3", "rollout": "4-7"}}}
    placement = HybridComponentPlacement(config, EIGHT)
    assert placement.components == ["actor", "env", "rollout"]
    assert placement.placement_mode == "hybrid"
    assert placement.get_world_size("actor") == 8
    assert placement.get_hardware_ranks("rollout") == [4, 5, 6, 7]
    assert devices(placement.get_strategy("env")) == [(0,), (1,), (2,), (3,)]


def test_components_have_any_names_and_may_be_placed_together():
    placement = placed({"actor,inference": "all", "my_tools": "0-1:0-3", "judge": "0-7:0-1"})
    assert placement.get_world_size("inference") == 8
    assert devices(placement.get_strategy("my_tools")) == [(0,), (0,), (1,), (1,)]
    assert devices(placement.get_strategy("judge")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    with pytest.raises(PlacementError, match="places no critic: it places actor, inference, my_tools, judge"):
        placement.get_strategy("critic")
    with pytest.raises(PlacementError, match="tools is placed twice"):
        placed({"tools": 0, "env, tools": "1"})
    with pytest.raises(PlacementError, match="has no cluster.component_placement"):
        ComponentPlacement({"cluster": {}}, EIGHT)


def test_ranks_of_a_node_group_count_within_it():
    section = checked_cluster(
        {
            "num_nodes": 2,
            "node_groups": [
                {"label": "train", "node_ranks": "0"},
                {"label": "robots", "node_ranks": "1", "ignore_hardware": True},
            ],
        }
    )
    machines = Machines(with_node_groups(Inventory.parse("2x4"), section.num_nodes, section.node_groups))
    placement = placed(
        {"actor": {"node_group": "train", "placement": "0-3"}, "env": {"node_group": "robots", "placement": "0:0-2"}},
        machines,
    )
    assert placement.get_hardware_ranks("actor") == [0, 1, 2, 3]
    assert [process.node for process in placement.get_strategy("env").get_placement(machines)] == [1, 1, 1]


def test_a_key_of_the_cluster_without_effect_is_logged_and_an_unknown_one_refused(caplog):
    assert checked_cluster({"num_nodes": 1, "num_gpus_per_node": 8}).num_nodes == 1
    assert "no effect here: cluster.num_gpus_per_node because devices are counted" in caplog.text
    with pytest.raises(ConfigError, match=r"cluster\.gpus"):
        checked_cluster({"gpus": 8})


def test_configs_of_omegaconf_are_read_with_their_interpolations():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        {"cluster": {"component_placement": {"actor": "0-3", "rollout": "${cluster.component_placement.actor}"}}}
    )
    assert ComponentPlacement(config, EIGHT).placement_mode == "colocated"
