"""Who our processes are: found by two marks, ended for good, and nobody else with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory

import pytest

from hotseat.cluster import Cluster, _guard
from hotseat.cluster._host import free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard needs Linux")

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def start():
    started = []

    def popen(*command: str, **options) -> subprocess.Popen:
        started.append(subprocess.Popen(list(command) or SLEEP, **options))
        return started[-1]

    yield popen
    for process in started:
        process.kill()
        process.wait(5)


@pytest.fixture
def number():
    """Gives this process a mark, and takes it away again."""
    before = []
    yield lambda session, worker="": before.append(_guard.mark_this_process(session, worker))
    _guard.remark_this_process(before[0])


def test_states_of_a_process(start):
    process = start()
    started = _guard.start_time(process.pid)
    assert _guard.process_state(process.pid, started) == "running"
    assert _guard.process_state(process.pid, started + 1) == "gone"  # the pid is used again by another
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert _guard.process_state(process.pid, started) == "stopped"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert _guard.process_state(process.pid, started) == "gone"  # though nobody has collected it yet
    process.wait(5)
    assert _guard.process_state(process.pid) == "gone"
    assert _guard.start_time(process.pid) is None


def test_a_session_is_found_by_its_environment_also_inside_another(start):
    ours = start(env={_guard.SESSION: "outer-1/inner-1"})
    start(env={_guard.SESSION: "outer-11"})
    assert _guard.marked(_guard.SESSION, ["inner-1"]) == [ours.pid]
    assert _guard.marked(_guard.SESSION, ["outer-1"]) == [ours.pid]


def test_a_process_without_a_readable_environment_is_found_by_its_number(start, number):
    number("some-session", "some-session:rollout:0:0")
    ours = start(env={})
    number("some-session", "some-session:rollout:1:0")
    other_worker = start(env={})
    number("other-session")
    other_session = start(env={})
    assert sorted(_guard.marked(_guard.SESSION, ["some-session"])) == sorted([ours.pid, other_worker.pid])
    assert _guard.marked(_guard.WORKER, ["some-session:rollout:0:0"]) == [ours.pid]
    assert _guard.end_marked(_guard.WORKER, ["some-session:rollout:0:0"]) == [ours.pid]
    assert ours.wait(5) == -signal.SIGKILL
    assert other_worker.poll() is None
    assert other_session.poll() is None


def test_stopped_processes_are_ended_too(start):
    process = start(env={_guard.SESSION: "stopped-session"})
    process.send_signal(signal.SIGSTOP)
    assert _guard.end_marked(_guard.SESSION, ["stopped-session"]) == [process.pid]


def test_who_cleans_up_after_others_goes_last(start):
    """Python's resource tracker removes the segments of processes that were killed, if it outlives them."""
    name = f"hotseat-test-{os.getpid()}"
    script = f"""
import time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory({name!r}, create=True, size=64)
print("made", flush=True)
time.sleep(60)
"""
    process = start(
        *(sys.executable, "-c", script), env={**os.environ, _guard.SESSION: "tracked"}, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"made\n"
    _guard.end_marked(_guard.SESSION, ["tracked"])
    process.stdout.close()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name)


def test_a_fork_that_ends_takes_nothing_down():
    with Cluster("local") as cluster:
        child = os.fork()
        if child == 0:
            cluster.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert os.path.isdir(cluster._directory)
        assert cluster._guard_process.poll() is None
    assert not os.path.isdir(cluster._directory)
    assert cluster._guard_process.poll() == 0


def test_ports_are_free_and_given_once():
    ports = [free_port("127.0.0.1") for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(20000 <= port < 32000 for port in ports)
