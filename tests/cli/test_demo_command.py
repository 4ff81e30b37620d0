"""The demo's files."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from environments import own_environment

from hotseat.cli.demo_command import GRPO, SFT, free_directory, run_demo
from hotseat.config import loads
from hotseat.config.conflicts import missing
from hotseat.demo import make_files
from hotseat.errors import UserError
from hotseat.observe import read_lines

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_single_file.py"

NAMES = {
    "directory": "/d",
    "seed": 1,
    "model": "m",
    "examples": "e",
    "prompts": "p",
    "held_out": "h",
    "reward": "r.py",
    "num_prompts": 32,
}


@pytest.mark.slow
def test_the_same_seed_writes_the_same_files(tmp_path):
    a, b, c = (make_files(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert a.prompts.read_bytes() == b.prompts.read_bytes() != c.prompts.read_bytes()
    weights = "model.safetensors"
    assert (a.model / weights).read_bytes() == (b.model / weights).read_bytes() != (c.model / weights).read_bytes()
    held_out = {json.loads(line)["input"] for line in a.held_out.read_text().splitlines()}
    seen = {json.loads(line)["input"] for path in (a.prompts, a.examples) for line in path.read_text().splitlines()}
    assert len(held_out) == 200
    assert not held_out & seen


def test_the_configs_are_complete():
    for text in (SFT, GRPO):
        assert missing(loads(text.format(**NAMES))) == []


def test_a_directory_in_use_is_not_touched(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is not empty: give another --dir"):
        run_demo(Namespace(dir=str(tmp_path), seed=0))


def test_another_demo_gets_a_directory_of_its_own(tmp_path):
    assert free_directory(tmp_path) == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert free_directory(tmp_path) == tmp_path / "demo"
    (tmp_path / "demo" / "file").touch()
    assert free_directory(tmp_path) == tmp_path / "demo-2"


def run_demo_command(directory: Path, seed: int) -> list[dict]:
    env = own_environment()
    command = [sys.executable, "-m", "hotseat.cli.main", "demo", "--dir", str(directory), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_lines(directory / "grpo" / "metrics.jsonl")


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_and_the_single_file_ends_where_it_does(tmp_path, seed):
    records = run_demo_command(tmp_path / "demo", seed)
    curve = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert curve[0] <= 0.5
    assert curve[-1] >= 0.9
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--seed", str(seed)], capture_output=True, text=True, timeout=600, check=True
    )
    single = float(done.stdout.rpartition("held-out exact match ")[2].rstrip("%\n")) / 100
    assert abs(single - curve[-1]) <= 0.03


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_the_same_seed_gives_the_same_curve_to_the_last_digit(tmp_path):
    timing = ("time/", "memory/", "machine/", "sync/", "step_s", "tokens_per_s")
    first, second = (run_demo_command(tmp_path / name, 0) for name in ("a", "b"))
    assert len(first) == 81
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timing)} == {
            k: v for k, v in b.items() if not k.startswith(timing)
        }
