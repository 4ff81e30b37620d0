import pytest
from placement_cases import refused

from hotseat.errors import PlacementError, TooFewDevicesError
from hotseat.placement.inventory import Inventory, NodePool
from hotseat.placement.locate import Process, RoleRequest, locate
from hotseat.placement.selection import parse_selection


def place(inventory, engine_size=None, num_procs=None, **placement):
    """Processes of each role as (node, devices)."""
    if isinstance(inventory, str):
        inventory = Inventory.parse(inventory)
    requests = [
        RoleRequest(
            role,
            parse_selection(on, role),
            engine_size if role == "rollout" else None,
            num_procs if role == "rollout" else None,
        )
        for role, on in placement.items()
    ]
    found = locate(inventory, requests)
    return {role: [(p.node, p.devices) for p in found[role].processes] for role in placement}


def devices(processes):
    return [devices for _, devices in processes]


def test_ranks_one_process_per_device():
    assert place("2x2", actor="1-2")["actor"] == [(0, (1,)), (1, (2,))]
    assert devices(place("2x2", actor="all")["actor"]) == [(0,), (1,), (2,), (3,)]


def test_more_processes_than_devices_share_and_fewer_have_several():
    found = place("1x11", env="0-1:0-3,3-5,7-10:7-14")["env"]
    assert devices(found) == [
        (0,), (0,), (1,), (1,),  # processes 0-3 on devices 0-1
        (3,), (4,), (5,),  # 4-6, one each
        (7,), (7,), (8,), (8,), (9,), (9,), (10,), (10,),  # 7-14 on 7-10
    ]  # fmt: skip
    assert devices(place("1x8", env="0-3:0-1,4-7:2")["env"]) == [(0, 1), (2, 3), (4, 5, 6, 7)]
    assert devices(place("1x4", env="all:0-7")["env"]) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]


def test_processes_that_share_a_device_have_a_fraction_of_it():
    found = locate(Inventory.parse("1x2"), [RoleRequest("env", parse_selection("0:0-3,1"))])
    assert [process.fraction for process in found["env"].processes] == [0.25, 0.25, 0.25, 0.25, 1.0]


def test_blocks_are_packed_in_the_order_of_the_roles():
    found = place("2x8", actor="1x6", rollout="2x1", reference="1x8")
    assert devices(found["actor"]) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert devices(found["rollout"]) == [(6,), (7,)]
    assert [node for node, _ in found["reference"]] == [1] * 8


def test_a_block_stays_on_one_node():
    found = place("2x8", actor="1x6", critic="1x6", reward="1x2")
    assert {node for node, _ in found["critic"]} == {1}
    assert devices(found["reward"]) == [(6,), (7,)]


def test_blocks_do_not_take_devices_that_are_named_by_rank():
    assert devices(place("1x8", rollout="1x4", actor="0-3")["rollout"]) == [(4,), (5,), (6,), (7,)]
    assert devices(place("1x8", rollout="3x1", actor="1,3")["rollout"]) == [(0,), (2,), (4,)]


def test_large_blocks_go_first_where_the_given_order_finds_no_room():
    found = place("2x8", env="1x3", reward="1x3", actor="1x5", critic="1x5")
    assert devices(found["actor"])[0] == (0,)
    assert devices(found["critic"])[0] == (8,)
    assert sorted(d for role in found.values() for (d,) in devices(role)) == list(range(16))


def test_a_block_larger_than_a_node_takes_whole_nodes():
    found = place("4x8", reward="1x2", actor="1x16")
    assert [d for (d,) in devices(found["actor"])] == list(range(8, 24))
    found = place("3x8", actor="1x12", rollout="1x4")
    assert [d for (d,) in devices(found["actor"])] == list(range(12))
    assert [d for (d,) in devices(found["rollout"])] == [12, 13, 14, 15]


def test_the_same_devices_as_another_role():
    found = place("1x8", actor="1x4", reference="@actor", reward="@reference")
    assert found["reward"] == found["reference"] == found["actor"]


def test_engines_take_several_devices_each():
    assert devices(place("1x8", engine_size=4, rollout="all")["rollout"]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert devices(place("1x8", engine_size=2, rollout="2x2")["rollout"]) == [(0, 1), (2, 3)]
    assert devices(place("1x8", engine_size=2, rollout="1x8")["rollout"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert devices(place("1x8", engine_size=2, rollout="0-1,4-5")["rollout"]) == [(0, 1), (4, 5)]
    assert devices(place("1x8", engine_size=4, rollout="0-7:0-1")["rollout"]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert devices(place("2x8", engine_size=4, num_procs=4, actor="all", rollout="@actor")["rollout"])[3] == (
        12,
        13,
        14,
        15,
    )


def test_processes_without_devices():
    assert place("2x8", actor="cpu*3")["actor"] == [(0, ()), (0, ()), (1, ())]
    assert place("1x8,2xcpu", reward="cpu*2")["reward"] == [(1, ()), (2, ())]
    assert place("a=1x8,sim=2xcpu", env="sim/cpu*2", reward="a/cpu*1") == {
        "env": [(1, ()), (2, ())],
        "reward": [(0, ())],
    }
    assert place("cpu", actor="cpu*2", rollout="@actor")["rollout"] == [(0, ()), (0, ())]
    assert place("cpu", num_procs=3, actor="cpu*1", rollout="@actor")["rollout"] == [(0, ())] * 3
    assert place("2xcpu", num_procs=2, actor="cpu*4", rollout="@actor")["rollout"] == [(0, ()), (1, ())]
    assert place("2xcpu", num_procs=4, rollout="all")["rollout"] == [(0, ()), (0, ()), (1, ()), (1, ())]
    assert place("1x8", reward="none")["reward"] == []


def test_ranks_count_nodes_where_there_are_no_devices():
    assert place("2xcpu", actor="all", env="1:0-2") == {
        "actor": [(0, ()), (1, ())],
        "env": [(1, ()), (1, ()), (1, ())],
    }
    agents = place("4x8", env={"node_group": "node", "placement": "0-1:0-199,2-3:200-399"})["env"]
    assert [node for node, _ in agents] == [0] * 100 + [1] * 100 + [2] * 100 + [3] * 100
    robots = Inventory.parse("3x8").with_pools([NodePool("robot", (1, 2), ignore_devices=True)])
    assert place(robots, env="robot/0-1:0-3")["env"] == [(1, ()), (1, ()), (2, ()), (2, ())]


def test_ranks_count_from_zero_within_a_pool_and_run_on_over_pools():
    inventory = "a800=2x2,sim=2x2"
    assert devices(place(inventory, env="sim/0-1")["env"]) == [(4,), (5,)]
    assert devices(place(inventory, env={"node_group": "sim,a800", "placement": "3-4"})["env"]) == [(7,), (0,)]
    assert devices(place(inventory, env={"node_group": ["a800", "sim"], "placement": "all"})["env"])[-1] == (7,)
    assert devices(place(inventory, env="cluster/7")["env"]) == [(7,)]
    assert devices(place(inventory, rollout="sim/1x2")["rollout"]) == [(4,), (5,)]


def test_a_process_records_rank_node_devices():
    found = locate(Inventory.parse("2x2"), [RoleRequest("actor", parse_selection("all"))])["actor"]
    assert found.processes[3] == Process(3, 1, (3,), 1.0)
    assert found.devices == (0, 1, 2, 3)


def test_rank_out_of_range():
    with refused("actor: rank 8 is out of range", "has 8 devices, ranks 0-7"):
        place("1x8", actor="0-8")
    with refused("rank 2 is out of range", "pool sim has 2 devices"):
        place("a=1x8,sim=1x2", env="sim/0-2")
    with refused("rank 1 is out of range", "has 1 node, ranks 0-0"):
        place("cpu", env="0-1")


def test_a_number_that_yaml_made_of_a_colon_is_recognised():
    with refused("rank 60 is out of range", "YAML 1.1 reads an unquoted 1:0 as the number 60", '"1:0" in quotes'):
        place("1x8", rollout=60)
    with refused("an unquoted 2:3 as the number 123"):
        place("1x8", rollout={"placement": 123})
    with pytest.raises(PlacementError) as caught:
        place("1x8", rollout="60")
    assert "YAML" not in str(caught.value)


def test_references_must_end_somewhere():
    with refused("in a circle: actor -> @rollout -> @actor", "give one of actor, rollout devices"):
        place("1x8", actor="@rollout", rollout="@actor")
    with refused("in a circle: actor -> @actor"):
        place("1x8", actor="@actor")
    with refused("in a circle: reference -> @reward -> @reference"):
        place("1x8", critic="@reference", reference="@reward", reward="@reference")
    with refused("reference: @actor is not placed", "placed are reference, critic"):
        place("1x8", reference="@actor", critic="0")
    with refused("@reward has no devices to share", "place critic itself"):
        place("1x8", reward="none", critic="@reward")


def test_processes_stay_on_one_node():
    with refused("env: process 0 would have devices 0-3 on nodes 0-1", "4 in a row"):
        place("2x2", env="0-3:0")
    with refused("engine 0 of tensor parallel size 4 would span nodes 0-1", "devices 0-3", "tensor_parallel_size to 2"):
        place("2x2", engine_size=4, rollout="all")
    with refused("engine 1 of tensor parallel size 4 would span nodes 0-1", "tensor_parallel_size to 3"):
        place("2x6", engine_size=4, rollout="1x12")
    with refused("0-1:0 gives 1 processes 2 nodes", "at least 2 processes"):
        place("2xcpu", env="0-1:0")
    with refused("all gives 2 processes 3 nodes"):
        place("3xcpu", num_procs=2, rollout="all")


def test_engines_must_divide_the_devices():
    with refused("its 8 devices cannot be cut into engines of tensor parallel size 3", "tensor_parallel_size to 2"):
        place("1x8", engine_size=3, rollout="all")
    with refused("a block of 3 devices", "tensor_parallel_size to 1", "blocks that 2 divides"):
        place("1x8", engine_size=2, rollout="2x3")
    with refused("gives an engine 2 devices", "size is 1", "tensor_parallel_size to 2"):
        place("1x8", engine_size=1, rollout="0-7:0-3")
    with refused("gives an engine 1 device, tensor parallel size is 2"):
        place("1x8", engine_size=2, rollout="0-7:0-7")


def test_engines_times_tensor_parallel_must_equal_the_shared_devices():
    with refused(
        "rollout: 4 engines x tp 4 need 16 devices, actor has 8: with colocated roles they must be equal;"
        " set rollout.num_engines to 2 or rollout.tensor_parallel_size to 2"
    ):
        place("2x8", engine_size=4, num_procs=4, actor="1x8", rollout="@actor")
    with refused("3 engines x tp 4 need 12 devices, actor has 8", "equal; set rollout.num_engines to 2"):
        place("2x8", engine_size=4, num_procs=3, actor="1x8", rollout="@actor")
    with refused("2 engines x tp 3 need 6 devices, actor has 8", "equal; set rollout.tensor_parallel_size to 4"):
        place("2x8", engine_size=3, num_procs=2, actor="1x8", rollout="@actor")
    with refused("num_engines to 7 and rollout.tensor_parallel_size to 1"):
        place("1x8", engine_size=2, num_procs=2, actor="0-6", rollout="@actor")
    with refused("2 engines x tp 2 need 4 devices, its selection has 8"):
        place("1x8", engine_size=2, num_procs=2, rollout="all")
    with refused("3 engines x tp 1 need 3 devices, actor has 2: with colocated roles they must be equal"):
        place("1x2", engine_size=1, num_procs=3, actor="0-1", rollout="@actor")
    with refused("1 engine x tp 1 needs 1 device, actor has 2: with colocated roles they must be equal"):
        place("1x2", engine_size=1, num_procs=1, actor="0-1", rollout="@actor")


def test_a_multiple_of_the_devices_is_so_many_engines_on_each():
    found = locate(
        Inventory.parse("1x2"),
        [RoleRequest("actor", parse_selection("all")), RoleRequest("rollout", parse_selection("@actor"), 1, 4)],
    )
    assert [process.devices for process in found["rollout"].processes] == [(0,), (0,), (1,), (1,)]
    assert [process.fraction for process in found["rollout"].processes] == [0.5] * 4


def test_two_numbers_of_processes_must_agree():
    with refused("0-3:0-7 makes 8 processes and 4 are asked for"):
        place("1x8", num_procs=4, engine_size=1, rollout="0-3:0-7")
    with refused("cpu*3 makes 3 processes and 2 are asked for"):
        place("2xcpu", num_procs=2, rollout="cpu*3")
    with refused("makes 3 processes and 4 are asked for"):
        place("1xcpu,1xcpu", num_procs=4, engine_size=1, rollout="0:0-1,1:2")
    with refused("5 processes on 4 devices", "take 4 or 8"):
        locate(Inventory.parse("1x4"), [RoleRequest("env", parse_selection("1x4"), num_procs=5)])


def test_other_layouts_from_a_number_of_processes():
    found = locate(Inventory.parse("1x4"), [RoleRequest("env", parse_selection("1x4"), num_procs=8)])
    assert [process.devices for process in found["env"].processes] == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    found = locate(Inventory.parse("1x4"), [RoleRequest("env", parse_selection("1x4"), num_procs=2)])
    assert [process.devices for process in found["env"].processes] == [(0, 1), (2, 3)]


def test_pools_of_different_sorts_do_not_mix():
    with refused("pools a, sim mix nodes with and without devices"):
        place("a=1x8,sim=1xcpu", env="a,sim/0")


def test_more_devices_than_there_are():
    with refused(
        "the roles need 40 devices and the inventory has 32 (4 nodes x 8 A100-80G)",
        "reference 8 (1x8), reward 8 (1x8), critic 8 (1x8), actor 8 (1x8), rollout 8 (2x4)",
        "5 nodes of 8 devices would do",
        "rollout: '@actor'",
    ):
        place("4x8xA100-80G", engine_size=4, reference="1x8", reward="1x8", critic="1x8", actor="1x8", rollout="2x4")
    with refused("need 12 devices", "actor 8 (by rank)", "2 nodes of 8 devices would do"):
        place("1x8", actor="0-7", rollout="1x4")
    with refused("need 3 devices and pool sim has 2", "2 nodes of 2 devices would do"):
        place("a=1x8,sim=1x2", actor="a/1x8", env="sim/3x1")
    with refused("need 999999999 devices", "125000000 nodes of 8 devices would do"):
        place("1x8", actor="999999999x1")
    with refused("rollout: 1x1 needs devices and the inventory has none", "cpu*1"):
        place("cpu", actor="cpu*1", rollout="1x1")


def test_what_more_devices_would_cure_is_an_error_of_its_own():
    for placement in ({"actor": "0-8"}, {"actor": "9x1"}, {"actor": "2x5"}):
        with pytest.raises(TooFewDevicesError):
            place("1x8", **placement)
    with pytest.raises(PlacementError) as caught:
        place("1x8", actor=60)
    assert not isinstance(caught.value, TooFewDevicesError)


def test_enough_devices_but_no_node_with_room():
    with refused(
        "critic: there is no room for 1x5", "15 of 16 devices", "block of 5 must lie on one node", "3 nodes of 8"
    ):
        place("2x8", actor="2x5", critic="1x5")
