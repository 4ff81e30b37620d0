"""examples/dpo: its sampler, its stages in short, and the README's commands with three seeds."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hotseat.config import load
from hotseat.demo import answer, make_files, question
from hotseat.loop.run import start
from hotseat.observe import read_lines

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dpo"
FILES = Path("build/dpo")  # where the configs look for them, in the folder of the run


def sampler():
    spec = importlib.util.spec_from_file_location("dpo_sample", EXAMPLE / "sample.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stages_hand_their_models_on_and_dpo_has_no_likelihood_term():
    sft, dpo, chosen = (load(EXAMPLE / f"{name}.yaml") for name in ("sft", "dpo", "sft_chosen"))
    assert dpo.actor.model == chosen.actor.model == f"{sft.run_dir}/{sft.name}/model"
    assert (dpo.algorithm.dpo.loss, dpo.algorithm.dpo.nll_coef) == ("dpo", 0)
    assert (dpo.train, dpo.actor.optimizer) == (chosen.train, chosen.actor.optimizer)


def test_of_each_pair_one_is_right_and_both_were_sampled(tmp_path, monkeypatch):
    module = sampler()
    make_files(tmp_path, seed=0)
    asked = {question(a, b): answer(a, b) for a in range(100) for b in range(100)}
    made = ["199", "", "right", "198"]  # what the model is taken to say to every sum

    def sampled(model, prompts, count, seed, temperature):
        return [[asked[prompt] if text == "right" else text for text in made] for prompt in prompts]

    monkeypatch.setattr(module, "sample", sampled)
    module.make_pairs(tmp_path, tmp_path, 50, 4, 0)
    pairs = read_lines(tmp_path / "pairs.jsonl")
    assert len({pair["prompt"] for pair in pairs}) == 50
    assert all(pair["chosen"] == asked[pair["prompt"]] != pair["rejected"] for pair in pairs)
    assert {pair["rejected"] for pair in pairs} == {"199", "198"}
    chosen = [{"input": pair["prompt"], "output": pair["chosen"]} for pair in pairs]
    assert read_lines(tmp_path / "chosen.jsonl") == chosen


@pytest.mark.slow
def test_short_stages(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    make_files(FILES, seed=0, num_layers=1, width=32)
    module = sampler()
    start(load(EXAMPLE / "sft.yaml", ["data.max_samples=1600"]))
    model = FILES / "sft" / "model"
    [first], [again] = (module.sample(model, ["07+35="], 3, 0, temperature=1.0) for _ in range(2))
    assert first == again
    assert len(first) == 3
    module.main(["pairs", str(model), str(FILES), "--prompts", "1000"])
    # A model that has learned so little has few pairs.
    few = ["train.max_epochs=1", "train.batch_size=1", "train.micro_batch_size=1", "data.max_samples=8"]
    start(load(EXAMPLE / "dpo.yaml", few))
    module.main(["score", str(FILES / "dpo" / "model"), str(FILES)])
    assert re.search(r"build/dpo/dpo/model: [\d.]+% of 200 held-out sums right", capfd.readouterr().out)


def commands(seed: int) -> list[list[str]]:
    """Those of the README, as they are written there, with a seed."""
    [block] = re.findall(r"```bash\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    found = []
    for line in block.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "hotseat":
            found.append([sys.executable, "-m", "hotseat.cli.main", *arguments, f"seed={seed}"])
        else:
            found.append([sys.executable, *arguments, "--seed", str(seed)])
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dpo_answers_twenty_points_more_sums_right_than_sft(tmp_path, seed):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scores = {}
    for command in commands(seed):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=os.environ)
        assert done.returncode == 0, done.stderr[-3000:]
        for name, share in re.findall(r"build/dpo/(\w+)/model: ([\d.]+)% of 200 held-out sums", done.stdout):
            scores[name] = float(share)
    assert scores.keys() == {"sft", "dpo", "sft_chosen"}
    assert scores["dpo"] >= scores["sft"] + 20
