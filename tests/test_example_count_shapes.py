"""examples/count_shapes: its stages fit, its reward is right, and it learns from pixels with three seeds."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hotseat.config import load
from hotseat.observe import read_lines

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "count_shapes"


def module(name):
    spec = importlib.util.spec_from_file_location(f"count_{name}", EXAMPLE / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_stages_hand_their_model_on():
    sft, grpo = (load(EXAMPLE / f"{name}.yaml") for name in ("sft", "grpo"))
    assert grpo.actor.model == f"{sft.run_dir}/{sft.name}/model"
    assert sft.data.image_key == grpo.data.image_key == "images"


def test_only_the_right_count_is_rewarded():
    reward = module("reward").reward_func
    assert reward(["q3<eos>", "q3", "q33", "q2<eos>", "q"], ["q"] * 5, ["3"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_as_many_discs_are_drawn_as_are_asked_for():
    prepare, rng = module("prepare"), random.Random(0)
    for count in range(1, prepare.MOST + 1):
        image = prepare.draw(count, rng).convert("L")
        cell, cells = prepare.CELL, range(prepare.NUM_CELLS)
        centres = [image.getpixel((cell * x + cell // 2, cell * y + cell // 2)) for x in cells for y in cells]
        assert sum(value > 60 for value in centres) == count


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_counting_is_learned_from_rewards(seed, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    stages = [
        ["examples/count_shapes/prepare.py", "build/count_shapes", "--seed", str(seed)],
        ["-m", "hotseat", "run", "examples/count_shapes/sft.yaml", f"seed={seed}"],
        ["-m", "hotseat", "run", "examples/count_shapes/grpo.yaml", f"seed={seed}"],
    ]
    for stage in stages:
        subprocess.run([sys.executable, *stage], cwd=tmp_path, check=True, timeout=3000)
    records = read_lines(tmp_path / "build" / "count_shapes" / "grpo" / "metrics.jsonl")
    accuracies = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert accuracies[0] <= 0.4
    assert accuracies[-1] >= 0.9
