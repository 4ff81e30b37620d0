"""kill -9 and SIGSTOP of each kind of process at each point: what can go on goes on, what cannot is resumed.

Whatever happened, the weights are bit for bit those of a run that nobody disturbed, and so is the ledger.
"""

import os
import re
import signal
import time

import pytest
from fault_cases import TWO_RANKS, Faulty, differences, make_faulty_task, run_undisturbed

from hotseat.faults import POINTS, Fault
from hotseat.observe import read_lines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

SILENCE = {"silence_timeout_s": 4}
NO_RESTARTS = ("run.max_restarts=0",)  # otherwise the run restarts a model by itself

# Reached by the driver or by the rollout host, before or beside anything that an engine does.
EVERY_STEP = [point for point in POINTS if point not in ("start-up", "evaluation.during")]


@pytest.fixture
def task(tmp_path):
    return make_faulty_task(tmp_path)


def one_a_step(points: list[str], to: str) -> list[Fault]:
    """The first at the second step, the next a step later, and so on."""
    return [Fault(point, "kill", to=to, skip=_times_a_step(point) * step) for step, point in enumerate(points, 1)]


def _times_a_step(point: str) -> int:
    # Between two tokens, and when a group is given to the reward function: at least so often; parts move twice a step.
    return {"generation.during": 4, "scoring.during": 4, "update.micro-batch": 7, "offload": 2, "onload": 2}.get(
        point, 1
    )


def test_engines_hosts_and_rewards_are_replaced_and_no_bit_changes(task):
    """Scenarios 1, 2 and 4: the engine, the rollout host and the reward worker die in the middle of what they do.

    With a reference and two optimizer steps, so that every phase is on the way: invariant 1 on Ray.
    """
    overrides = "algorithm.kl.coef=0.1", "train.batch_size=8"
    undisturbed = run_undisturbed(task, num_passes=3, overrides=overrides)
    placement = "{actor: 0, 'reference,rollout': '@actor'}"
    with Faulty(task, num_passes=3, placement=placement, overrides=overrides) as run:
        run.arm(
            Fault("generation.during", "kill", skip=10),
            Fault("scoring.during", "kill", to="rewards", skip=9),
            Fault("prepare.before", "kill", to="agents:0", skip=3),
            Fault("push.during", "kill", to="rollout:0", skip=5),
        )
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert out.count("engine 0 died and is replaced") == 2
        assert out.count("rollout host 0 died and is replaced") == 1
        assert differences(undisturbed, run.run_dir) == []
        assert run.is_gone(within_s=60)
    last = read_lines(run.run_dir / "metrics.jsonl")[-1]
    assert (last["engine_restarts"], last["host_restarts"], last["samples_failed"]) == (2, 1, 0)


@pytest.mark.long
def test_engines_that_are_replaced_are_met_anew_by_the_broadcast(task):
    """Scenario 4, where weights are broadcast: the group of the dead is given up, and the others join the next."""
    undisturbed = run_undisturbed(task, num_passes=2)
    with Faulty(task, num_passes=2, placement="{actor: 0, rollout: 1-2}", transport="gloo") as run:
        run.arm(
            Fault("push.before", "kill", to="rollout:0", skip=1),
            Fault("push.during", "kill", to="rollout:1", skip=3),
        )
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert out.count("died and is replaced") == 2
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("placement", "victim", "delay_s"),
    [("{actor: 0, rollout: '@actor'}", "agents:0", "20"), ("{actor: 0, rollout: 0-1}", "rollout:1", "5")],
)
def test_what_a_survivor_was_asked_by_the_dead_or_beside_them_is_dropped(task, placement, victim, delay_s):
    """Scenario 1: an engine that lives is still at work for somebody who is gone, and has to leave its device."""
    undisturbed = run_undisturbed(task, num_passes=2)
    with Faulty(task, num_passes=2, placement=placement) as run:
        run.arm(
            Fault("generation.during", "kill", by="rollout:0", to=victim, skip=6),
            Fault("generation.during", delay_s, by="rollout:0", skip=6),
        )
        code, _, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["rollout:0", "agents:0", "rewards"])
def test_killed_at_every_point_of_a_step(task, victim):
    """Scenarios 1, 2, 4 and 31: one run, in which the victim dies at another point in each step."""
    undisturbed = run_undisturbed(task, num_passes=12)
    with Faulty(task, num_passes=12) as run:
        run.arm(*one_a_step(EVERY_STEP, victim), Fault("evaluation.during", "kill", to=victim, skip=1))
        code, _, errors = run.go(timeout_s=900)
        assert code == 0, errors[-3000:]
        assert run.all_happened(), sorted(run.faults.glob("*.fault"))
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rollout:0", "agents:0"])
def test_what_dies_while_it_starts_is_started_again(task, victim):
    undisturbed = run_undisturbed(task, num_passes=1)
    with Faulty(task, num_passes=1) as run:
        run.arm(Fault("start-up", "kill", to=victim))
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert "died while it started, and is started again" in out
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
def test_a_rank_of_the_trainer_dies_and_the_run_resumes_from_its_checkpoint(task):
    """Scenario 8: all ranks stop within 15 s; the error says who died and how to go on; resumed, no bit differs."""
    with Faulty(task, num_passes=3, placement=TWO_RANKS) as calm:
        code, _, errors = calm.go()
        assert code == 0, errors[-3000:]
        undisturbed = calm.run_dir.rename(task / "runs" / "undisturbed")
        calm.faults.rename(task / "no-faults")
    with Faulty(task, num_passes=3, placement=TWO_RANKS, overrides=NO_RESTARTS) as run:
        run.arm(Fault("update.micro-batch", "kill", by="actor:1", skip=8))
        code, _, errors = run.go()
        assert code == 1
        assert run.seconds_since_last_fault() < 15
        assert run.is_gone(within_s=10)
        assert "actor rank 1: its process" in errors
        assert re.fullmatch(rf"resume after step \d: hotseat resume {run.run_dir}", errors.strip().splitlines()[-1])
        code, _, errors = run.go()
        assert code == 0, errors[-3000:]
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["driver", "actor:0"])
def test_a_run_that_is_killed_at_every_point_is_resumed_every_time(task, victim):
    """Scenarios 8, 10, 11 and 12: the driver, or the trainer, dies at each point in turn."""
    undisturbed = run_undisturbed(task, num_passes=10)
    drivers = [point for point, where in POINTS.items() if where.startswith("driver")]
    actors = [point for point, where in POINTS.items() if where.startswith("actor")]
    faults = [Fault(point, "kill", to="self" if victim == "driver" else victim, skip=1) for point in drivers[1:]]
    faults += [Fault(point, "kill", to="self", by="actor:0", skip=1) for point in actors if victim == "actor:0"]
    with Faulty(task, num_passes=10, overrides=NO_RESTARTS) as run:
        for fault in [Fault("start-up", "kill", to="self"), *faults]:
            run.arm(fault)
            code, _, errors = run.go()
            assert run.all_happened(), (fault, errors[-2000:])
            assert code != 0
            assert run.seconds_since_last_fault() < 15, fault
            assert run.is_gone(within_s=10), fault
        code, _, errors = run.go()
        assert code == 0, errors[-3000:]
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
def test_a_slow_disk_holds_no_step_up(task):
    """Two ranks, one of which takes 3 s to write its share: steps go on meanwhile, and it is saved all the same."""
    with Faulty(task, num_passes=2, placement=TWO_RANKS) as run:
        run.arm(Fault("save.during", "3", by="actor:1"))
        run.start()
        checkpoints, metrics = run.run_dir / "checkpoints", run.run_dir / "metrics.jsonl"
        while not list(checkpoints.glob("step-*")):
            assert run.process.poll() is None
            steps = [line["step"] for line in read_lines(metrics)] if metrics.exists() else []
            time.sleep(0.02)
        assert steps[-1] > 1  # before the checkpoint of step 1 was there
        code, _, errors = run.finish()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{step:06}" for step in (2, 3, 4)]
        spent = [line["time/save"] for line in read_lines(metrics) if "time/save" in line]
        assert len(spent) == 3
        assert spent[0] < 2


@pytest.mark.long
def test_a_rank_that_dies_while_it_writes_in_the_background(task):
    """Scenario 10 on Ray: the run ends, saying who died; resumed, no bit differs."""
    undisturbed = run_undisturbed(task, num_passes=3)
    with Faulty(task, num_passes=3, overrides=NO_RESTARTS) as run:
        run.arm(Fault("save.during", "kill", by="actor:0", skip=1))
        code, _, errors = run.go()
        assert code == 1
        assert run.seconds_since_last_fault() < 15
        assert "actor rank 0: its process" in errors
        assert errors.strip().splitlines()[-1] == f"resume after step 1: hotseat resume {run.run_dir}"
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert "step-000002 was not finished, and is removed" in out
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
def test_an_engine_that_is_stopped_is_ended_and_replaced(task):
    """Scenario 3: seen within the limit, named, killed, replaced; its stack is kept."""
    undisturbed = run_undisturbed(task, num_passes=2)
    with Faulty(task, num_passes=2, cluster=SILENCE) as run:
        run.arm(Fault("generation.during", "stop", skip=10))
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert "rollout rank 0 (pid " in out
        assert "is ended: it was stopped for 4 s" in out
        assert "engine 0 died and is replaced" in out
        assert differences(undisturbed, run.run_dir) == []
        hang = (run.run_dir / "hangs.txt").read_text()
        assert "culprit: rollout rank 0" in hang
        assert "waits for rollout rank 0 to answer 'fetch'" in hang  # what the rollout host does meanwhile
        assert [event for event in read_lines(run.run_dir / "events.jsonl") if event["kind"] == "fault"]


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rollout:0", "agents:0"])
@pytest.mark.parametrize(
    ("point", "skip"),
    [
        ("scoring.during", 5),
        ("update.middle", 2),
        ("push.during", 5),
        ("offload", 5),
    ],  # four steps, of one update each
)
def test_stopped_at_a_point(task, victim, point, skip):
    undisturbed = run_undisturbed(task, num_passes=2)
    with Faulty(task, num_passes=2, cluster=SILENCE) as run:
        run.arm(Fault(point, "stop", to=victim, skip=skip))
        code, _, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened()
        assert differences(undisturbed, run.run_dir) == []


@pytest.mark.long
def test_a_rank_of_the_trainer_that_is_stopped_ends_the_run_by_name(task):
    """Scenario 9: within the limit, naming rank and operation; the run is resumable."""
    with Faulty(task, num_passes=2, placement=TWO_RANKS, cluster=SILENCE, overrides=NO_RESTARTS) as run:
        run.arm(Fault("update.micro-batch", "stop", by="actor:1", skip=8))
        code, _, errors = run.go()
        assert code == 1
        assert run.seconds_since_last_fault() < 20
        assert run.is_gone(within_s=10)
        assert "actor rank 1: its process" in errors
        assert "was ended during 'update': it was stopped for 4 s" in errors
        hang = (run.run_dir / "hangs.txt").read_text()
        assert "culprit: actor rank 1" in hang
        assert "actor rank 0" in hang


@pytest.mark.long
def test_a_call_that_never_ends_is_diagnosed(task):
    """Invariant 7: a rank that sleeps for ever in an update is named, with everybody's stack."""
    limits = {"call_timeout_s": 8}
    with Faulty(task, num_passes=2, placement=TWO_RANKS, cluster=limits, overrides=NO_RESTARTS) as run:
        run.arm(Fault("update.micro-batch", "1000", by="actor:1", skip=8))
        code, _, errors = run.go()
        assert code == 1
        assert run.seconds_since_last_fault() < 40
        assert "culprit: actor rank 1" in errors
        hang = (run.run_dir / "hangs.txt").read_text()
        assert "faults.py" in hang  # where it sleeps
        assert "in a collective with the other ranks" in hang


@pytest.mark.long
def test_sigterm_to_the_process_group_saves_the_step_under_way(task):
    """Scenario 14: the step under way is finished and saved; nothing is left, on Ray either.

    `timeout` and batch schedulers signal the whole process group; Ray and the workers are not in it.
    """
    with Faulty(task, num_passes=3) as run:
        run.arm(Fault("update.before", "1", skip=2))
        run.start()
        while not list(run.faults.glob("*.happened")):
            assert run.process.poll() is None
            time.sleep(0.05)
        os.killpg(run.process.pid, signal.SIGTERM)
        code, out, errors = run.finish()
        assert code == 130
        assert "saved" in out
        assert "died" not in out
        assert "GCS" not in errors
        assert (run.run_dir / "checkpoints" / "step-000003").is_dir()
        assert run.is_gone(within_s=10)
