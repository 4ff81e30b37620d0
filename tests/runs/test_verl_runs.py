"""verl's commands, whole: with tiny models, few rows and short answers; all else is as they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from verl_cases import COMMANDS, MATH, cut, make_materials

from hotseat.config import load
from hotseat.observe import read_lines
from hotseat.verl.scores import GSM8K
from hotseat.verl.shim import DIRECTORY
from hotseat.verl.verl_command import main

ROOT = Path(__file__).parents[2]
LOCAL = "hotseat.cluster.runtime=local"
OTHERS = sorted({path.stem for path in COMMANDS} - {"quickstart"})

pytestmark = pytest.mark.slow


def run(name: str, folder: Path, monkeypatch, *more: str) -> list[dict]:
    """Run a command in this process, and return the metrics of its steps."""
    monkeypatch.chdir(folder)
    needed = make_materials(name, folder)
    assert main([*cut(name, folder), *needed, LOCAL, *more]) == 0
    return read_lines(folder / "runs" / "rl-1" / "metrics.jsonl")


def check_ends(folder: Path, metrics: list[dict], num_steps: int) -> None:
    assert [line["step"] for line in metrics] == list(range(num_steps + 1))
    assert (folder / "runs" / "rl-1" / "model" / "model.safetensors").is_file()
    config = load(folder / "runs" / "rl-1" / "config.yaml")
    assert (Path(folder) / config.checkpoint.path / f"step-{num_steps:06d}").is_dir()


def test_the_quickstart_runs_whole_and_again_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    metrics = run("quickstart", tmp_path, monkeypatch)
    check_ends(tmp_path, metrics, 2)
    assert all("value_loss" in line for line in metrics[1:])  # PPO has a critic
    assert "eval/reward" in metrics[0]  # before the first step
    # The same command again, with more to do: trainer.resume_mode is auto.
    assert main([*cut("quickstart", tmp_path, **{"trainer.total_epochs": 2}), LOCAL]) == 0
    check_ends(tmp_path, read_lines(tmp_path / "runs" / "rl-1" / "metrics.jsonl"), 4)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_a_command_runs_whole(name, tmp_path, monkeypatch):
    metrics = run(name, tmp_path, monkeypatch)
    check_ends(tmp_path, metrics, 2)
    has_reference = name != "ppo_8b"
    assert all(("kl" in line, "value_loss" in line) == (has_reference, not has_reference) for line in metrics[1:])
    if name == "ppo_8b":
        assert all("is_math" in str(line) for line in metrics[1:])  # a further number of the reward function's dict
        assert {f"eval/{source}/reward" for source in (GSM8K, MATH)} <= set(metrics[0])  # by data_source


@pytest.mark.ray
@pytest.mark.long
def test_the_quickstart_runs_under_verls_own_name(tmp_path):
    needed = make_materials("quickstart", tmp_path)
    words = [sys.executable, "-m", "verl.trainer.main_ppo", *cut("quickstart", tmp_path), *needed]
    env = {**os.environ, "PYTHONPATH": f"{DIRECTORY}:{ROOT}"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    check_ends(tmp_path, read_lines(tmp_path / "runs" / "rl-1" / "metrics.jsonl"), 2)
