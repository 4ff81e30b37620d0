"""examples/rlhf_pipeline: its pairs, its three stages in short, and the README's commands with three seeds."""

import importlib.util
import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from environments import own_environment

from hotseat.config import load
from hotseat.demo import answer, careless
from hotseat.loop.run import start
from hotseat.observe import read_lines

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "rlhf_pipeline"
FILES = Path("build/rlhf")  # where the configs look for them, in the folder of the run


def prepare():
    spec = importlib.util.spec_from_file_location("rlhf_prepare", EXAMPLE / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wrong_answers_are_wrong_and_the_pupils_are_among_them():
    module, rng = prepare(), random.Random(0)
    assert module.careless_answers(47, 38) == ["075", "185", "175"]  # a carry forgotten, one invented, both
    for a in range(100):
        for b in range(100):
            right, wrong = answer(a, b), module.careless_answers(a, b)
            assert len({*wrong, right}) == 4
            assert careless(a, b) in (right, *wrong)
            others = module.other_answers(right, 2, rng)
            assert len({*others, right}) == 3


def test_of_each_pair_one_is_right(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    sums = {f"{a:02d}+27=": answer(a, 27) for a in range(100)}
    prompts.write_text("".join(json.dumps({"input": asked, "label": right}) + "\n" for asked, right in sums.items()))
    rows = prepare().pairs(prompts, random.Random(0))
    assert len(rows) == 400
    assert {row["prompt"] for row in rows} == sums.keys()
    assert all(row["chosen"] == sums[row["prompt"]] != row["rejected"] for row in rows)
    assert rows == prepare().pairs(prompts, random.Random(0))


def test_the_stages_hand_their_models_on():
    sft, rm, ppo = (load(EXAMPLE / f"{name}.yaml") for name in ("sft", "rm", "ppo"))
    assert rm.actor.model == ppo.actor.model == ppo.critic.model == f"{sft.run_dir}/{sft.name}/model"
    assert ppo.reward.model == f"{rm.run_dir}/{rm.name}/model"
    assert ppo.reward.function is None  # the true answers are for evaluation alone
    assert ppo.eval.reward == str(FILES / "reward.py")


@pytest.mark.slow
@pytest.mark.long
def test_three_short_stages(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    prepare().main([str(FILES)])
    held_out, learned = (
        {row["prompt"] for row in read_lines(FILES / f"{name}.jsonl")} for name in ("held_out_pairs", "pairs")
    )
    assert len(held_out) == 200
    assert not held_out & learned
    start(load(EXAMPLE / "sft.yaml", ["data.max_samples=1280"]))
    judged = start(load(EXAMPLE / "rm.yaml", ["data.max_samples=1600", "eval.every=null"]))
    assert judged["eval/accuracy"] > 0.6
    sizes = ["data.max_samples=128", "rollout.batch_size=64", "train.batch_size=64", "train.micro_batch_size=64"]
    start(load(EXAMPLE / "ppo.yaml", [*sizes, "critic.warmup_steps=1", "eval.max_samples=20"]))
    said = "".join(capfd.readouterr())
    assert "model: build/rlhf/ppo/model" in said
    assert "LOAD REPORT" not in said  # of the critic's head, which is made anew
    assert "accelerator" not in said  # which DeepSpeed did not find, and nobody asked it
    before, warming_up, learning, *_ = read_lines(FILES / "ppo" / "metrics.jsonl")
    assert 0 <= before["eval/accuracy"] <= 1
    assert "kl" not in warming_up
    assert {"value_loss", "explained_variance"} <= warming_up.keys()
    assert {"loss", "kl", "value_loss"} <= learning.keys()
    assert (FILES / "ppo" / "model" / "model.safetensors").is_file()


def commands(seed: int) -> list[list[str]]:
    """Those of the README, as they are written there, with a seed."""
    [block] = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    programs = {
        "python": ([sys.executable], ["--seed", str(seed)]),
        "hotseat": ([sys.executable, "-m", "hotseat.cli.main"], [f"seed={seed}"]),
    }
    found = []
    for line in block.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        start_with, end_with = programs[program]
        found.append([*start_with, *arguments, *end_with])
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_learned_reward_takes_the_true_one_from_half_to_four_fifths(tmp_path, seed):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = own_environment()
    assert len(commands(seed)) == 4
    for command in commands(seed):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    files = tmp_path / FILES
    judged, *_, last = read_lines(files / "ppo" / "metrics.jsonl")
    assert judged["eval/accuracy"] <= 0.5
    assert last["eval/accuracy"] >= 0.8
    assert read_lines(files / "rm" / "metrics.jsonl")[-1]["eval/accuracy"] > 0.9
