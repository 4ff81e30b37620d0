"""Environment and folder of workers on nodes that are apart from the driver's."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from apart import INTERFACE, is_possible, nodes

from hotseat.cluster.environment import addresses_of, interface_of, own_folder, pass_on, rank_env, take_passed_on
from hotseat.placement.locate import Process

VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """A process in another folder, with nothing set."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_interface_is_found_by_its_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("::1") in ("lo", "")  # where IPv6 is off
    assert interface_of("203.0.113.7") == ""
    names = [name for _, name in socket.if_nameindex()]
    assert all(interface_of(address) in names for name in names for address in addresses_of(name))


def test_a_worker_gets_folder_variables_and_the_interface_of_its_node(worker, monkeypatch):
    folder = worker / "task"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    env = pass_on("127.0.0.1").env()
    monkeypatch.chdir(worker)
    monkeypatch.delenv("NCCL_DEBUG")
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    take_passed_on()
    assert Path.cwd() == folder
    assert [os.environ.get(name) for name in VARIABLES] == ["lo", "lo", "WARN", None]
    assert not set(env) & set(os.environ)  # what the worker starts has these already
    take_passed_on()


def test_what_the_node_has_counts(worker, monkeypatch):
    there = socket.if_nameindex()[0][1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of-the-driver")  # an interface that this node lacks
    monkeypatch.setenv("TP_SOCKET_IFNAME", there)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    [(name, text)] = pass_on("127.0.0.1").env().items()
    _, variables, address = json.loads(text)
    for key in variables:
        monkeypatch.delenv(key)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv(name, json.dumps(["/not/there", variables, address]))
    take_passed_on()
    assert Path.cwd() == worker
    assert [os.environ.get(key) for key in VARIABLES] == ["lo", there, "WARN", None]


def test_a_copy_that_ray_makes_has_another_path_on_each_node(worker, monkeypatch):
    copy = worker / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    assert own_folder() == str(worker)
    monkeypatch.chdir(copy)
    assert own_folder() is None


MEET = """
import os, torch, torch.distributed as dist
from hotseat.cluster.environment import take_passed_on
take_passed_on()
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(os.environ["GLOO_SOCKET_IFNAME"], int(total))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not is_possible(), reason="namespaces with links need root and Linux's tools")
def test_ranks_on_two_nodes_meet_where_host_names_mean_loopback(monkeypatch):
    """Debian's installer maps the host name to 127.0.1.1, on which gloo would listen."""
    monkeypatch.setenv("RAY_ADDRESS", "")
    with nodes(2) as apart:
        places = [Process(rank, rank) for rank in range(2)]
        started = []
        for rank, node in enumerate(apart):
            assert node.run("getent", "ahostsv4", node.name).stdout.startswith("127.0.1.1")
            node.env = {
                **os.environ,
                **rank_env(places, rank, apart[0].address, 29500),
                **pass_on(node.address).env(),
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            started.append(node.start(sys.executable, "-c", MEET, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        printed = [process.communicate(timeout=500)[0] for process in started]
    assert [text.splitlines()[-1] for text in printed] == [f"{INTERFACE} 3"] * 2, printed
