"""What died continues from a memory snapshot that is newer than the checkpoint on disk: no bit changes."""

import os
from pathlib import Path

import pytest
from fault_cases import differences
from loop_cases import make_task, rl_yaml
from paused_runs import wait_for
from test_restarted_groups import ASYNC, FOUR_STEPS, events, go
from test_restarted_runs import Command, undisturbed, write_config

from hotseat.faults import Fault
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.state.memory_snapshots import POINTER
from hotseat.observe import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def task(tmp_path):
    (tmp_path / "memory").mkdir()
    return make_task(tmp_path)


def saving(task: Path, disk: int = 3, more: str = "") -> str:
    return f"{{every: {disk}, background: false, memory_every: 1, memory_path: {task / 'memory'}{more}}}"


def test_an_actor_that_dies_continues_from_memory_and_no_bit_changes(task, monkeypatch):
    """Scenario 8: in the third step, before there is any checkpoint on disk; the snapshot is removed at the end."""
    calm = go(task, monkeypatch, "calm", rl_yaml(task, name="calm", checkpoint=saving(task), train=FOUR_STEPS))
    assert list((task / "memory").iterdir()) == []
    text = rl_yaml(task, checkpoint=saving(task), train=FOUR_STEPS)
    run = go(task, monkeypatch, "run", text, Fault("update.middle", "die", skip=2))
    assert differences(calm, run) == []
    [restart] = events(run)
    assert "actor started again, the run continues after step 2 (restart 1 of 3" in restart
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert list((task / "memory").iterdir()) == []
    assert not (run / POINTER).exists()
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-000003", "step-000004"]


@pytest.mark.parametrize("is_damaged", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_driver_that_is_killed_continues_from_memory_or_from_disk_if_that_is_damaged(task, is_damaged):
    """Scenarios 12 and 66: kill -9 in the fourth step: memory has the third, and the disk the second."""
    wait = [Fault("update.before", "kill", skip=3)]
    config = write_config(task, checkpoint=saving(task, disk=2))
    if is_damaged:
        wait = [Fault("update.before", "60", skip=3)]
    with Command(task, "run", str(config), faults=wait) as command:
        if is_damaged:
            assert wait_for(command.all_happened, 300)
            [state] = (task / "memory").glob("*/step-000003/state.json")
            state.write_text(state.read_text() + " ")
            [driver] = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children").read_text().split()
            os.kill(int(driver), 9)
        code, _, errors = command.finish()
    assert code == 0, errors[-3000:]
    assert "started again, resumes after step 3 (restart 1 of 3 without a new checkpoint)" in errors
    notes = " ".join(event["text"] for event in read_lines(task / "runs" / "run" / "events.jsonl"))
    step = 2 if is_damaged else 3
    assert f"after step {step}" in notes
    assert ("is deleted, and the newest checkpoint on disk counts" in notes) == is_damaged
    assert differences(undisturbed(task, checkpoint="{every: 2, background: false}"), task / "runs" / "run") == []
    assert list((task / "memory").iterdir()) == []


def test_samples_that_were_made_ahead_go_back_to_the_snapshot(task, monkeypatch):
    """At staleness 2: groups that waited lie in the snapshot, too; none is lost or learned from twice."""
    train = FOUR_STEPS.replace("2}", "4}")
    text = rl_yaml(task, checkpoint=saving(task, disk=5), train=train, **ASYNC)
    died = [Fault("update.middle", "die", skip=2), Fault("update.middle", "die", skip=3)]
    run = go(task, monkeypatch, "run", text, *died)
    trained = [key for entry in read_ledger(run) if entry.state == "trained" for key in entry.keys]
    assert len(trained) == len(set(trained)) == 8 * 4 * 4
    assert [line["version"] for line in read_lines(run / "metrics.jsonl")[1:]] == list(range(1, 9))
    assert len(events(run)) == 2
