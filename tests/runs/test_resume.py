"""A run that goes on from a checkpoint ends as if nothing had happened."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from environments import own_environment
from loop_cases import make_task, rl_yaml, rm_yaml, same, sft_yaml, weights
from paused_runs import end_stopped, started, wait_for, wait_until_stopped
from safetensors.torch import load_file
from stopped_runs import Stop, stopped_after_saving

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import CheckpointError, UserError
from hotseat.faults import Fault
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.run import start
from hotseat.loop.state.run_dir import sole_owner
from hotseat.observe import read_lines
from hotseat.types import SampleKey

pytestmark = pytest.mark.slow

# Four steps of two optimizer steps each, a reference, an adaptive coefficient and momentum: all of it must come back.
RL = ("train.num_episodes=2", "train.batch_size=8", "algorithm.kl.coef=0.1", "algorithm.kl.target=0.5")
# Two passes of two steps.
RM = ("data.max_samples=16", "train.batch_size=8", "train.micro_batch_size=4", "train.max_epochs=2")
COMMON = {"rl": RL, "rm": RM, "sft": ()}
YAML = {"rl": rl_yaml, "rm": rm_yaml, "sft": sft_yaml}


def yaml_of(task: Path, kind: str, **changes: str) -> str:
    return YAML[kind](task, **changes)


def run(task: Path, kind: str, name: str, *overrides: str) -> list[dict]:
    start(loads(yaml_of(task, kind, name=name), [*COMMON[kind], *overrides]))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def facts(records: list[dict]) -> list[dict]:
    timing = ("time/", "memory/", "machine/", "sync/", "step_s", "tokens_per_s")
    return [{k: v for k, v in record.items() if not k.startswith(timing)} for record in records]


@contextmanager
def stopped_in_update(number: int) -> Iterator[None]:
    """Have the run in this context end as update `number`, from 1 on, begins."""
    from hotseat.loop.rl.phases import UpdatePhase

    update, begun = UpdatePhase.run, []

    def updating(self, *args):
        begun.append(1)
        if len(begun) == number:
            raise Stop
        return update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdatePhase, "run", updating)
        with pytest.raises(Stop):
            yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[str], tuple[Path, str]]:
    """Make a run of a kind, once for all tests, and return its task and its name."""
    task = make_task(tmp_path_factory.mktemp("uninterrupted"))

    @functools.cache
    def of(kind: str) -> tuple[Path, str]:
        run(task, kind, f"whole-{kind}")
        return task, f"whole-{kind}"

    return of


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four steps with checkpoints of the second and the last, for all tests that leave it as it is."""
    task = make_task(tmp_path_factory.mktemp("finished"))
    run(task, "rl", "run", "checkpoint.every=2")
    return task / "runs" / "run"


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(("rl", 1), ("sft", 1), ("sft", 4), ("rm", 2)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("rl", 2), ("rl", 3), ("rl", 4), ("rm", 3))),
    ],
)
def test_resumed_equals_uninterrupted(uninterrupted, kind, every):
    """Scenario 22 and invariant 5: mid-pass, at the boundary of a pass (two steps), and after the last step."""
    task, whole = uninterrupted(kind)
    broken = f"broken-{kind}-{every}"
    with stopped_after_saving():
        run(task, kind, broken, f"checkpoint.every={every}")
    assert not (task / "runs" / broken / "model").exists()
    assert main(["resume", str(task / "runs" / broken)]) == 0
    records = [read_lines(task / "runs" / name / "metrics.jsonl") for name in (whole, broken)]
    assert facts(records[0]) == facts(records[1])
    assert same(weights(task, whole), weights(task, broken))
    configs = [(task / "runs" / name / "model" / "config.json").read_text() for name in (whole, broken)]
    assert configs[0] == configs[1]


@pytest.mark.long
def test_a_save_that_takes_the_engines_place_changes_nothing(task):
    """With engine weights dropped between turns, a save must not leave the engine without any."""
    offload = ["cluster.component_placement={actor: 0, rollout: '@actor'}", "rollout.enable_offload=true"]
    start(loads(rl_yaml(task, name="plain"), offload))
    start(loads(rl_yaml(task, name="saved"), [*offload, "checkpoint.every=1"]))
    assert same(weights(task, "plain"), weights(task, "saved"))


def test_what_was_done_after_the_checkpoint_is_done_again_and_counted_once(uninterrupted):
    task, whole = uninterrupted("rl")
    with stopped_in_update(4):
        run(task, "rl", "broken", "checkpoint.every=2")  # steps 3 and half of 4 are lost
    assert [record["step"] for record in read_lines(task / "runs" / "broken" / "metrics.jsonl")] == [0, 1, 2, 3]
    assert main(["resume", str(task / "runs" / "broken")]) == 0
    assert facts(read_lines(task / "runs" / "broken" / "metrics.jsonl")) == facts(
        read_lines(task / "runs" / whole / "metrics.jsonl")
    )
    assert same(weights(task, whole), weights(task, "broken"))
    # Invariant 4: along the history that survives, every sample once.
    trained = Counter(key for entry in read_ledger(task / "runs" / "broken") for key in entry.keys)
    assert trained == Counter(SampleKey(e, p, s) for e in range(2) for p in range(8) for s in range(4))
    assert list(read_ledger(task / "runs" / "broken")) == list(read_ledger(task / "runs" / whole))


def test_after_the_last_step_there_is_nothing_to_do(finished, capsys):
    """Scenario 22."""
    before = (finished / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["resume", str(finished)]) == 0
    assert "nothing to do: all 4 steps are done" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_model_that_was_there_before_is_not_taken_for_the_runs_own(task, capsys):
    """With a folder of its own: that of an earlier run is no sign that this one was exported."""
    model = task / "elsewhere"
    for name in ("earlier", "later"):
        run(task, "rl", name, "checkpoint.every=4", f"checkpoint.export_path={model}", f"seed={len(name)}")
    assert main(["resume", str(task / "runs" / "later")]) == 0
    assert f"nothing to do: all 4 steps are done, the model is {model}" in capsys.readouterr().out
    exported = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(b"")  # as if it had ended before its model was written
    os.utime(model / "config.json", (0, 0))
    assert main(["resume", str(task / "runs" / "later")]) == 0
    assert (model / "model.safetensors").read_bytes() == exported


@pytest.mark.long
def test_checkpoints_hold_what_was_asked_for(task):
    run(task, "rl", "run", "checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.export_each=true")
    found = sorted(path.name for path in (task / "runs" / "run" / "checkpoints").iterdir())
    assert found == ["step-000003", "step-000004"]
    last = task / "runs" / "run" / "checkpoints" / "step-000004"
    assert {path.name for path in last.iterdir()} == {
        "actor",
        "ledger.jsonl",
        "manifest.json",
        "model",
        "state.json",
    }
    assert same(load_file(last / "model" / "model.safetensors"), weights(task, "run"))


def test_a_checkpoint_without_state_is_a_model_and_no_more(task):
    run(task, "sft", "run", "checkpoint.every=2", "checkpoint.save_state=false")
    last = sorted((task / "runs" / "run" / "checkpoints").iterdir())[-1]
    assert {path.name for path in last.iterdir()} == {"manifest.json", "model", "state.json"}
    with pytest.raises(CheckpointError, match="not what resuming needs"):
        run(task, "sft", "run", "checkpoint.every=2", "checkpoint.resume=true")


def test_a_broken_checkpoint_is_named_and_never_skipped(finished, capsys):
    """Scenario 20."""
    shard = next((finished / "checkpoints" / "step-000004" / "actor").glob("*.distcp"))
    whole = shard.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1  # one flipped bit
    shard.write_bytes(data)
    assert main(["resume", str(finished)]) == 1
    shard.write_bytes(whole)
    error = capsys.readouterr().err
    assert "step-000004 is damaged" in error
    assert shard.name in error
    assert "remove it to resume from step-000002" in error


def test_a_changed_config_is_reported_and_what_cannot_change_is_refused(finished, capsys):
    """Scenario 24."""
    assert main(["resume", str(finished), "seed=9", "actor.optimizer.eps=0.5"]) == 2
    error = capsys.readouterr().err
    assert "seed: 3 when the checkpoint was written, now 9" in error
    assert "actor.optimizer.eps: 1e-08 when the checkpoint was written, now 0.5" in error


def changes(task: Path, name: str) -> list[tuple]:
    lines = read_lines(task / "runs" / name / "changes.jsonl")
    return [(line["step"], line["key"], line["from"], line["to"], line["is_allowed"]) for line in lines]


@pytest.mark.long
def test_settings_change_from_the_next_step_on_and_are_recorded(task, monkeypatch, capsys):
    """Learning rate, KL coefficient, engine and number of steps; a change that was taken back never was."""
    with stopped_after_saving():
        run(task, "rl", "run", "checkpoint.every=2")
    directory = str(task / "runs" / "run")
    with monkeypatch.context() as patch:  # fails before its first step, and is resumed otherwise
        patch.setattr("hotseat.loop.rl.phases.UpdatePhase.run", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["resume", directory, "actor.optimizer.learning_rate=0.5", "log.every=2"])
    assert changes(task, "run") == [
        (3, "actor.optimizer.learning_rate", 0.01, 0.5, False),
        (3, "log.every", 1, 2, False),
    ]
    given = ["actor.optimizer.learning_rate=0.002", "algorithm.kl.coef=0.3", "train.num_episodes=3", "log.every=1"]
    assert main(["resume", directory, *given, "rollout.num_slots=4"]) == 0
    assert sorted(changes(task, "run")) == [
        (3, "actor.optimizer.learning_rate", 0.01, 0.002, False),
        (3, "algorithm.kl.coef", 0.1, 0.3, False),
        (3, "rollout.num_slots", 8, 4, False),
        (3, "train.num_episodes", 2, 3, False),
    ]
    assert "algorithm.kl.coef: 0.1 when the checkpoint was written, now 0.3" in capsys.readouterr().out
    lines = read_lines(task / "runs" / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["learning_rate"] for line in lines[1:]] == [0.01] * 2 + [0.002] * 4
    assert lines[2]["kl_coefficient"] < 0.2
    assert lines[3]["kl_coefficient"] == pytest.approx(0.3, rel=0.05)  # one adaptation from the new value
    # What was changed is the run's own from then on: resuming once more changes nothing.
    (task / "runs" / "run" / "model").rename(task / "model-before")
    assert main(["resume", directory]) == 0
    assert len(changes(task, "run")) == 4


@pytest.mark.long
def test_what_breaks_exactness_is_refused_unless_it_is_allowed(task, capsys):
    with stopped_after_saving():
        run(task, "rl", "run", "checkpoint.every=2")
    directory = str(task / "runs" / "run")
    assert main(["resume", directory, "algorithm.clip_high=0.3"]) == 2
    suggested = capsys.readouterr().err.partition("repeat the command with ")[2].split()
    assert suggested == ["--allow-change", "algorithm.clip_high"]
    assert main(["resume", directory, "algorithm.clip_high=0.3", *suggested]) == 0
    assert changes(task, "run") == [(3, "algorithm.clip_high", 0.2, 0.3, True)]
    config = (task / "runs" / "run" / "config.yaml").read_text()
    assert "clip_high: 0.3" in config
    assert "allow_changes" not in config
    assert main(["resume", directory, "--allow-change", "algorithm.clip_high"]) == 2
    assert "--allow-change algorithm.clip_high has no effect" in capsys.readouterr().err


def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_made(task, capsys):
    run(task, "sft", "run", "checkpoint.every=2")
    assert main(["resume", str(task / "runs" / "run"), "train.max_epochs=2"]) == 2
    error = capsys.readouterr().err
    assert "is of step 8, and this run would end after 4: set train.max_epochs higher" in error


def test_what_holds_no_run_or_no_checkpoint_is_said(task, tmp_path, capsys):
    assert main(["resume", str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err
    run(task, "sft", "run", "checkpoint.keep_final=false")
    folder = task / "runs" / "run" / "checkpoints"
    # Whatever the state of the folder is: finished, with an unfinished checkpoint, or without a model.
    changes = [
        lambda: None,
        lambda: (folder / ".writing-step-000008").mkdir(parents=True),
        lambda: shutil.rmtree(task / "runs" / "run" / "model"),
        lambda: shutil.rmtree(folder),
    ]
    for change in changes:
        change()
        before = sorted((task / "runs" / "run").rglob("*"))
        assert main(["resume", str(task / "runs" / "run")]) == 2
        text = (
            f"{task}/runs/run has no checkpoint to resume from: {folder} holds none. Start it again with `hotseat run`"
        )
        assert text in capsys.readouterr().err
        assert sorted((task / "runs" / "run").rglob("*")) == before


def test_a_directory_in_use_is_refused(task):
    """Scenario 23."""
    run(task, "sft", "run", "checkpoint.every=2")
    with sole_owner(task / "runs" / "run"), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        run(task, "sft", "run", "checkpoint.every=2", "checkpoint.resume=true")


@pytest.mark.long
def test_without_a_checkpoint_a_run_starts_anew_and_nothing_is_counted_twice(uninterrupted, task, capsys):
    """Scenario 21: said, not silent."""
    task_of_whole, whole = uninterrupted("rl")
    with stopped_in_update(3):
        run(task, "rl", "early", "checkpoint.every=4")
    records = run(task, "rl", "early", "checkpoint.every=4", "checkpoint.resume=true")
    assert "has no checkpoint to resume from: this run starts from its first step" in capsys.readouterr().out
    assert facts(records) == facts(read_lines(task_of_whole / "runs" / whole / "metrics.jsonl"))
    assert list(read_ledger(task / "runs" / "early")) == list(read_ledger(task_of_whole / "runs" / whole))


def test_a_finished_run_without_checkpoints_is_not_overwritten(task):
    run(task, "sft", "run", "checkpoint.keep_final=false")
    with pytest.raises(UserError, match="finished without checkpoints"):
        run(task, "sft", "run", "checkpoint.every=2", "checkpoint.resume=true")
    assert (task / "runs" / "run" / "metrics.jsonl").stat().st_size > 0


def test_two_runs_do_not_write_into_the_same_checkpoints(task):
    """Scenario 23."""
    shared = task / "elsewhere"
    shared.mkdir()
    with sole_owner(shared), pytest.raises(UserError, match="elsewhere is in use by process"):
        run(task, "sft", "b", "checkpoint.every=2", f"checkpoint.path={shared}")


def test_another_runs_checkpoints_are_not_taken_for_ones_own(task):
    shared = f"checkpoint.path={task}/elsewhere"
    run(task, "sft", "a", "checkpoint.every=2", shared)
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        run(task, "sft", "b", "checkpoint.every=2", shared)


def test_sigterm_saves_and_the_rest_can_follow(uninterrupted, task):
    """Scenario 14."""
    third_step = Fault("update.before", "stop", skip=2)
    with started(task, *RL, "checkpoint.every=1000", planned=[third_step], name="ended") as driver:
        wait_until_stopped(driver)
        end_stopped(driver)
        out, errors = driver.communicate(timeout=860)
    assert driver.returncode == 130
    assert "saved " in out
    said = errors.strip().splitlines()
    assert said[-3].startswith("hotseat: SIGTERM: this step is finished and saved, then the run ends")
    assert said[-2] == "hotseat: stopped"
    assert said[-1] == (
        f"nothing is lost: the last checkpoint is of step 3. Resume with: hotseat resume {task}/runs/ended"
    )
    [checkpoint] = (task / "runs" / "ended" / "checkpoints").iterdir()
    assert checkpoint.name == "step-000003"
    assert main(["resume", str(task / "runs" / "ended")]) == 0
    assert same(weights(*uninterrupted("rl")), weights(task, "ended"))


REWARD_OF_MINUTES = """
import time
from pathlib import Path

def reward_func(queries, prompts, labels):
    time.sleep(300 if Path("{slow}").exists() else 0)
    return [1.0] * len(queries)
"""


def test_a_second_sigterm_ends_at_once(task):
    """Scenario 15: and leaves no checkpoint that looks whole. Both come in the third step, which cannot end."""
    (task / "reward.py").write_text(REWARD_OF_MINUTES.format(slow=task / "slow"))
    found = [Fault("generation.before", "stop", skip=2), Fault("scoring.during", "stop", skip=8)]
    options = (*RL, "checkpoint.every=1000", "reward.timeout_s=600")
    with started(task, *options, planned=found, name="ended") as driver:
        wait_until_stopped(driver)
        (task / "slow").touch()
        end_stopped(driver)
        assert wait_for(lambda: len(list((task / "faults").glob("*.happened"))) == 2, 120)
        wait_until_stopped(driver)
        end_stopped(driver)
        driver.communicate(timeout=600)
    assert driver.returncode == 130
    assert not list((task / "runs" / "ended" / "checkpoints").glob("step-*"))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_run_whose_driver_was_killed_resumes_on_ray(task):
    """Scenarios 8, 12 and 14 in part: kill -9 of the driver on Ray, then resume: the same bits as undisturbed."""
    run(task, "rl", "whole", "train.num_episodes=8")
    placement = "{component_placement: {actor: 0, 'reference,rollout': '@actor'}}"
    (task / "run.yaml").write_text(rl_yaml(task, cluster=placement, name="killed"))
    env = own_environment()
    command = [sys.executable, "-m", "hotseat.cli.main"]
    options = [*RL, "train.num_episodes=8", "checkpoint.every=1"]
    driver = subprocess.Popen([*command, "run", str(task / "run.yaml"), *options], env=env, stdout=subprocess.DEVNULL)
    checkpoints = task / "runs" / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step-00000[2-9]")) and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait(60)
    assert list(checkpoints.glob("step-*"))
    assert not (task / "runs" / "killed" / "model").exists()
    done = subprocess.run(
        [*command, "resume", str(task / "runs" / "killed")], env=env, capture_output=True, text=True, timeout=860
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from" in done.stdout
    assert same(weights(task, "whole"), weights(task, "killed"))


def test_openrlhf_load_checkpoint_resumes(task, monkeypatch, capsys):
    """`--load_checkpoint` starts anew where there is no checkpoint, and goes on where there is one."""
    from hotseat.openrlhf.run_command import main as openrlhf

    def in_process(config, launched):
        start(config.model_copy(update={"cluster": config.cluster.model_copy(update={"runtime": "local"})}), launched)

    monkeypatch.chdir(task)
    command = [
        *("--pretrain", f"{task}/model", "--dataset", f"{task}/examples.jsonl", "--input_key", "input"),
        *("--output_key", "output", "--max_len", "16", "--backend", "fsdp", "--param_dtype", "fp32"),
        *("--train_batch_size", "4", "--micro_train_batch_size", "2", "--max_epochs", "4", "--learning_rate", "1e-2"),
        *("--save_steps", "3", "--ckpt_path", f"{task}/ckpt", "--save_path", f"{task}/out", "--load_checkpoint"),
        *("--input_template", "{}"),
    ]
    with stopped_after_saving():
        openrlhf("train_sft", command, {}, in_process)
    assert openrlhf("train_sft", command, {}, in_process) == 0
    assert "resuming from" in capsys.readouterr().out
    [same_run] = (task / "runs").iterdir()  # with its metrics, and the ids under which trackers know it
    assert [record["step"] for record in read_lines(same_run / "metrics.jsonl")] == list(range(1, 9))
    resumed = load_file(task / "out" / "model.safetensors")
    whole = [word if word != f"{task}/ckpt" else f"{task}/other" for word in command]
    assert openrlhf("train_sft", whole, {}, in_process) == 0
    assert same(resumed, load_file(task / "out" / "model.safetensors"))
