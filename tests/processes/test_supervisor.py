"""Who our processes are: found by two marks, ended for good, and nobody else with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from waiting import wait_until

from hotseat.cluster import Cluster
from hotseat.cluster.ports import free_port
from hotseat.processes import supervisor

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard needs Linux")

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def start():
    started = []

    def popen(*command: str, **options) -> subprocess.Popen:
        started.append(subprocess.Popen(list(command) or SLEEP, **options))
        if options.get("env"):  # others can read it a moment after `Popen` has returned
            wait_until(Path(f"/proc/{started[-1].pid}/environ").read_bytes)
        return started[-1]

    yield popen
    for process in started:
        process.kill()
        process.wait(60)


def stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def of_this_suite(name: str) -> str:
    """A mark that the tests of another checkout, at the same time, do not have."""
    return f"{name}-{os.getpid()}"


@pytest.fixture
def number():
    """Gives this process a mark, and takes it away again."""
    before = []
    yield lambda session, worker="": before.append(supervisor.mark_this_process(session, worker))
    supervisor.remark_this_process(before[0])


def test_states_of_a_process(start):
    process = start()
    started = supervisor.start_time(process.pid)
    assert supervisor.process_state(process.pid, started) == "running"
    assert supervisor.process_state(process.pid, started + 1) == "gone"  # the pid is used again by another
    stop(process)
    assert supervisor.process_state(process.pid, started) == "stopped"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert supervisor.process_state(process.pid, started) == "gone"  # though nobody has collected it yet
    process.wait(60)
    assert supervisor.process_state(process.pid) == "gone"
    assert supervisor.start_time(process.pid) is None


def test_a_session_is_found_by_its_environment_also_inside_another(start):
    outer, inner = of_this_suite("outer"), of_this_suite("inner")
    ours = start(env={supervisor.SESSION: f"{outer}/{inner}"})
    start(env={supervisor.SESSION: f"{outer}-1"})
    assert supervisor.marked(supervisor.SESSION, [inner]) == [ours.pid]
    assert supervisor.marked(supervisor.SESSION, [outer]) == [ours.pid]


def test_a_process_without_a_readable_environment_is_found_by_its_number(start, number):
    session = of_this_suite("some-session")
    number(session, f"{session}:rollout:0:0")
    ours = start(env={})
    number(session, f"{session}:rollout:1:0")
    other_worker = start(env={})
    number(of_this_suite("other-session"))
    other_session = start(env={})
    assert sorted(supervisor.marked(supervisor.SESSION, [session])) == sorted([ours.pid, other_worker.pid])
    assert supervisor.marked(supervisor.WORKER, [f"{session}:rollout:0:0"]) == [ours.pid]
    assert supervisor.end_marked(supervisor.WORKER, [f"{session}:rollout:0:0"]) == [ours.pid]
    assert ours.wait(60) == -signal.SIGKILL
    assert other_worker.poll() is None
    assert other_session.poll() is None


def test_stopped_processes_are_ended_too(start):
    session = of_this_suite("stopped-session")
    process = start(env={supervisor.SESSION: session})
    stop(process)
    assert supervisor.end_marked(supervisor.SESSION, [session]) == [process.pid]


def test_who_cleans_up_after_others_goes_last(start, monkeypatch):
    """Python's resource tracker removes the segments of processes that were killed, if it outlives them."""
    monkeypatch.setattr(supervisor, "_HELPERS_GRACE_S", 60.0)  # on a loaded machine it takes its time to start
    name, session = of_this_suite("hotseat-test"), of_this_suite("tracked")
    script = f"""
import time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory({name!r}, create=True, size=64)
print("made", flush=True)
time.sleep(600)
"""
    process = start(
        *(sys.executable, "-c", script), env={**os.environ, supervisor.SESSION: session}, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"made\n"
    supervisor.end_marked(supervisor.SESSION, [session], timeout_s=60)
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
        assert os.path.isdir(cluster._session.directory)
        assert cluster._session.guard.poll() is None
    assert not os.path.isdir(cluster._session.directory)
    assert cluster._session.guard.poll() == 0


def test_ports_are_free_and_given_once():
    ports = [free_port("127.0.0.1") for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(20000 <= port < 32000 for port in ports)
