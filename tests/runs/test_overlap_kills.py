"""kill -9 while rollout runs beside training: nothing is lost or trained twice, and no bit changes."""

import random
from collections import Counter

import pytest
from fault_cases import BESIDE, Faulty, differences, make_faulty_task, run_undisturbed

from hotseat.faults import Fault
from hotseat.loop.rl.ledger import read_ledger
from hotseat.observe import read_lines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

OVERLAP = "{staleness: 2}"
TWO_HOSTS = ("rollout.num_hosts=2",)
DRIVER_POINTS = ("generation.before", "prepare.before", "update.before", "push.before", "push.after", "save.before")


@pytest.fixture
def task(tmp_path):
    return make_faulty_task(tmp_path)


@pytest.mark.long
def test_a_driver_and_then_an_engine_and_a_host_die_and_no_bit_changes(task):
    """The driver with groups in flight; the resumed run replaces the others, and samples no finished group again.

    It has two rollout hosts, the undisturbed one has one.
    """
    undisturbed = run_undisturbed(task, num_passes=4, overlap=OVERLAP)
    with Faulty(task, num_passes=4, placement=BESIDE, overlap=OVERLAP, overrides=TWO_HOSTS) as run:
        run.arm(Fault("update.before", "kill", skip=2))
        code, _, errors = run.go()
        assert code == -9, errors[-3000:]
        assert run.is_gone(within_s=60)
        run.arm(
            Fault("generation.during", "kill", skip=8),
            Fault("group.first", "kill", by="agents:1", skip=2),
        )
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert "resuming from" in out
        assert "engine 0 died and is replaced" in out
        assert "rollout host 1 died and is replaced" in out
        assert seconds_to_name("rollout host 1 died", run) < 60.0  # the engine may be under replacement first
        assert differences(undisturbed, run.run_dir) == []
        assert run.is_gone(within_s=60)


@pytest.mark.long
def test_a_host_dies_with_a_full_buffer_and_no_finished_group_is_sampled_again(task):
    """Before a push nothing is in flight, so the host has finished all that it has begun."""
    undisturbed = run_undisturbed(task, num_passes=4, overlap=OVERLAP)
    with Faulty(task, num_passes=4, placement=BESIDE, overlap=OVERLAP, overrides=TWO_HOSTS) as run:
        run.arm(Fault("push.before", "kill", to="agents:1", skip=3))
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert "rollout host 1 died and is replaced" in out
        last = read_lines(run.run_dir / "metrics.jsonl")[-1]
        assert (last["host_restarts"], last["groups_begun_again"]) == (1, 0)
        began = Counter(
            tuple(key)
            for line in read_lines(run.run_dir / "arrivals.jsonl")
            for key in line.get("groups", ())
            if line["event"] == "begun"
        )
        assert set(began.values()) == {1}
        assert differences(undisturbed, run.run_dir) == []


def seconds_to_name(text: str, run: Faulty) -> float:
    """Return the time from the last fault in a rollout host to the event that says so."""
    [event] = [event for event in read_lines(run.run_dir / "events.jsonl") if event["text"].startswith(text)]
    [happened] = run.faults.glob("*group.first*.happened")
    return event["time"] - happened.stat().st_ctime


@pytest.mark.long
def test_engines_and_hosts_that_die_are_replaced_and_finished_groups_are_not_sampled_again(task):
    undisturbed = run_undisturbed(task, num_passes=4, overlap=OVERLAP)
    with Faulty(task, num_passes=4, placement=BESIDE, overlap=OVERLAP) as run:
        run.arm(
            Fault("generation.during", "kill", skip=14),
            Fault("prepare.before", "kill", to="agents:0", skip=2),
            Fault("push.during", "kill", to="rollout:0", skip=4),
            Fault("group.first", "kill", by="agents:0", skip=9),
        )
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert "engine 0 died and is replaced" in out
        assert "rollout host 0 died and is replaced" in out
        assert differences(undisturbed, run.run_dir) == []
        assert run.is_gone(within_s=60)


@pytest.mark.long
def test_an_engine_and_a_host_that_die_before_their_requests_are_restarted_are_replaced(task):
    overlap = "{staleness: 2, order: arrival, in_flight: restart}"
    with Faulty(task, num_passes=4, placement=BESIDE, overlap=overlap) as run:
        run.arm(
            Fault("update.before", "kill", to="rollout:0", skip=1),
            Fault("update.before", "kill", to="agents:0", skip=4),
        )
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert "engine 0 died and is replaced" in out
        assert "rollout host 0 died and is replaced" in out
        trained = Counter(key for entry in read_ledger(run.run_dir) for key in entry.keys if entry.state == "trained")
        assert len(trained) == 8 * 4 * 4
        assert set(trained.values()) == {1}
        assert run.is_gone(within_s=60)


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [1, 20])
def test_a_driver_that_is_killed_with_groups_in_flight_is_resumed_bit_for_bit(task, num_kills):
    undisturbed = run_undisturbed(task, num_passes=4, overlap=OVERLAP)
    rng, was_killed = random.Random(num_kills), False
    with Faulty(task, num_passes=4, placement=BESIDE, overlap=OVERLAP) as run:
        for _ in range(num_kills):
            run.arm(Fault(rng.choice(DRIVER_POINTS), "kill", skip=rng.randint(1, 3)))
            code, _, errors = run.go()
            assert run.is_gone(within_s=60)
            was_killed |= code == -9
            if code == 0:  # the fault lay behind the end
                break
            assert code == -9, errors[-3000:]
        else:
            code, _, errors = run.go()
        assert was_killed
        assert code == 0, errors[-3000:]
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
def test_one_of_two_engines_dies_and_only_its_requests_are_sent_again(task):
    undisturbed = run_undisturbed(task, num_passes=4, overlap=OVERLAP)
    with Faulty(task, num_passes=4, placement="{actor: 0, rollout: 1-2}", overlap=OVERLAP) as run:
        run.arm(Fault("generation.during", "kill", by="rollout:1", skip=4))
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert "engine 1 died and is replaced" in out
        last = list(read_lines(run.run_dir / "metrics.jsonl"))[-1]
        assert last["engine_restarts"] == 1
        assert last["groups_begun_again"] == 0
        assert 0 < last["requests_sent_again"] <= 3 * 4 * 4  # three batches are open at most
        assert differences(undisturbed, run.run_dir) == []
        assert run.is_gone(within_s=60)
