"""The local runtime: the same calls, in this process."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback

import pytest
import torch
from cluster_workers import Busy, Closing, Plain, Waiting
from waiting import wait_until

from hotseat.cluster import Cluster, Process, reports_death
from hotseat.cluster.local import LocalRuntime
from hotseat.errors import DeadlineError, PlacementError, RunError, UserError, WorkerError


@pytest.fixture
def cluster():
    with Cluster("local", num_devices=4) as made:
        yield made


def test_results_come_in_rank_order(cluster):
    group = cluster.launch("plain", Plain, per_rank=[{"base": 10}, {"base": 20}, {"base": 30}], processes=3)
    assert group.size == 3
    assert group.call(Plain.add, 1) == [11, 21, 31]
    assert group.on(2, 0).call(Plain.add, 1, twice=True) == [12, 32]
    assert group.scatter(Plain.add, [1, 2, 3]) == [11, 22, 33]
    assert group.alive() == [True, True, True]
    assert group.pids() == [os.getpid()] * 3


@pytest.mark.parametrize(("timeout_s", "start_s"), [(1800.0, 1800.0), (8.0, 300.0), (None, 600.0)])
def test_a_start_may_take_as_long_as_a_call_and_some_minutes_in_any_case(cluster, monkeypatch, timeout_s, start_s):
    """A model of some size takes longer than minutes to load; a short limit of calls must not end starts."""
    launched, launch = [], LocalRuntime.launch

    def launch_and_keep(runtime, each):
        launched.append(each)
        return launch(runtime, each)

    monkeypatch.setattr(LocalRuntime, "launch", launch_and_keep)
    cluster.launch("plain", Plain, kwargs={"base": 1}, timeout_s=timeout_s)
    assert [each.start_timeout_s for each in launched] == [start_s]


def test_ranks_know_themselves_when_they_are_made(cluster):
    class Who:
        def __init__(self):
            self.rank, self.size = os.environ["RANK"], os.environ["WORLD_SIZE"]

        def who(self):
            return self.rank, self.size

    assert cluster.launch("who", Who, processes=2).call(Who.who) == [("0", "2"), ("1", "2")]
    assert "RANK" not in os.environ


def test_an_exception_names_group_rank_and_method_and_keeps_its_frames(cluster):
    group = cluster.launch("plain", Plain)
    with pytest.raises(WorkerError, match="plain rank 0: 'fail' raised ValueError: on purpose") as caught:
        group.call(Plain.fail)
    assert isinstance(caught.value.__cause__, ValueError)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert frames[-1].f_locals["self"].detail == "seen in the frame"  # where a post-mortem would stand
    assert (caught.value.group, caught.value.rank, caught.value.method) == ("plain", 0, "fail")


def test_a_single_rank_works_in_the_calling_thread(cluster):
    import threading

    class Here:
        def where(self):
            return threading.current_thread()

    assert cluster.launch("here", Here).call(Here.where) == [threading.current_thread()]


def test_the_first_failure_is_raised_without_waiting_for_the_others(cluster):
    end, ended = threading.Event(), threading.Event()

    class OneFails:
        def __init__(self, rank):
            self.rank = rank

        def work(self):
            if self.rank == 1:
                raise ValueError("one rank only")
            end.wait(300)
            ended.set()

    group = cluster.launch("some", OneFails, per_rank=[{"rank": 0}, {"rank": 1}], processes=2)
    with pytest.raises(WorkerError, match="some rank 1"):
        group.call(OneFails.work)
    assert not ended.is_set()
    end.set()


def test_a_deadline_names_group_rank_method_and_seconds(cluster, tmp_path):
    pending = cluster.launch("slow", Plain).start(Plain.wait_for_file, str(tmp_path / "begun"), str(tmp_path / "end"))
    late = r"slow rank 0: no answer to 'wait_for_file' in 0\.2 s \(0 of 1 ranks answered"
    with pytest.raises(DeadlineError, match=late):
        pending.result(0.2)
    (tmp_path / "end").touch()
    pending.result(60)


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_every_call_has_a_deadline(cluster, timeout_s):
    with pytest.raises(ValueError, match="every call has a deadline"):
        cluster.launch("plain", Plain).within(timeout_s).call(Plain.add, 1)


def test_calls_that_were_started_run_meanwhile(cluster, tmp_path):
    group = cluster.launch("busy", Busy)
    pending = group.start(Busy.work_until, str(tmp_path / "end"))
    wait_until(lambda: group.call(Busy.health) == [True])
    assert not pending.done()
    (tmp_path / "end").touch()
    assert pending.result(60) == ["done"]
    assert pending.done()


def test_one_call_at_a_time_unless_the_class_asks_for_more(cluster, tmp_path):
    group = cluster.launch("plain", Plain)
    pending = group.start(Plain.wait_for_file, str(tmp_path / "begun"), str(tmp_path / "end"))
    wait_until((tmp_path / "begun").exists)
    with pytest.raises(DeadlineError, match=r"'add' waited 0\.1 s for another call to end"):
        group.within(0.1).call(Plain.add, 1)
    (tmp_path / "end").touch()
    pending.result(60)


def test_coroutine_methods_share_one_loop(cluster):
    group = cluster.launch("waiting", Waiting)
    pending = [group.start(Waiting.meet, value, 20) for value in range(20)]
    assert [p.result(60)[0] for p in pending] == list(range(20))
    assert group.call(Waiting.peak) == [20]
    with pytest.raises(WorkerError, match="raised KeyError"):
        group.call(Waiting.fail)


def test_groups_can_be_awaited(cluster, tmp_path):
    group = cluster.launch("busy", Busy, processes=2)

    async def both() -> list:
        return await asyncio.gather(group.acall(Busy.work, 0.2), group.on(0).acall(Busy.work, 0.2))

    assert asyncio.run(both()) == [["done", "done"], ["done"]]

    async def late() -> None:
        await group.within(0.1).acall(Busy.work_until, str(tmp_path / "end"))

    with pytest.raises(DeadlineError, match="busy rank 0: no answer to 'work_until'"):
        asyncio.run(late())
    (tmp_path / "end").touch()


def test_kept_results_are_passed_on_by_reference(cluster):
    group = cluster.launch("plain", Plain, processes=2)
    kept = group.call_and_keep(Plain.make, 1000)
    assert len(kept[0].get()) == 1000
    assert group.call(Plain.size, kept[1]) == [1000, 1000]
    assert group.on(0).call(Plain.sizes, kept) == [[1000, 1000]]


def test_the_number_of_threads_is_set_not_inherited(cluster):
    before = torch.get_num_threads()
    group = cluster.launch("plain", Plain, num_threads=3)
    assert group.call(Plain.threads)[0][0] == 3
    assert group.start(Plain.threads).result(60)[0][0] == 3
    assert torch.get_num_threads() == before


def test_a_group_can_be_restarted_and_closed(cluster, tmp_path):
    group = cluster.launch("closing", Closing, args=(str(tmp_path / "log"),))
    group.restart(0)
    group.close()
    assert (tmp_path / "log").read_text() == "closed\n"
    with pytest.raises(WorkerError, match="closing rank 0: 'close' was called, but the group is closed"):
        group.call(Closing.close)
    cluster.launch("closing", Plain)  # the name is free again


def test_a_replacement_gets_none_of_the_calls_made_before_it(cluster, monkeypatch):
    """A call may be made long before its thread runs: on Ray, too, it belongs to the process that it was made to."""
    group = cluster.launch("plain", Plain)
    later, run = threading.Event(), group._run

    def delayed(*args, **kwargs):
        assert later.wait(60)
        return run(*args, **kwargs)

    monkeypatch.setattr(group, "_run", delayed)
    late = group.start(Plain.add, 1)
    group.restart(0)
    later.set()
    with pytest.raises(WorkerError, match="plain rank 0: 'add' was under way when the rank was restarted") as raised:
        late.result(60)
    assert reports_death(raised.value)
    assert group.call(Plain.add, 1) == [1]


def test_a_coroutine_that_ends_after_the_restart_fails_too(cluster):
    group = cluster.launch("waiting", Waiting)
    late, replaced = group.start(Waiting.meet, 1, 2), group._objects[0]
    wait_until(lambda: replaced.num_running == 1)
    group.restart(0)
    group._loop.submit(replaced.meet(2, 2)).result(60)
    with pytest.raises(WorkerError, match="waiting rank 0: 'meet' was under way when the rank was restarted"):
        late.result(60)


def test_environments_that_differ_cannot_share_a_process(cluster):
    cluster.launch("one", Plain, env={"HOTSEAT_TEST_VALUE": "1"})
    two = cluster.launch("two", Plain, env={"HOTSEAT_TEST_VALUE": "1"})
    assert two.call(Plain.environment, "HOTSEAT_TEST_VALUE") == [{"HOTSEAT_TEST_VALUE": "1"}]
    with pytest.raises(UserError, match="three sets HOTSEAT_TEST_VALUE=2, another group HOTSEAT_TEST_VALUE=1"):
        cluster.launch("three", Plain, env={"HOTSEAT_TEST_VALUE": "2"})
    cluster.close()
    assert "HOTSEAT_TEST_VALUE" not in os.environ


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([], "ranks are \\[\\]"),
        ([Process(1)], "ranks are \\[1\\]; they have to run from 0 without a gap"),
        ([Process(0, 3)], "rank 0 is placed on node 3; the cluster has nodes 0 to 0"),
        ([Process(0, 0, (9,))], "is given devices \\[9\\], but node 0 has devices 0 to 3"),
    ],
)
def test_places_that_do_not_exist_are_refused(cluster, processes, message):
    with pytest.raises(PlacementError, match=message):
        cluster.launch("plain", Plain, processes=processes)


def test_what_else_is_refused(cluster):
    group = cluster.launch("plain", Plain, processes=2)
    with pytest.raises(PlacementError, match="there is a group 'plain' already"):
        cluster.launch("plain", Plain)
    with pytest.raises(PlacementError, match="per_rank has 1 entries for 2 processes"):
        cluster.launch("other", Plain, processes=2, per_rank=[{}])
    with pytest.raises(ValueError, match="ranks \\[2\\] are not different ranks from 0 to 1"):
        group.on(2).call(Plain.add, 1)
    with pytest.raises(ValueError, match="3 values to scatter over 2 ranks"):
        group.scatter(Plain.add, [1, 2, 3])
    with pytest.raises(UserError, match="no runtime 'cloud': choose one of ray, local"):
        Cluster("cloud")
    with pytest.raises(PlacementError, match="no process to reserve"):
        cluster.reserve([])
    cluster.reserve([Process(0, 0, (1,))])
    with pytest.raises(PlacementError, match="reserved once"):
        cluster.reserve([Process(0, 0, (1,))])
    cluster.close()
    with pytest.raises(RunError, match="the cluster is closed"):
        cluster.launch("late", Plain)


def test_nodes_that_carry_an_environment_set_it(cluster):
    class PlannedNode:
        rank, num_devices, env = 0, 4, (("HOTSEAT_TEST_NODE", "north"),)

    cluster.reserve([Process(0)], nodes=[PlannedNode()])
    group = cluster.launch("plain", Plain)
    assert group.call(Plain.environment, "HOTSEAT_TEST_NODE") == [{"HOTSEAT_TEST_NODE": "north"}]


def test_a_generator_is_refused(cluster):
    with pytest.raises(WorkerError, match="'count' returns a generator; return a list"):
        cluster.launch("plain", Plain).call(Plain.count)


def test_a_failing_constructor_names_its_rank(cluster):
    with pytest.raises(WorkerError, match="plain rank 1: '__init__' raised RuntimeError: cannot be made"):
        cluster.launch("plain", Plain, args=(-1,), processes=2)


def test_calls_that_were_started_share_threads_which_end_with_the_group(cluster):
    class Where:
        def thread(self):
            return threading.current_thread()

    group = cluster.launch("where", Where, processes=2)
    threads = []
    while len(threads) == len(set(threads)):  # one is idle again a moment after its result is there
        threads += group.start(Where.thread).result(60)
    assert all(thread.daemon for thread in threads)
    group.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
