from placement_cases import refused

from hotseat.placement import DeviceKind, Inventory, Node
from hotseat.placement.inventory import NodePool, parse_node_ranks


def test_short_form_gives_nodes_devices_and_kind():
    inventory = Inventory.parse("4x8xA100-80G")
    assert inventory.num_nodes == 4
    assert inventory.num_devices == 32
    assert {node.device_kind for node in inventory.nodes} == {DeviceKind("A100-80G", 80.0)}
    assert str(inventory) == "4 nodes x 8 A100-80G"


def test_known_kinds_know_their_memory():
    assert Inventory.parse("1x8xH200").nodes[0].device_kind.memory_gib == 139.0
    assert Inventory.parse("1x8xh100-80g").nodes[0].device_kind.name == "H100-80G"
    assert Inventory.parse("2x8xH100").nodes[1].device_kind.name == "H100-80G"
    assert Inventory.parse("1x8xA800").nodes[0].device_kind.name == "A800-80G"
    assert Inventory.parse("1x1x4090").nodes[0].device_kind == DeviceKind("RTX4090", 23.5)


def test_kind_may_be_left_out_or_be_a_memory_size():
    assert Inventory.parse("2x4").nodes[1].device_kind.memory_gib is None
    assert Inventory.parse("2x8x24G").nodes[0].device_kind.memory_gib == 24.0
    assert Inventory.parse("1x2xMINE-96GB").nodes[0].device_kind == DeviceKind("MINE-96GB", 96.0)
    assert str(Inventory.parse("2x4")) == "2 nodes x 4 devices"
    assert str(Inventory.parse("2x4x24G")) == "2 nodes x 4 devices of 24G"


def test_nodes_without_devices():
    assert Inventory.parse("cpu").nodes == (Node(0),)
    assert Inventory.parse("2xcpu").num_nodes == 2
    assert str(Inventory.parse("1x8xH200,2xcpu")) == "1 node x 8 H200 + 2 nodes x cpu"


def test_several_pools():
    inventory = Inventory.parse("a800=8x8xA800-80G, sim=4x8x4090")
    assert inventory.pools == ("a800", "sim")
    assert inventory.pool_nodes("sim") == (8, 9, 10, 11)
    assert inventory.pool_nodes("cluster") == tuple(range(12))


def test_device_ids_run_over_nodes_and_skip_nodes_without_devices():
    inventory = Inventory.parse("1x2,1xcpu,1x3,cpu")
    assert list(inventory.devices_of(0)) == [0, 1]
    assert list(inventory.devices_of(1)) == []
    assert list(inventory.devices_of(2)) == [2, 3, 4]
    assert [inventory.node_of(device) for device in range(5)] == [0, 0, 2, 2, 2]


def test_pools_given_like_node_groups_carry_environment_variables():
    inventory = Inventory.parse("4x8").with_pools(
        [
            NodePool("train", (0, 1), {0: {"NET": "ib0", "A": "1"}, 1: {"NET": "ib1"}}),
            NodePool("robots", (3,), ignore_devices=True),
        ]
    )
    assert [node.pool for node in inventory.nodes] == ["train", "train", "cluster", "robots"]
    assert inventory.nodes[0].env == (("A", "1"), ("NET", "ib0"))
    assert inventory.nodes[1].env == (("NET", "ib1"),)
    assert not inventory.places_by_node("train")
    assert inventory.places_by_node("robots")
    assert inventory.places_by_node("node")


def test_node_ranks_as_text():
    assert parse_node_ranks("all", 3) == (0, 1, 2)
    assert parse_node_ranks("0-1, 4", 6) == (0, 1, 4)
    assert parse_node_ranks(2, 3) == (2,)
    with refused("'x'", "0-1,4-5"):
        parse_node_ranks("x", 3)
    with refused("must ascend"):
        parse_node_ranks("2,1", 3)
    with refused("no node 7", "nodes are 0-3"):
        parse_node_ranks("0-7", 4)


def test_unreadable_inventories_say_what_would_fit():
    with refused("'8'", "1x8"):
        Inventory.parse("8")
    with refused("'8xA100-80G'", "1x8xA100-80G"):
        Inventory.parse("8xA100-80G")
    with refused("cannot read 'lots'", "NODESxDEVICES"):
        Inventory.parse("lots")
    with refused("A100 comes with different memories", "A100-40G or A100-80G"):
        Inventory.parse("4x8xA100")
    with refused("unknown device kind 'H1000'", "did you mean H100-80G?", "H1000-24G", "L40S"):
        Inventory.parse("4x8xH1000")
    with refused("has no devices", "1x1"):
        Inventory.parse("0x8")
    with refused("more than 1,000,000 devices", "check the numbers"):
        Inventory.parse("999999999x8")
    with refused("more than 1,000,000 nodes"):
        Inventory.parse("9999999xcpu")
    with refused("has no nodes", "2xcpu"):
        Inventory.parse("0xcpu")


def test_wrong_nodes_and_pools_are_refused():
    with refused("'node' is reserved", "choose another name"):
        Inventory.parse("node=1x8")
    with refused("'a b'", "letters, digits"):
        Inventory.parse("a b=1x8")
    with refused("'a' is given twice"):
        Inventory.parse("a=1x8,a=1x8")
    inventory = Inventory.parse("2x8")
    with refused("'a' is given twice"):
        inventory.with_pools([NodePool("a", (0,)), NodePool("a", (1,))])
    with refused("node 0 is in pool 'a' and in pool 'b'"):
        inventory.with_pools([NodePool("a", (0,)), NodePool("b", (0,))])
    with refused("environment variables for node 1", "its nodes: 0"):
        inventory.with_pools([NodePool("a", (0,), {1: {"X": "1"}})])
    with refused("unknown pool 'a80'", "did you mean 'a800'?", "cluster, node"):
        Inventory.parse("a800=1x8").pool_nodes("a80")


def test_host_memory_follows_the_devices():
    gpus, cpus = Inventory.parse("2x8xH100-80G+1024G,sim=1xcpu+1.5T").nodes[1:]
    assert (gpus.num_devices, str(gpus.device_kind), gpus.host_memory_gib) == (8, "H100-80G", 1024)
    assert (cpus.pool, cpus.num_devices, cpus.host_memory_gib) == ("sim", 0, 1536)
    assert Inventory.parse("1x4").nodes[0].host_memory_gib is None
    assert str(Inventory.parse("2x8xH100-80G+1024G")) == "2 nodes x 8 H100-80G with 1,024 GiB of host memory"
    for text in ("1x8xH100+lots", "1x8xH100+0G", "1x8xH100+"):
        with refused("as the host memory of a node", "in GiB or TiB, for instance 2x8xH100-80G+1024G"):
            Inventory.parse(text)
