"""`hotseat diagnose --try`: cures are tried from checkpoints, in runs of their own, and judged by the record."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loop_cases import rl_yaml, same, weights

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import CheckpointError, UserError
from hotseat.loop.run import start
from hotseat.loop.state.fork import fork, forked
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

CONSTANT = "def reward_func(queries, prompts, labels):\n    return [1.0 for _ in queries]\n"
KEPT = ("log.keep_rollouts=true", "checkpoint.every=2", "checkpoint.keep_last=20")


def record(task, *overrides, **sections):
    """Make a run of 8 steps, two to a pass over the prompts."""
    start(loads(rl_yaml(task, **sections), ["train.num_episodes=4", *overrides]))
    return task / "runs" / "run"


def tree(run):
    """Return every file of a run, with what would change if it were written to."""
    facts = {}
    for path in sorted(run.rglob("*")):
        stat = path.stat()
        facts[str(path.relative_to(run))] = (path.is_dir(), stat.st_size if path.is_file() else 0, stat.st_mtime_ns)
    return facts


def evaluated(task):
    return {"eval": f"{{path: {task}/prompts.jsonl, every: 1}}"}


def of_step(run, step):
    return next(line for line in read_lines(run / "metrics.jsonl") if line["step"] == step)


def test_a_window_is_replayed_and_evaluated_as_the_run_was(task):
    run = record(task, *KEPT, **evaluated(task))
    before = tree(run)
    assert main(["replay", str(run), "--from-step", "4", "--to-step", "6", "--evaluate"]) == 0
    replayed = task / "runs" / "run-replay-1"
    assert [line["step"] for line in read_lines(replayed / "metrics.jsonl")] == list(range(7))
    for step in (5, 6):
        then, now = of_step(run, step), of_step(replayed, step)
        measured = ["eval/reward", "loss", "grad_norm", "reward", "engine_gap"]
        assert [now[name] for name in measured] == [then[name] for name in measured]
    assert main(["replay", str(run), "--from-step", "6"]) == 0
    assert same(weights(task), weights(task, "run-replay-2"))
    assert tree(run) == before


def test_a_window_that_is_not_there_is_refused(task, capsys):
    run = record(task, *KEPT)
    for words, said in (
        (["--from-step", "3"], "has no checkpoint of step 3: it has 2, 4, 6, 8; 0 is the beginning"),
        (["--from-step", "4", "--to-step", "4"], "--to-step is after it"),
        (["--from-step", "4", "--to-step", "9"], "the groups of step 9 are not in"),
        (["--from-step", "4", "seed=5"], "set seed back"),
    ):
        assert main(["replay", str(run), *words]) == 2
        assert said in capsys.readouterr().err
    (run / "checkpoints" / "step-000002" / "state.json").write_text("{")
    assert main(["replay", str(run), "--from-step", "2"]) != 0
    assert "the checkpoint of step 2 of" in capsys.readouterr().err
    (run / "checkpoints" / "step-000004" / "link").symlink_to("nowhere")
    assert main(["replay", str(run), "--from-step", "4"]) != 0
    assert "run-replay-1/checkpoints/step-000004 is damaged" in capsys.readouterr().err
    config = forked(run, "replay", 6, ())
    nowhere = config.model_copy(update={"name": "no/folder"})
    with pytest.raises(UserError, match="no/folder could not be made: No such file"), fork(run, 6, nowhere):
        raise AssertionError("it was made")
    shutil.rmtree(run / "checkpoints" / "step-000006")
    with pytest.raises(CheckpointError, match="could not be made from .*step-000006"), fork(run, 6, config):
        raise AssertionError("it was made")
    assert not list((task / "runs").glob("run-replay-*"))


@pytest.mark.long
def test_a_cure_that_changes_the_reward_is_tried_with_engines(task, capsys):
    (task / "good.py").write_text((task / "reward.py").read_text())
    (task / "reward.py").write_text(CONSTANT)
    run = record(task, "checkpoint.every=2")
    before = tree(run)
    capsys.readouterr()
    assert main(["diagnose", str(run), "--try"]) == 2  # the cure of the truncation, which comes first
    assert "16 leaves no room for a prompt" in capsys.readouterr().err
    assert main(["diagnose", str(run), "--try", "reward.functoin=x"]) == 2
    assert "did you mean reward.function" in capsys.readouterr().err
    assert not (task / "runs" / "run-try-1").exists()
    cure = f"reward.function={task}/good.py"
    assert main(["diagnose", str(run), "--json", "--try", cure, "algorithm.entropy_coef=0"]) in (0, 3)
    trial = json.loads(capsys.readouterr().out)["trial"]
    assert (trial["start"], trial["is_replay"], trial["cause"]) == (0, False, "truncation")
    assert trial["notes"] == ["no replay: reward.function acts while sampling"]
    figures = {each["name"]: each for each in trial["figures"]}
    assert figures["reward_std"]["recorded"] == 0 < figures["reward_std"]["tried"]
    assert trial["command"] == f"hotseat resume {task}/runs/run-try-1"
    assert tree(run) == before


def test_a_cure_that_acts_on_updates_is_tried_by_a_replay(task, capsys):
    """A KL penalty a thousand times the reward holds the policy where it began; kept groups teach one without it."""
    run = record(task, *KEPT, "algorithm.kl.coef=1000", "train.num_episodes=6", **evaluated(task))
    before = tree(run)
    capsys.readouterr()
    assert main(["diagnose", str(run), "--json", "--try", "algorithm.kl.coef=0"]) == 0
    trial = json.loads(capsys.readouterr().out)["trial"]
    assert (trial["cause"], trial["is_replay"], trial["symptom"]) == ("kl-penalty", True, "gone")
    assert "nats per token from the one that sampled" in trial["notes"][0]
    assert trial["goal"]["name"] == "eval/reward"
    assert trial["goal"]["tried"] > 2 * trial["goal"]["recorded"]
    tried = Path(trial["run"])
    assert of_step(tried, trial["end"])["eval/reward"] == trial["goal"]["tried"]
    assert of_step(tried, 1)["reward"] == of_step(run, 1)["reward"]  # the same groups
    assert tree(run) == before


SLOW = """
import time

def reward_func(queries, prompts, labels):
    time.sleep(0.1)
    return [0.5 for _ in queries]
"""


@pytest.mark.long
def test_a_trial_that_is_interrupted_leaves_the_run_and_no_process(task):
    (task / "reward.py").write_text(CONSTANT)
    (task / "slow.py").write_text(SLOW)
    run = record(task, "checkpoint.every=2")
    before = tree(run)
    command = [sys.executable, "-m", "hotseat", "diagnose", str(run), "--try", f"reward.function={task}/slow.py"]
    child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    metrics = task / "runs" / "run-try-1" / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and '"step": 1,' in metrics.read_text()):
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=300)[1]
    assert child.returncode == 130, said
    assert f"hotseat resume {task}/runs/run-try-1" in said
    assert tree(run) == before
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(child.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process is left")


@pytest.mark.long
def test_a_replay_that_drifts_is_given_up_for_engines(task, capsys):
    """A learning rate that breaks the policy: kept groups are of another policy from the first steps on."""
    run = record(task, *KEPT, "actor.optimizer.learning_rate=3", "train.num_episodes=6", **evaluated(task))
    capsys.readouterr()
    cure = ("actor.optimizer.learning_rate=0.01", "algorithm.clip_high=0.3")
    assert main(["diagnose", str(run), "--json", "--try", *cure]) in (0, 3)
    trial = json.loads(capsys.readouterr().out)["trial"]
    assert "was given up" in trial["notes"][0]
    assert "where 0.5 are trusted" in trial["notes"][0]
    assert not trial["is_replay"]
    assert trial["run"].endswith("run-try-2")
