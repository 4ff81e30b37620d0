"""examples/count_shapes: its reward is right, it learns from pixels with three seeds, and resumes to the same bits."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from stopped_runs import stopped_after_saving

from hotseat.config import load
from hotseat.observe import read_lines

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "count_shapes"
CONFIG = "examples/count_shapes/grpo.yaml"
FOLDER = Path("build/count_shapes")


def module(name):
    spec = importlib.util.spec_from_file_location(f"count_{name}", EXAMPLE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def at_root(tmp_path, monkeypatch):
    """A working directory in which the commands of the README work."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


def accuracies_of(name):
    records = read_lines(FOLDER / name / "metrics.jsonl")
    return [record["eval/accuracy"] for record in records if "eval/accuracy" in record]


def test_only_the_right_count_is_rewarded():
    reward = module("reward").reward_func
    assert reward(["q3", "q33", "q2", "q", "q3<eos>"], ["q"] * 5, ["3"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_as_many_discs_are_drawn_as_are_asked_for():
    prepare, rng = module("prepare"), random.Random(0)
    for count in range(1, prepare.MOST + 1):
        image = prepare.draw(count, rng).convert("L")
        cell, cells = prepare.CELL, range(prepare.NUM_CELLS)
        centres = [image.getpixel((cell * x + cell // 2, cell * y + cell // 2)) for x in cells for y in cells]
        assert sum(value > 60 for value in centres) == count


@pytest.mark.slow
@pytest.mark.long
def test_a_third_of_the_steps_learns_to_count_most_images(at_root):
    from hotseat.loop.run import start

    module("prepare").make_files(FOLDER, 0, num_questions=512, num_held_out=64)
    start(load(CONFIG, ["eval.every=16", "train.num_episodes=1"]))
    before, after = accuracies_of("grpo")
    assert before <= 0.4
    assert after >= 0.6


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_counting_is_learned_from_pixels_and_a_resumed_run_learns_the_same_bits(seed, at_root):
    from loop_cases import same
    from safetensors.torch import load_file

    from hotseat.cli.main import main
    from hotseat.loop.run import start

    prepare = ["examples/count_shapes/prepare.py", str(FOLDER), "--seed", str(seed)]
    subprocess.run([sys.executable, *prepare], check=True, timeout=1000)
    assert main(["run", CONFIG, f"seed={seed}"]) == 0
    accuracies = accuracies_of("grpo")
    assert accuracies[0] <= 0.4
    assert accuracies[-1] >= 0.9

    with stopped_after_saving():
        start(load(CONFIG, [f"seed={seed}", "name=part", "checkpoint.every=16"]))
    assert main(["resume", str(FOLDER / "part")]) == 0
    assert accuracies_of("part") == accuracies
    whole, part = (load_file(FOLDER / name / "model" / "model.safetensors") for name in ("grpo", "part"))
    assert same(whole, part)
