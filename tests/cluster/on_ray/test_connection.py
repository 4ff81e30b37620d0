"""On an existing Ray cluster, of two nodes: we use it, and leave it as it was."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from environments import own_environment

from hotseat.cluster.ports import free_port
from hotseat.processes.supervisor import SESSION, end_marked, marked, process_state

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HELPERS = Path(__file__).parents[2] / "helpers"
MARK = "HOTSEAT_TEST_CLUSTER"


@pytest.fixture(scope="module")
def environment():
    """The environment of drivers on a cluster of a head with two devices and a node with three, on loopback."""
    with tempfile.TemporaryDirectory(prefix="hs-") as directory:
        port = free_port("127.0.0.1")
        variables = {
            **own_environment(),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": directory,
            "RAY_USAGE_STATS_ENABLED": "0",
            MARK: directory,
        }
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={directory}", "--node-name=first"),
                *("--include-dashboard=false", "--num-cpus=2", "--num-gpus=2", "--object-store-memory=100000000"),
                *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
                *(f"--ray-client-server-port={free_port('127.0.0.1')}", "--disable-usage-stats"),
                *("--no-monitor", "--include-log-monitor=false"),  # each a process that these tests do without
            ],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        second = None
        try:
            said = []
            for line in head.stdout:
                said.append(line)
                if "Ray runtime started" in line:
                    break
            assert "Ray runtime started" in said[-1], "".join(said)
            second = subprocess.Popen(
                [sys.executable, str(HELPERS / "second_raylet.py"), f"127.0.0.1:{port}"],
                env={**variables, "NCCL_IB_HCA": "mlx5_1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert second.stdout.readline() == "up\n"
            driver = {"RAY_ADDRESS": f"127.0.0.1:{port}", "NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "WARN"}
            yield variables | driver
            assert head.poll() is None
            assert second.poll() is None
        finally:
            for process in (second, head):
                if process:
                    process.terminate()
            for process in (second, head):
                if process:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(60)
            end_marked(MARK, [directory])


ATTACH = """
from hotseat.cluster import Cluster
try:
    Cluster()
except Exception as error:
    print(type(error).__name__, error)
"""


def attach(**environment: str) -> str:
    """What an attempt to attach says."""
    return subprocess.run(
        [sys.executable, "-c", ATTACH], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    ).stdout


def test_addresses_where_no_cluster_answers_are_refused_at_once():
    nowhere = f"127.0.0.1:{free_port('127.0.0.1')}"
    assert f"PlacementError no Ray cluster answers at {nowhere}" in attach(RAY_ADDRESS=nowhere)
    said = attach(RAY_ADDRESS="ray://127.0.0.1:10001")
    assert "PlacementError ray://127.0.0.1:10001 is a Ray client address, which cannot place groups" in said


@pytest.mark.long
def test_a_wrong_token_is_an_error_that_says_what_to_set(environment):
    said = attach(**{**environment, "RAY_AUTH_TOKEN": "0" * 64})
    assert "RunError could not attach to the Ray cluster at 127.0.0.1" in said
    assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in said


def drive(environment: dict, how: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(HELPERS / "driver_on_existing.py"), how],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def facts_of(driver: subprocess.Popen) -> dict:
    line = driver.stdout.readline()
    assert line, "the driver ended before it was ready"
    return json.loads(line)


def wait_until_nothing_is_left(facts: dict) -> None:
    pids = [*facts["workers"], *facts["children"]]
    begin = time.monotonic()
    while True:
        left = [pid for pid in pids if process_state(pid) != "gone"] + marked(SESSION, [facts["session"]])
        if not left or time.monotonic() - begin > 60:
            break
        time.sleep(0.2)
    assert left == []


@pytest.fixture(scope="module")
def driver(environment):
    process = drive(environment, "run")
    yield process
    process.kill()
    process.wait(60)
    process.stdout.close()


@pytest.mark.long
def test_a_run_has_a_role_on_each_node_and_leaves_nothing(driver):
    facts = facts_of(driver)
    first, second = facts["node_ids"]
    assert facts["nodes"] == [[0, 2], [1, 3]]  # the head first, whatever the node ids are
    (actor,), rollout = facts["actor"], facts["rollout"]
    assert (actor["node"], actor["rank"], actor["local_rank"]) == (first, "0", "0")
    places = [(at["node"], at["rank"], at["local_rank"]) for at in rollout]
    assert places == [(second, "0", "0"), (first, "1", "0")]
    # The driver's variables reach every worker, but for those that its node has been given.
    nccl = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo"}  # on loopback there is no other interface
    assert actor["nccl"] == rollout[1]["nccl"] == nccl | {"NCCL_IB_HCA": "mlx5_0"}
    assert rollout[0]["nccl"] == nccl | {"NCCL_IB_HCA": "mlx5_1"}
    # One physical device of the first node was reserved and is shared; of the second two, turned around in the plan.
    assert rollout[1]["devices"] == actor["devices"]
    high, low = rollout[0]["devices"].split(",")
    assert int(high) > int(low)
    assert facts["numbers"] == {"0": list(range(20)), "1": list(range(20))}
    assert facts["alive"] == [True] * 2
    doing, stack = facts["waiting"]  # of a process on the other node, which that node looked at
    assert doing.startswith("'wait_for_file', for")
    assert "wait_for_file" in stack
    wait_until_nothing_is_left(facts)


@pytest.mark.long
def test_a_killed_driver_leaves_the_cluster_as_it_was(environment, driver):
    facts = facts_of(driver)
    assert facts["nodes"] == [[0, 2], [1, 3]]
    driver.send_signal(signal.SIGKILL)
    driver.wait(60)
    wait_until_nothing_is_left(facts)
    left = drive(environment, "observe")
    assert json.loads(left.communicate(timeout=600)[0]) == {"actors": [], "reserved": [], "nodes": 2}
