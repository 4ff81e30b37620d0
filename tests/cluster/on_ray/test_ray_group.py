"""Groups on Ray: placement, calls, deadlines, deaths. One shared cluster with eight logical devices."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest
from cluster_workers import Busy, Closing, Plain, Waiting
from waiting import wait_until

from hotseat.cluster import Cluster, Holder, Leases, Process
from hotseat.errors import DeadlineError, PlacementError, RunError, WorkerError
from hotseat.processes.supervisor import SESSION, WORKER, marked, process_state
from hotseat.rlinf.queues import QueueDirectory

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@contextmanager
def within(seconds: float):
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def wait_until_gone(*pids: int, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and any(process_state(pid) != "gone" for pid in pids):
        time.sleep(0.05)
    assert [pid for pid in pids if process_state(pid) != "gone"] == []


@pytest.fixture(scope="module")
def pair(ray_cluster):
    """Two processes: the first has devices 0 and 1, the second shares device 1.

    Their variable is one that workers may set for themselves, so that both are forked off the template.
    """
    processes = [Process(0, 0, (1, 0)), Process(1, 0, (1,))]
    return ray_cluster.launch(
        "pair", Plain, args=(10,), processes=processes, num_threads=2, env={"NCCL_SOCKET_IFNAME": "seven"}
    )


@pytest.fixture(scope="module")
def one(ray_cluster):
    return ray_cluster.launch("single", Plain, args=(1,))


@pytest.fixture
def single(one):
    """One process, for a test that may end it."""
    if one.alive() == [False]:
        one.restart(0)
    return one


# --- starting ---------------------------------------------------------------------------------------------------------


class Stranger:
    def nothing(self) -> None:
        """No method of `Plain`."""


class MeetsAnother:
    """Is made once the other is being made too."""

    def __init__(self, mine: str, others: str):
        Path(mine).touch()
        wait_until(Path(others).exists)
        self.is_made = True

    def has_met(self) -> bool:
        return self.is_made


class Endless:
    def __init__(self):
        time.sleep(600)


class NeverStarts:
    def __init__(self):
        raise ValueError("no such model")


def test_groups_that_nobody_waits_for_start_together(ray_cluster, tmp_path):
    """If `launch` waited for the first, the second would never come."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    groups = [
        ray_cluster.launch("first", MeetsAnother, args=(first, second), wait=False),
        ray_cluster.launch("second", MeetsAnother, args=(second, first), wait=False),
    ]
    started: SimpleQueue[tuple[str, int]] = SimpleQueue()
    for group in groups:
        group.when_started(lambda rank, name=group.name: started.put((name, rank)))
    assert [group.call(MeetsAnother.has_met) for group in groups] == [[True], [True]]  # the first call waits
    assert {started.get(timeout=300) for _ in groups} == {("first", 0), ("second", 0)}
    groups[0].when_started(lambda rank: started.put(("again", rank)))
    assert started.get_nowait() == ("again", 0)
    assert [len(group.pids()) for group in groups] == [1, 1]
    for group in groups:
        group.close()


def test_what_fails_to_start_says_so_when_it_is_waited_for(ray_cluster):
    group = ray_cluster.launch("never", NeverStarts, wait=False)
    group.when_started(pytest.fail)
    with pytest.raises(WorkerError, match="never rank 0: '__init__' raised ValueError: no such model"):
        group.ready()
    group.close()
    endless = ray_cluster.launch("endless", Endless, wait=False)
    with within(60):
        endless.close()  # does not wait for the constructor


# --- where things run -------------------------------------------------------------------------------------------------


def test_the_inventory(ray_cluster):
    (node,) = ray_cluster.nodes
    assert (node.rank, node.num_devices, node.address) == (0, 8, "127.0.0.1")
    assert list(ray_cluster.devices_of(0)) == list(range(8))


def test_device_visibility_ranks_and_threads_follow_the_plan(pair):
    names = ["CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "NCCL_SOCKET_IFNAME"]
    assert pair.call(Plain.environment, *names) == [
        dict(zip(names, ["1,0", "0", "2", "0", "127.0.0.1", "seven"], strict=True)),
        dict(zip(names, ["1", "1", "2", "1", "127.0.0.1", "seven"], strict=True)),
    ]
    assert pair.within(240).call(Plain.threads) == [(2, "2")] * 2


def test_results_come_in_rank_order(pair):
    assert pair.call(Plain.rank) == [0, 1]
    assert pair.on(1, 0).call(Plain.rank) == [0, 1]
    assert pair.call(Plain.rank_sleeps, 0, 0.3) == [0, 1]
    assert pair.call(Plain.add, 1, twice=True) == [12, 12]
    assert pair.scatter(Plain.add, [1, 2]) == [11, 12]
    assert pair.pids() == pair.call(Plain.pid)
    assert pair.alive() == [True, True]


def test_torch_distributed_can_be_initialised(pair):
    assert pair.within(240).call(Plain.all_reduce, 2.0) == [6.0, 6.0]


def test_large_arrays_between_workers_lie_in_shared_memory(pair, single):
    """Written there once by the sender; neither the driver nor another process handles them."""
    [[there]] = pair.on(0).call(Plain.send_array, single, 1 << 20)
    assert "plasma" in there


def test_everything_listens_on_loopback(ray_cluster, pair):
    ours = {f"socket:[{inode}]" for pid in marked(SESSION, [ray_cluster.session]) for inode in _socket_inodes(pid)}
    open_to_all = [line for line in _listening() if f"socket:[{line['inode']}]" in ours and not line["loopback"]]
    assert open_to_all == []
    assert len(ours) > 0


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_exception_names_group_rank_and_method_with_the_remote_traceback(pair):
    with pytest.raises(WorkerError, match=r"pair rank 0: 'fail' raised ValueError: on purpose") as caught:
        pair.on(0).call(Plain.fail)
    assert "raise ValueError(text)" in str(caught.value)
    assert "worker_process.py" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert (caught.value.group, caught.value.rank, caught.value.method) == ("pair", 0, "fail")


def test_the_first_failure_is_raised_without_waiting_for_the_others(pair, tmp_path):
    with pytest.raises(WorkerError, match="pair rank 1: 'rank_fails' raised ValueError"):
        pair.within(60).call(Plain.rank_fails, 1, str(tmp_path / "end"))
    (tmp_path / "end").touch()
    pair.within(60).call(Plain.rank)  # leave the other rank time to finish


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Plain.fail_unpicklably, "raised Plain.fail_unpicklably.<locals>.Local"),
        (Plain.exit, "raised SystemExit: 3"),
        (Plain.lock, "cannot be sent: TypeError: cannot pickle '_thread.lock' object"),
        (Plain.count, "raised TypeError: 'count' returns a generator; return a list, or put the items into a channel"),
        (Stranger.nothing, "raised AttributeError: 'Plain' object has no attribute 'nothing'"),
    ],
)
def test_what_cannot_be_pickled_or_called_leaves_the_worker_alive(pair, method, message):
    with pytest.raises(WorkerError) as caught:
        pair.on(0).call(method)
    assert str(caught.value).startswith("pair rank 0: ")
    assert f"'{method.__name__}' {message}" in str(caught.value)
    assert pair.call(Plain.add, 1) == [11, 11]


def test_a_deadline_names_group_rank_method_seconds_and_process(pair, tmp_path):
    pending = pair.start(Plain.wait_for_file, str(tmp_path / "begun"), str(tmp_path / "end"), rank=1)
    wait_until(pending.futures[0].done)
    with within(60), pytest.raises(DeadlineError) as caught:
        pending.result(0.5)
    (tmp_path / "end").touch()
    text = str(caught.value)
    assert "pair rank 1: no answer to 'wait_for_file' in 0.5 s (1 of 2 ranks answered; missing: rank 1 (pid " in text
    assert "is running" in text
    pair.within(60).call(Plain.rank)


def test_a_stopped_process_is_seen_as_such_and_can_be_replaced(single):
    (pid,) = single.pids()
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: process_state(pid) == "stopped")
    with pytest.raises(DeadlineError, match=rf"\(pid {pid} on .*\) is stopped"):
        single.within(0.5).call(Plain.add, 1)
    assert single.alive() == [True]
    single.restart(0)
    assert single.call(Plain.add, 1) == [2]
    assert process_state(pid) == "gone"


def test_a_killed_process_wakes_everybody_who_waits_for_it(ray_cluster, pair, single):
    """The call, the other end of its channel, who wants its device; and its children go with it."""
    (holder,) = single.holders()
    leases = Leases(is_gone=ray_cluster.is_gone)
    leases.acquire("rollout", {holder: [0]}, timeout_s=5)
    channel = QueueDirectory.of_node(ray_cluster, None, 600.0).open("numbers", 16)
    single.call(Plain.produce, channel, 3)
    assert [channel.get() for _ in range(3)] == [0, 1, 2]
    (child,) = single.call(Plain.spawn_child)
    getting = pair.on(0).start(Plain.get, channel, 300.0)
    sleeping = single.start(Plain.sleep, 300)
    time.sleep(0.3)
    with pytest.raises(DeadlineError, match=rf"held by single\[0\] \(pid {holder.pid}\) for phase 'rollout'"):
        leases.acquire("update", {Holder("actor", 0): [0]}, timeout_s=0.2)
    os.kill(holder.pid, signal.SIGKILL)
    with within(100):
        with pytest.raises(WorkerError, match=rf"single rank 0: its process \(pid {holder.pid}\) died during 'sleep'"):
            sleeping.result(100)
        with pytest.raises(WorkerError, match=r"its producer single\[0\] \(pid \d+\) went away without closing it"):
            getting.result(100)
        leases.acquire("update", {Holder("actor", 0): [0]}, timeout_s=100)
    assert leases._devices[0].holders == (Holder("actor", 0),)
    assert single.alive() == [False]
    wait_until_gone(child)
    with pytest.raises(WorkerError, match="single rank 0: its process"):
        single.call(Plain.add, 1)


def test_a_process_that_ends_itself_is_quoted(single):
    with pytest.raises(WorkerError) as caught:
        single.call(Plain.fail_at_length)
    assert len(str(caught.value)) < 100_000
    with pytest.raises(WorkerError, match=r"(?s)its process \(pid \d+\) died during 'die'.*last words"):
        single.call(Plain.die)


def test_a_rank_can_be_restarted_in_the_middle_of_a_call(single):
    pending = single.start(Plain.sleep, 300)
    single.restart(0)
    with pytest.raises(WorkerError, match="single rank 0: 'sleep' was under way when the rank was restarted"):
        pending.result(60)
    assert single.call(Plain.add, 1) == [2]


def test_all_ranks_are_restarted_together_and_meet_at_a_new_address(ray_cluster):
    group = ray_cluster.launch("whole", Plain, args=(1,), processes=2)
    before = [each["MASTER_PORT"] for each in group.call(Plain.environment, "MASTER_PORT")], group.pids()
    assert before[0][0] == before[0][1]
    pending = group.on(1).start(Plain.sleep, 300)
    group.restart_all()
    with pytest.raises(WorkerError, match="whole rank 1: 'sleep' was under way when the rank was restarted"):
        pending.result(60)
    after = [each["MASTER_PORT"] for each in group.call(Plain.environment, "MASTER_PORT")], group.pids()
    assert after[0][0] == after[0][1] != before[0][0]
    assert not set(before[1]) & set(after[1])
    assert group.states() == ["running", "running"]
    group.close()


def test_a_constructor_that_fails_on_one_rank_ends_the_group(ray_cluster):
    with pytest.raises(WorkerError, match="broken rank 1: '__init__' raised RuntimeError: cannot be made"):
        ray_cluster.launch("broken", Plain, args=(-1,), processes=2)
    ours = [environment_of(pid) for pid in marked(SESSION, [ray_cluster.session])]
    assert [environment for environment in ours if f"{WORKER}={ray_cluster.session}:broken" in environment] == []


def environment_of(pid: int) -> str:
    """Empty, if it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""


class Dying:
    def __init__(self, text: str):
        print(text, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_in_its_constructor_is_quoted(ray_cluster):
    with pytest.raises(WorkerError, match=r"(?s)dying rank 0: its process \(pid \d+\) died during '__init__'.*last"):
        ray_cluster.launch("dying", Dying, args=("last words",))


def test_devices_that_were_not_reserved_are_refused(ray_cluster, pair):
    with pytest.raises(PlacementError, match="reserved once"):
        ray_cluster.reserve([Process(0, 0, (0,))])
    with pytest.raises(PlacementError, match="is given devices \\[8\\], but node 0 has devices 0 to 7"):
        ray_cluster.launch("far", Plain, processes=[Process(0, 0, (8,))])


# --- calling ----------------------------------------------------------------------------------------------------------


def test_health_is_answered_during_a_long_call(ray_cluster, tmp_path):
    class Local(Busy):
        """Of this function only, so it has to travel by value."""

    group = ray_cluster.launch("busy", Local)
    pending = group.start(Busy.work_until, str(tmp_path / "end"))
    wait_until(lambda: group.within(60).call(Busy.health) == [True])
    assert not pending.done()
    (tmp_path / "end").touch()
    assert pending.result(60) == ["done"]


def test_coroutine_methods_and_awaiting(ray_cluster):
    group = ray_cluster.launch("waiting", Waiting)

    async def many() -> list:
        return await asyncio.gather(*(group.acall(Waiting.meet, value, 30) for value in range(30)))

    assert [value for (value,) in asyncio.run(many())] == list(range(30))
    assert group.call(Waiting.peak) == [30]
    with pytest.raises(WorkerError, match="waiting rank 0: 'fail' raised KeyError"):
        asyncio.run(group.acall(Waiting.fail))

    async def late() -> None:
        await group.within(0.3).acall(Waiting.sleep, 600)

    with pytest.raises(DeadlineError, match=r"waiting rank 0: no answer to 'sleep' in 0\.3 s"):
        asyncio.run(late())


def test_large_results_come_back_or_stay_where_they_are(pair):
    assert [len(result) for result in pair.on(0).within(60).call(Plain.make, 100 << 20)] == [100 << 20]
    kept = pair.within(60).call_and_keep(Plain.make, 50 << 20)
    assert pair.within(60).call(Plain.sizes, kept) == [[50 << 20] * 2] * 2
    with pytest.raises(WorkerError, match=r"pair rank \d: 'fail' raised ValueError"):
        pair.within(100).call_and_keep(Plain.fail)


def test_a_group_can_be_called_from_another_worker(pair, single):
    assert single.call(Plain.call_other, pair, Plain.add, 5) == [[15, 15]]
    with pytest.raises(
        WorkerError, match=r"single rank 0: 'call_other' raised WorkerError: pair rank \d: 'fail' raised"
    ):
        single.call(Plain.call_other, pair, Plain.fail)
    with pytest.raises(WorkerError, match="only the process that launched the group can close it"):
        single.call(Plain.close_other, pair)


def test_actors_that_a_worker_starts_go_with_it(ray_cluster):
    group = ray_cluster.launch("nest", Plain)
    (nested,) = group.within(90).call(Plain.nest_actor)
    assert process_state(nested) == "running"
    group.close()
    wait_until_gone(nested)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_closing_asks_first_and_wakes_who_waits(ray_cluster, tmp_path):
    group = ray_cluster.launch("closing", Closing, args=(str(tmp_path / "log"),))
    group.close(grace_s=60)
    assert (tmp_path / "log").read_text() == "closed\n"
    with pytest.raises(WorkerError, match="the group is closed"):
        group.call(Closing.close)
    with pytest.raises(WorkerError, match="closing rank 0: cannot be restarted: the group is closed"):
        group.restart(0)

    group = ray_cluster.launch("asleep", Plain)
    (pid,) = group.pids()
    pending = group.start(Plain.sleep, 600)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            pending.result(500)
        except Exception as error:
            errors.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    time.sleep(0.3)
    with within(60):
        group.close()
        waiter.join(60)
    assert "asleep rank 0: 'sleep' was under way when the group was closed" in str(errors[0])
    wait_until_gone(pid)


# --- queues between workers -------------------------------------------------------------------------------------------


def test_items_go_from_one_worker_to_another(ray_cluster, pair):
    channel = QueueDirectory.of_node(ray_cluster, None, 600.0).open("numbers", 16)
    producing = pair.on(0).start(Plain.produce, channel, 500)
    assert pair.on(1).within(60).call(Plain.consume, channel, 500) == [list(range(500))]
    assert producing.result(60) == [500]


# --- a second cluster in the same process -----------------------------------------------------------------------------


def test_a_cluster_inside_a_cluster_shares_ray_and_leaves_it_running(ray_cluster, pair):
    with Cluster() as inner:
        assert [node.num_devices for node in inner.nodes] == [8]
        taken = r"could not reserve node 0: 1 devices in 0 s: Ray has 0 devices free; wait for other jobs"
        with pytest.raises(PlacementError, match=taken):
            inner.reserve([Process(0, 0, (3,))], timeout_s=0.3)
        inner.reserve([Process(0)])
        with pytest.raises(
            PlacementError, match=r"far rank 0 is placed on node 0, devices \[3\], of which \[3\] was not"
        ):
            inner.launch("far", Plain, processes=[Process(0, 0, (3,))])
        assert inner.launch("inner", Plain).call(Plain.add, 2) == [2]
        with pytest.raises(PlacementError, match="leave num_devices out"):
            Cluster(num_devices=2)
    with pytest.raises(RunError, match="the cluster is closed"):
        inner.launch("late", Plain)
    assert pair.call(Plain.add, 3) == [13, 13]


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        pass
    return inodes


def _listening() -> list[dict]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] != "0A":
                    continue
                raw = bytes.fromhex(fields[1].split(":")[0])
                if len(raw) == 4:
                    address = socket.inet_ntop(socket.AF_INET, raw[::-1])
                else:
                    words = b"".join(raw[at : at + 4][::-1] for at in range(0, 16, 4))
                    address = socket.inet_ntop(socket.AF_INET6, words)
                loopback = address.startswith(("127.", "::ffff:127.")) or address == "::1"
                found.append({"inode": fields[9], "address": address, "loopback": loopback})
    return found


@pytest.mark.long
def test_openmp_threads_of_workers_wait_asleep_unless_the_user_says_otherwise(ray_cluster, monkeypatch):
    name = "OMP_WAIT_POLICY"
    monkeypatch.delenv(name, raising=False)
    assert ray_cluster.launch("asleep", Plain).call(Plain.environment, name) == [{name: "PASSIVE"}]
    monkeypatch.setenv(name, "ACTIVE")
    assert ray_cluster.launch("as_said", Plain).call(Plain.environment, name) == [{name: "ACTIVE"}]
