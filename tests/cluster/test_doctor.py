"""The hang doctor: who is blamed, and the watch that ends what is silent and spares what is slow."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import closing

import pytest
from cluster_workers import Plain
from waiting import wait_until

from hotseat.cluster import sighting
from hotseat.cluster.activity import DIRECTORY, Activity, Operation, read_activity
from hotseat.cluster.doctor import MOST_OFTEN, ProcessReport, Watch, _blame, awaited_in, examine, is_hang
from hotseat.cluster.sighting import stack_of
from hotseat.errors import DeadlineError, WorkerError

PYTHON = sys.executable
COLLECTIVE = "all_reduce (torch/distributed/distributed_c10d.py:3)"


def report(name: str, state: str = "running", whom: tuple[str, ...] = (), stack: str = "") -> ProcessReport:
    doing = (Operation("'update'", whom, time.time() - 5),)
    return ProcessReport(name, 7, state, doing, stack)


def test_one_that_is_gone_or_stopped_is_to_blame():
    healthy = [report("actor rank 0"), report("rollout rank 0")]
    assert _blame([*healthy, report("actor rank 1", "stopped")], ["actor rank 0"]).startswith("actor rank 1 (pid 7)")
    blamed = _blame([*healthy, report("actor rank 1", "stopped"), report("rollout rank 1", "gone")], [])
    assert blamed == "rollout rank 1 (pid 7), which is gone"


def test_blame_follows_the_waits_to_their_end():
    processes = [
        report("agents rank 0", whom=("rollout rank 1",)),
        report("rollout rank 0"),
        report("rollout rank 1"),
    ]
    assert _blame(processes, ["agents rank 0"]).startswith(
        "rollout rank 1 (pid 7), which waits for nobody ('update', for"
    )


def test_the_rank_that_is_not_in_the_collective_holds_up_the_others():
    processes = [
        report("actor rank 0", stack=COLLECTIVE),
        report("actor rank 1", stack="sleep (user.py:4)"),
        report("actor rank 2", stack=COLLECTIVE),
    ]
    assert _blame(processes, ["actor rank 0", "actor rank 2"]).startswith("actor rank 1")


def test_a_circle_is_named_whole():
    processes = [report("a rank 0", whom=("b rank 0",)), report("b rank 0", whom=("a rank 0",))]
    assert _blame(processes, ["a rank 0"]) == "a rank 0 and b rank 0, which wait for each other"


def test_where_nobody_says_anything_nobody_is_accused():
    assert _blame([report("a rank 0")], []).startswith("unknown: every process is alive")


def test_the_innermost_wait_counts():
    inner = DeadlineError("rollout rank 3: no answer to 'fetch'")
    inner.awaited = ("rollout rank 3",)
    outer = WorkerError("agents rank 0: 'collect' raised DeadlineError")
    outer.__cause__ = inner
    assert is_hang(outer)
    assert awaited_in(outer) == ["rollout rank 3"]
    assert not is_hang(WorkerError("actor rank 0: it raised ValueError"))


def test_activity_can_be_read_while_the_process_is_in_it(tmp_path):
    mine = Activity()
    mine.keep_in(str(tmp_path), "actor-0")
    with mine.doing("'update'"), mine.doing("waits for rollout rank 0 to answer 'health'", ["rollout rank 0"]):
        told = read_activity(str(tmp_path), "actor-0")
        assert [doing.what for doing in told] == ["'update'", "waits for rollout rank 0 to answer 'health'"]
        assert told[1].whom == ("rollout rank 0",)
    assert read_activity(str(tmp_path), "actor-0") == []
    assert read_activity(str(tmp_path), "nobody") == []


class FakeGroup:
    """A group of one, with a state that the test sets."""

    size = 1

    def __init__(self, name: str):
        self.name, self.state, self.ended = name, "running", threading.Event()
        self.num_pings = 0

    def states(self):
        if self.state == "broken":
            raise RuntimeError("nobody knows")
        return [self.state]

    def known_pids(self):
        return [7]

    def ping(self, rank):
        self.num_pings += 1
        answer = Future()
        answer.set_result("fine")
        return answer

    def end(self, rank, reason, *, pid):
        assert pid == 7
        self.ended.set()


def test_trouble_with_one_group_does_not_leave_the_others_alone(capsys):
    broken, stopped = FakeGroup("broken"), FakeGroup("stopped")
    broken.state, stopped.state = "broken", "stopped"

    def on_silence(*_):
        raise OSError("the disk is full")

    watch = Watch({"a": broken, "b": stopped}, limit_s=0.2, on_silence=on_silence)
    assert stopped.ended.wait(60)  # although it could not be told
    watch.close()
    errors = capsys.readouterr().err
    assert errors.count("broken cannot be watched: RuntimeError: nobody knows") == 1


def test_a_group_of_many_is_looked_at_once_in_the_limit():
    few, many = FakeGroup("few"), FakeGroup("many")
    few.size, many.size = MOST_OFTEN, MOST_OFTEN + 1
    with closing(Watch({}, limit_s=10.0, on_silence=lambda *_: None)) as watch:
        times = range(100, 125)
        assert [now for now in times if watch.is_due(few, now)] == list(times)
        assert [now for now in times if watch.is_due(many, now)] == [100, 110, 120]


def test_one_of_many_that_is_stopped_is_ended():
    stopped = FakeGroup("stopped")
    stopped.state, stopped.size = "stopped", MOST_OFTEN + 1
    with closing(Watch({"stopped": stopped}, limit_s=0.5, on_silence=lambda *_: None)):
        assert stopped.ended.wait(60)


def test_one_of_many_that_does_not_answer_a_ping_is_ended():
    silent = FakeGroup("silent")
    silent.size, silent.ping = MOST_OFTEN + 1, lambda rank: Future()
    with closing(Watch({"silent": silent}, pinged=["silent"], limit_s=0.5, on_silence=lambda *_: None)):
        assert silent.ended.wait(60)


def test_one_that_answers_pings_is_left_alone():
    fine = FakeGroup("fine")
    with closing(Watch({"fine": fine}, pinged=["fine"], limit_s=0.2, on_silence=lambda *_: None)):
        wait_until(lambda: fine.num_pings > 8)  # four within the limit
    assert not fine.ended.is_set()


SLEEPS = """
import sys, time
from hotseat.cluster.activity import show_stacks_on_signal

def deep():
    print("ready", flush=True)
    time.sleep(600)

show_stacks_on_signal(sys.argv[1])
deep()
"""


def test_without_a_tool_a_process_shows_its_own_stack(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    monkeypatch.setattr(sighting.shutil, "which", lambda name: None)
    monkeypatch.setattr(sighting.sys, "executable", str(tmp_path / "python"))  # beside which there is none
    process = subprocess.Popen([PYTHON, "-c", SLEEPS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):  # a second look shows nothing of the first
            stack = stack_of(process.pid, str(tmp_path))
            assert stack.count("in deep") == 1
            assert stack.rstrip().endswith("in <module>")
    finally:
        process.kill()
        process.wait()


# --- with processes ---------------------------------------------------------------------------------------------------


class Slow(Plain):
    """Takes its time to start, and answers pings."""

    max_concurrency = 4

    def __init__(self, seconds: float):
        super().__init__()
        self.num_pings = 0
        time.sleep(seconds)

    def health(self) -> str:
        self.num_pings += 1
        return "fine"

    def pings(self) -> int:
        return self.num_pings


@pytest.fixture
def slow(ray_cluster):
    group = ray_cluster.launch("slow", Slow, args=(4.0,), wait=False)
    yield group
    group.close(grace_s=0)


@pytest.mark.ray
@pytest.mark.slow
def test_a_slow_start_is_not_silence_and_a_stop_is(slow):
    """Scenarios 3 and 7: twice the limit to start is spared; stopped for longer than it is ended, with its reason."""
    told = []

    def watch(**options) -> closing:
        return closing(Watch({"slow": slow}, on_silence=lambda group, rank, why: told.append((rank, why)), **options))

    with watch(limit_s=2.0, pinged=["slow"]):
        slow.ready()
    with watch(limit_s=60.0, pinged=["slow"]):  # a loaded machine may hold an answer up for longer than 2 s
        assert slow.call(Plain.add, 1) == [1]
        [before] = slow.call(Slow.pings)
        wait_until(lambda: slow.call(Slow.pings)[0] > before + 1)  # the next comes when the last was answered
    assert told == []
    with watch(limit_s=2.0):
        waiting = slow.start(Plain.sleep, 600)
        [pid] = slow.pids()
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=rf"\(pid {pid}\) was ended during 'sleep': it was stopped for 2 s"):
            waiting.result(120)
        assert time.monotonic() - started < 100
        assert told == [(0, "it was stopped for 2 s")]
        slow.restart(0)
        assert slow.call(Plain.add, 2) == [2]
        slow.end(0, "too late", pid=pid)  # that one is gone already, and its successor is not meant
        assert slow.call(Plain.add, 3) == [3]


@pytest.mark.ray
@pytest.mark.slow
def test_one_that_leaves_pings_unanswered_is_ended(ray_cluster):
    class Deaf(Slow):
        def health(self) -> str:
            time.sleep(600)
            return "too late"

    group = ray_cluster.launch("deaf", Deaf, args=(0.0,))
    waiting = group.start(Plain.sleep, 600)
    told = []
    watch = Watch({"deaf": group}, pinged=["deaf"], limit_s=2.0, on_silence=lambda *what: told.append(what))
    try:
        with pytest.raises(WorkerError, match="was ended during 'sleep': it did not answer for 2 s"):
            waiting.result(120)
        assert [why for _, _, why in told] == ["it did not answer for 2 s"]
    finally:
        watch.close()
        group.close(grace_s=0)


@pytest.mark.ray
@pytest.mark.slow
def test_examine_shows_what_everybody_is_doing_and_where(ray_cluster, tmp_path):
    group = ray_cluster.launch("sleepers", Plain, processes=2)
    try:
        begun = tmp_path / "begun"
        pending = group.start(Plain.wait_for_file, str(begun), str(tmp_path / "never"), rank=1)
        wait_until(lambda: begun.exists() and pending.futures[0].done())
        with pytest.raises(DeadlineError) as caught:
            pending.result(0.5)
        found = examine([group], caught.value)
        assert found.culprit.startswith("sleepers rank 1 (pid ")
        assert "'wait_for_file', for" in found.summary()
        assert "wait_for_file" in next(each for each in found.processes if each.name == "sleepers rank 1").stack
        assert "driver" in found.text()
    finally:
        group.close(grace_s=0)
