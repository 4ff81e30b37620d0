"""Weights & Biases that cannot be reached, is offline or is broken: the run ends as if it had never been asked for."""

import json
import os
import sys
from pathlib import Path

import preloaded
import pytest
from loop_cases import make_task, rl_yaml
from paused_runs import wait_for
from safetensors.torch import load_file

from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.loop.run import start
from hotseat.observe import read_lines
from hotseat.processes.supervisor import marked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KEY = "0123456789" * 4
MARK = "TEST_TRACKERS"  # in the environment of everything that a run of these tests starts
NOBODY = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
TIMEOUT_S = 860.0  # of a run, which then fails

# `hotseat`, which gives Weights & Biases other limits.
WITH_LIMITS = """
import dataclasses, json, sys
from hotseat.cli.main import main
from hotseat.observe import tracker_sink
tracker_sink.WANDB = dataclasses.replace(tracker_sink.WANDB, **json.loads(sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""


def run_command(task: Path, name: str, *overrides: str, limits: dict[str, float] | None = None, **env: str) -> str:
    """Run `hotseat run` in a process of its own, of which nothing may be left, and return its output."""
    (task / f"{name}.yaml").write_text(rl_yaml(task, name=name))
    mark = f"{os.getpid()}-{name}"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    hotseat = ["-c", WITH_LIMITS, json.dumps(limits)] if limits else ["-m", "hotseat.cli.main"]
    command = [sys.executable, *hotseat, "run", str(task / f"{name}.yaml"), *overrides]
    done = preloaded.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**clean, **env, MARK: mark})
    assert done.returncode == 0, done.stderr[-3000:]
    assert wait_for(lambda: not marked(MARK, [mark]), 60), marked(MARK, [mark])
    assert KEY not in done.stdout + done.stderr
    return done.stdout + done.stderr


def outcome(task: Path, name: str) -> tuple[list[dict], dict]:
    timing = ("time/", "memory/", "machine/", "sync/", "step_s", "tokens_per_s")
    records = read_lines(task / "runs" / name / "metrics.jsonl")
    weights = load_file(task / "runs" / name / "model" / "model.safetensors")
    return (
        [{key: value for key, value in record.items() if not key.startswith(timing)} for record in records],
        {key: value.numpy().tobytes() for key, value in weights.items()},
    )


def warnings(said: str) -> list[str]:
    return [line for line in said.splitlines() if "Weights & Biases" in line and "warning" in line]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A task, with the run `plain` on it without Weights & Biases."""
    task = make_task(tmp_path_factory.mktemp("task"))
    run_command(task, "plain", "checkpoint.every=1")
    return task


@pytest.mark.long
def test_a_server_that_cannot_be_reached_changes_nothing(task):
    """Scenario 40: and scenario 46: the key is in no file of the run.

    W&B may take two hours to start: a run that waited for it, at any time, would not end before it is ended.
    """
    said = run_command(task, "alone", "checkpoint.every=1", limits={"start_s": 7200.0}, **NOBODY)
    assert outcome(task, "alone") == outcome(task, "plain")
    assert len(warnings(said)) == 1
    for path in (task / "runs" / "alone").rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.long
def test_offline_a_run_is_kept_for_later(task):
    """Scenario 40."""
    patient = {"close_s": 120.0}
    said = run_command(task, "offline", "log.wandb.enabled=true", limits=patient, WANDB_MODE="offline")
    assert warnings(said) == []
    [kept] = (task / "runs" / "offline" / "wandb").glob("offline-run-*/run-*.wandb")
    assert kept.stat().st_size > 1000
    sent = kept.read_bytes()
    assert b"group_reward_std" in sent
    assert b"machine/cpu" in sent
    assert b"machine/memory" in sent


@pytest.mark.parametrize(
    ("name", "init"),
    [
        pytest.param("raises", "raise RuntimeError('no')", marks=pytest.mark.long),
        pytest.param("hangs", "time.sleep(10000)", marks=pytest.mark.long),
        ("dies", "os.kill(os.getpid(), 9)"),
    ],
)
def test_a_broken_package_changes_nothing(task, tmp_path, name, init):
    """Scenario 40."""
    (tmp_path / "wandb.py").write_text(
        f"import os, time\nclass Settings:\n    def __init__(self, **given): pass\ndef init(**given): {init}\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    said = run_command(task, name, "checkpoint.every=1", PYTHONPATH=path, **NOBODY)
    assert outcome(task, name) == outcome(task, "plain")
    assert len(warnings(said)) == 1


def test_a_package_that_is_not_there_is_refused_or_noted(tmp_path, monkeypatch, capsys):
    task = make_task(tmp_path)
    monkeypatch.setattr("hotseat.observe.tracker_sink.Tracker.is_installed", lambda self: False)
    with pytest.raises(UserError, match=r"log.wandb.enabled: the wandb package .* pip install 'hotseat\[wandb\]'"):
        start(loads(rl_yaml(task), ["log.wandb.enabled=true"]))
    assert not (task / "runs").exists()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    start(loads(rl_yaml(task)))
    assert capsys.readouterr().out.count("WANDB_API_KEY is set, but the wandb package is not installed") == 1
