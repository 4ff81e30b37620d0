"""Groups that are called through relays behave as groups that are not, on Ray: three relays for five ranks."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest
from cluster_workers import Busy, Plain
from waiting import wait_until

from hotseat.cluster import reports_death
from hotseat.cluster.on_ray import relays
from hotseat.errors import DeadlineError, WorkerError
from hotseat.processes.supervisor import process_state

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def few_ranks_per_relay():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relays, "RANKS_PER_RELAY", 2)
        yield


@pytest.fixture(scope="module")
def five(ray_cluster, few_ranks_per_relay):
    return ray_cluster.launch("five", Plain, args=(10,), processes=5)


def test_results_come_in_rank_order(five):
    assert five.relay_group.size == 3
    assert five.call(Plain.rank) == [0, 1, 2, 3, 4]
    assert five.on(3, 1).call(Plain.rank) == [1, 3]
    assert five.scatter(Plain.add, [1, 2, 3, 4, 5], twice=True) == [12, 14, 16, 18, 20]


def test_kept_results_stay_and_arrive_elsewhere(five):
    kept = five.call_and_keep(Plain.make, 1_000_000)
    assert [ref.get() for ref in kept] == [bytes(1_000_000)] * 5
    assert five.scatter(Plain.size, [ref.as_argument() for ref in kept]) == [1_000_000] * 5
    [[one, two]] = five.on(4).start_and_keep_each(Plain.environment_values, 2).result()
    assert (one.get(), two.get()) == ("RANK", "4")


def test_calls_of_a_rank_keep_their_order(five):
    started = [five.start(Plain.note, index) for index in range(20)]
    for each in started:
        each.result()
    assert five.call(Plain.noted) == [list(range(20))] * 5


def test_an_exception_names_group_rank_and_method(five, tmp_path):
    end = tmp_path / "end"
    with pytest.raises(WorkerError, match=r"five rank 3: 'rank_fails' raised ValueError: one rank only") as failed:
        five.within(600).call(Plain.rank_fails, 3, str(end))
    assert (failed.value.rank, failed.value.method) == (3, "rank_fails")
    end.touch()  # for the others, which come to their end
    assert five.call(Plain.rank) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("method", [Plain.lock, Plain.fail_unpicklably, Plain.exit])
def test_what_cannot_come_back_is_an_error_and_no_death(five, method):
    with pytest.raises(WorkerError, match=f"five rank 2: .*{method.__name__}"):
        five.on(2).call(method)
    assert five.call(Plain.rank) == [0, 1, 2, 3, 4]


def test_what_cannot_be_sent_does_not_hold_up_the_next_call(five):
    with pytest.raises(TypeError, match="lock"):
        five.call(Plain.size, threading.Lock())
    assert five.call(Plain.rank) == [0, 1, 2, 3, 4]


def test_a_deadline_names_those_that_are_missing_and_their_relays(five, tmp_path):
    end = tmp_path / "end"
    with pytest.raises(DeadlineError) as late:
        five.within(5).call(Plain.wait_for_file, str(tmp_path / "begun"), str(end), 2)
    assert re.search(r"no answer to 'wait_for_file' in 5.0 s \(\d of 5 ranks answered; missing: ", str(late.value))
    assert re.search(r"rank 2 \(pid \d+ on .*\) is running, called by five-relays rank 1 \(pid \d+", str(late.value))
    assert "five rank 2" in late.value.awaited
    end.touch()
    assert five.call(Plain.rank) == [0, 1, 2, 3, 4]


def test_an_answer_after_the_first_deadline_still_comes(five, tmp_path):
    end = tmp_path / "end"
    call = five.within(2).start(Plain.wait_for_file, str(tmp_path / "begun"), str(end), 1)
    with pytest.raises(DeadlineError):
        call.result()
    end.touch()
    assert call.result(120) == [None] * 5


def test_a_killed_process_is_named_while_the_others_work_and_can_be_replaced(five, tmp_path):
    end, pid = tmp_path / "end", five.on(2).call(Plain.pid)[0]
    waiting = five.within(600).start(Plain.wait_for_file, str(tmp_path / "begun"), str(end))
    wait_until((tmp_path / "begun").exists)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=rf"five rank 2: its process \(pid {pid}\) died during 'wait_for_file'"
    ) as died:
        waiting.result()
    assert reports_death(died.value)
    end.touch()
    assert five.alive() == [True, True, False, True, True]
    five.restart(2)
    assert five.call(Plain.rank) == [0, 1, 2, 3, 4]
    assert five.on(2).call(Plain.pid) != [pid]


def test_health_is_answered_during_a_long_call(ray_cluster, few_ranks_per_relay, tmp_path):
    busy, end = ray_cluster.launch("busy-five", Busy, processes=3), tmp_path / "end"
    working = busy.start(Busy.work_until, str(end))
    wait_until(lambda: busy.on(2).call(Busy.health) == [True])
    end.touch()
    assert working.result() == ["done"] * 3
    busy.close()
    assert ray_cluster.groups["busy-five-relays"].is_closed


def test_a_relay_that_dies_is_a_death_and_says_so(ray_cluster, few_ranks_per_relay, tmp_path):
    group, begun, end = ray_cluster.launch("lost", Plain, processes=4), tmp_path / "begun", tmp_path / "end"
    waiting = group.within(600).start(Plain.wait_for_file, str(begun), str(end))
    wait_until(begun.exists)
    [relay, other] = ray_cluster.groups["lost-relays"].pids()
    os.kill(relay, signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=rf"lost rank [01]: .*lost-relays rank 0: its process \(pid {relay}\) died"
    ) as died:
        waiting.result()
    assert reports_death(died.value)
    assert group.alive() == [True] * 4  # nobody to be replaced, so the run ends and is started again
    end.touch()
    assert group.on(2, 3).call(Plain.rank) == [2, 3]
    pids = group.pids()
    group.close()
    assert {process_state(pid) for pid in (other, *pids)} == {"gone"}
