"""Whatever ends the driver, nothing of ours is left ten seconds later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments import hear_interrupts

from hotseat.processes.supervisor import SESSION, end_marked, marked, process_state, start_time

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DRIVER = Path(__file__).parents[2] / "helpers" / "driver_to_end.py"
MARK = "HOTSEAT_TEST_DRIVER"  # in the environment of everything that a driver of these tests starts, its guard too


class Driver:
    def __init__(self, how: str):
        self.mark = f"{os.getpid()}-{how}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, MARK: self.mark},
            preexec_fn=hear_interrupts,
        )
        assert self.process.stdout.readline() == "starting\n"

    def facts(self) -> dict:
        line = self.process.stdout.readline()
        assert line, "the driver ended before it was ready"
        return json.loads(line)

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(60)

    def clean_up(self) -> None:
        end_marked(MARK, [self.mark])
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def driver(ending):
    made = Driver({"TERM": "without", "KILL forked": "forked"}.get(ending, "with"))
    yield made
    made.clean_up()


def tree_of(pid: int) -> dict[int, int]:
    """A process and everything under it, with their start times."""
    parents = {}
    for name in os.listdir("/proc"):
        try:
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            parents[int(name)] = int(fields[1])
        except (OSError, ValueError):
            continue
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return {member: start_time(member) for member in tree}


def ports_of(pids: list[int]) -> set[str]:
    """Local address and port, as the kernel writes them, of everything that these processes listen on."""
    inodes = set()
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:
            continue
    return {address for address, inode in listening() if inode in inodes}


def listening() -> list[tuple[str, str]]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.append((fields[1], fields[9]))
    return found


def what_is_left(driver: Driver, facts: dict, tree: dict[int, int], ports: set[str]) -> dict:
    left = {
        "processes": [pid for pid, started in tree.items() if process_state(pid, started) != "gone"],
        "unknown": marked(MARK, [driver.mark]) + marked(SESSION, [facts["session"]]),
        "ports": ports & {address for address, _ in listening()},
        "segments": [name for name in os.listdir("/dev/shm") if facts["session"] in name],
        "directory": [facts["directory"]] if os.path.exists(facts["directory"]) else [],
    }
    return {what: things for what, things in left.items() if things}


@pytest.mark.parametrize(
    "ending",
    ["KILL forked", *(pytest.param(name, marks=pytest.mark.long) for name in ("KILL", "TERM", "INT"))],
)
def test_nothing_is_left_after(driver, ending):
    facts = driver.facts()
    tree = tree_of(facts["pid"])
    assert {*facts["workers"], *facts["children"], facts["guard"]} < set(tree)
    assert len(tree) > 8  # and Ray's four daemons, the broker, the driver
    assert os.path.exists(f"/dev/shm/{facts['segment']}")
    ports = ports_of(list(tree))
    assert len(ports) > 5
    driver.end(getattr(signal, f"SIG{ending.split()[0]}"))
    begin = time.monotonic()
    while (left := what_is_left(driver, facts, tree, ports)) and time.monotonic() - begin < 60:
        time.sleep(0.2)
    assert left == {}


def test_nothing_is_left_of_a_driver_that_is_killed_while_it_starts():
    driver = Driver("with")
    until, tree = time.monotonic() + 30, {}
    while time.monotonic() < until and len(tree) < 4:  # driver, guard and the first of Ray's
        time.sleep(0.05)
        tree = tree_of(driver.process.pid)
    driver.end(signal.SIGKILL)
    begin = time.monotonic()
    while time.monotonic() - begin < 60:
        left = [pid for pid, started in tree.items() if process_state(pid, started) != "gone"]
        left += marked(MARK, [driver.mark])
        if not left:
            break
        time.sleep(0.2)
    driver.clean_up()
    assert left == []


def test_the_guard_of_a_local_run_goes_with_it():
    driver = Driver("local")
    facts = driver.facts()
    Path(f"/dev/shm/hotseat-{facts['session']}-left").write_bytes(b"x")
    driver.end(signal.SIGKILL)
    begin = time.monotonic()
    while process_state(facts["guard"]) != "gone" and time.monotonic() - begin < 60:
        time.sleep(0.1)
    assert process_state(facts["guard"]) == "gone"
    assert not os.path.exists(f"/dev/shm/hotseat-{facts['session']}-left")
    driver.clean_up()
