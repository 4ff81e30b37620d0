"""`hotseat run` and `hotseat resume` start their driver again when it dies, and only then."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import preloaded
import pytest
from environments import own_environment
from fault_cases import differences
from loop_cases import make_task, rl_yaml
from paused_runs import arm, wait_for

from hotseat.config import loads
from hotseat.faults import VARIABLE, Fault
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.processes.supervisor import end_marked, marked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MARK = "TEST_RESTARTED_RUNS"  # in the environment of everything that a command of these tests starts
EACH_STEP = {
    "checkpoint": "{every: 1, background: false}",
    "train": "{dtype: fp32, batch_size: 16, micro_batch_size: 8, num_episodes: 2}",  # four steps
}


@pytest.fixture
def task(tmp_path):
    return make_task(tmp_path)


class Command:
    """A `hotseat` command in a process of its own, with all that it starts."""

    def __init__(self, task: Path, *words: str, faults: Sequence[Fault] = ()):
        arm(task / "faults", faults)
        self.task, self.mark = task, f"{os.getpid()}-{task.name}"
        self.process = preloaded.popen(
            [sys.executable, "-m", "hotseat", *words],
            stdout=preloaded.PIPE,
            stderr=preloaded.PIPE,
            text=True,
            env={**own_environment(), MARK: self.mark, VARIABLE: str(task / "faults")},
            process_group=0,
        )

    def finish(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=900)
        return self.process.returncode, out, errors

    def all_happened(self) -> bool:
        return not list((self.task / "faults").glob("*.fault"))

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        end_marked(MARK, [self.mark])
        self.process.kill()


def write_config(task: Path, **sections: str) -> Path:
    path = task / "run.yaml"
    path.write_text(rl_yaml(task, **{**EACH_STEP, **sections}))
    return path


def undisturbed(task: Path, **sections: str) -> Path:
    start(loads(rl_yaml(task, name="undisturbed", **{**EACH_STEP, **sections})))
    return task / "runs" / "undisturbed"


def events(task: Path) -> list[dict]:
    return read_lines(task / "runs" / "run" / "events.jsonl")


def test_a_driver_that_is_killed_is_started_again_and_no_bit_changes(task):
    """Scenario 12: kill -9 in the third step, and once more before the export; the command ends as if undisturbed."""
    kills = [Fault("update.before", "kill", skip=2), Fault("export", "kill")]
    with Command(task, "run", str(write_config(task)), faults=kills) as command:
        code, _, errors = command.finish()
        assert code == 0, errors[-3000:]
        assert command.all_happened()
    again = [
        "its driver was ended by SIGKILL (if nobody did that, memory may have run out); started again, resumes after"
        f" step {step} (restart 1 of 3 without a new checkpoint)"
        for step in (2, 4)
    ]
    assert [line for line in errors.splitlines() if line.startswith("hotseat: ")] == [f"hotseat: {x}" for x in again]
    assert differences(undisturbed(task), task / "runs" / "run") == []
    assert [event["text"] for event in events(task) if event["kind"] == "restart"] == again
    assert again[0] in (task / "runs" / "run" / "report.html").read_text()


@pytest.mark.long
def test_a_run_that_never_saved_begins_again_at_its_first_step(task):
    sections = {"checkpoint": "{every_minutes: 0}"}
    kill = Fault("update.before", "kill", skip=2)
    with Command(task, "run", str(write_config(task, **sections)), faults=[kill]) as command:
        code, _, errors = command.finish()
        assert code == 0, errors[-3000:]
        assert command.all_happened()
    assert "started again, begins at its first step (restart 1 of 3 without a new checkpoint)" in errors
    steps = [line["step"] for line in read_lines(task / "runs" / "run" / "metrics.jsonl")]
    assert steps == sorted(set(steps))
    assert sum(event["kind"] == "restart" for event in events(task)) == 1
    calm, disturbed = undisturbed(task, **sections), task / "runs" / "run"
    assert (calm / "model/model.safetensors").read_bytes() == (disturbed / "model/model.safetensors").read_bytes()


@pytest.mark.long
def test_an_error_that_would_come_again_ends_the_command(task):
    (task / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('x')\n")
    with Command(task, "run", str(write_config(task))) as command:
        code, _, errors = command.finish()
    assert code in (1, 2)
    assert "started again" not in errors.replace("it is not started again", "")


@pytest.mark.long
def test_without_a_new_checkpoint_a_command_gives_up_and_asks_to_be_queued_again(task):
    config = write_config(task, run="{max_restarts: 1}")
    with Command(task, "run", str(config), faults=[Fault("update.before", "kill")] * 2) as command:
        code, _, errors = command.finish()
        assert code == 75, errors[-3000:]
        assert command.all_happened()
    lines = [line for line in errors.splitlines() if line.startswith("hotseat: ")]
    assert lines[0].endswith("started again, begins at its first step (restart 1 of 1 without a new checkpoint)")
    assert lines[1].endswith(
        "; it was started again once without a new checkpoint (run.max_restarts), and is given up; it has no checkpoint"
        " to resume from: start it again with the same command and checkpoint.resume=true"
    )
    with Command(task, "run", str(config), "checkpoint.resume=true") as command:
        assert command.finish()[0] == 0


def test_with_no_restarts_a_death_is_told_by_the_exit_code(task):
    kill = Fault("update.before", "kill")
    with Command(task, "run", str(write_config(task, run="{max_restarts: 0}")), faults=[kill]) as command:
        code, _, errors = command.finish()
    assert code == 75
    assert "run.max_restarts is 0, so it is not started again; it has no checkpoint to resume from" in errors


@pytest.mark.parametrize("whom", [pytest.param("command", marks=pytest.mark.long), "group"])
def test_sigterm_saves_the_step_and_ends_with_the_same_words_and_code(task, whom):
    """Scenario 14: to the command or to its process group, the driver gets it once, and is not started again."""
    wait = Fault("update.before", "2", skip=1)
    with Command(task, "run", str(write_config(task)), faults=[wait]) as command:
        assert wait_for(command.all_happened, 600)
        (os.kill if whom == "command" else os.killpg)(command.process.pid, signal.SIGTERM)
        code, _, errors = command.finish()
    assert code == 130
    assert "hotseat: SIGTERM: this step is finished and saved, then the run ends" in errors
    assert "ended at once" not in errors
    assert (task / "runs" / "run" / "checkpoints" / "step-000002").is_dir()
    assert "started again" not in errors


def test_nothing_is_left_of_a_command_that_is_killed_with_kill_9(task):
    """Scenario 12: the small process dies, and its driver with it."""
    with Command(task, "run", str(write_config(task)), faults=[Fault("update.before", "600")]) as command:
        assert wait_for(command.all_happened, 600)
        command.process.kill()
        assert wait_for(lambda: not marked(MARK, [command.mark]), 60)


@pytest.mark.ray
@pytest.mark.long
def test_a_trainer_that_dies_on_ray_is_a_death_and_the_run_goes_on(task):
    """Scenario 8: without a person."""
    cluster = "{component_placement: {actor: 0-1, rollout: 2}}"
    train = "{dtype: fp32, batch_size: 16, micro_batch_size: 2, num_episodes: 2}"
    config = write_config(task, cluster=cluster, train=train)
    kills = [Fault("update.micro-batch", "kill", by="actor:1", skip=1), Fault("push.before", "kill", skip=1)]
    with Command(task, "run", str(config), faults=kills) as command:
        code, _, errors = command.finish()
        assert code == 0, errors[-3000:]
        assert command.all_happened()
    assert "hotseat: actor rank 1: its process" in errors
    assert sum(event["kind"] == "restart" for event in events(task)) == 2
    with Command(task, "run", str(config), "name=calm") as calm:
        assert calm.finish()[0] == 0
    assert differences(task / "runs" / "calm", task / "runs" / "run") == []


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
def test_a_standby_is_the_next_driver_and_none_is_left(task, runtime):
    """Scenario 12: with what it has loaded meanwhile; no bit changes, and the last one ends with the command."""
    config = write_config(task, run="{standby: true}", cluster=f"{{runtime: {runtime}}}")
    with Command(task, "run", str(config), faults=[Fault("update.before", "600", skip=2)]) as command:
        children = Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children")
        assert wait_for(lambda: command.all_happened() and len(children.read_text().split()) == 2, 300)
        driver, standby = (int(word) for word in children.read_text().split())
        os.kill(driver, signal.SIGKILL)
        code, _, errors = command.finish()
        assert code == 0, errors[-3000:]
        assert json.loads((task / "runs" / "run" / "heartbeat.json").read_text())["pid"] == standby
        assert wait_for(lambda: not marked(MARK, [command.mark]), 60)
    assert differences(undisturbed(task), task / "runs" / "run") == []
