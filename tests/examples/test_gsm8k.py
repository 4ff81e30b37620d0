"""examples/gsm8k, with rows as GSM8K has them and a tiny model, and the reward of its benchmark."""

import importlib.util
import json
from pathlib import Path

import pytest

from hotseat.config import load
from hotseat.observe import read_lines

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "gsm8k" / "grpo.yaml"


def rows(numbers):
    return [
        {
            "question": f"Ann has {number} apples and buys 4. How many has she?",
            "answer": f"She has {number} + 4 = <<{number}+4={number + 4}>>{number + 4}.\n#### {number + 4:,}",
        }
        for number in numbers
    ]


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_rollout_is_one_optimizer_step():
    config = load(CONFIG)
    assert config.rollout.batch_size * config.rollout.samples_per_prompt == config.train.batch_size


@pytest.mark.slow
def test_it_runs_on_rows_as_they_are_published(tmp_path):
    from verl_cases import make_chat_model

    from hotseat.loop.run import start

    overrides = {
        "actor.model": make_chat_model(tmp_path / "model"),
        "data.path": written(tmp_path / "train.jsonl", rows([1, 2, 1000, 31])),
        "eval.path": written(tmp_path / "test.jsonl", rows([5, 6])),
        "data.max_length": 128,
        "rollout.batch_size": 2,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 8,
        "train.batch_size": 4,
        "train.dtype": "fp32",
        "run_dir": tmp_path / "runs",
        "cluster.runtime": "local",
    }
    start(load(CONFIG, [f"{key}={value}" for key, value in overrides.items()]))
    run_dir = tmp_path / "runs" / "gsm8k"
    records = read_lines(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(0 <= records[step]["eval/accuracy"] <= 1 for step in (0, 2))
    samples = read_lines(run_dir / "samples.jsonl")
    assert {sample["state"] for sample in samples} == {"trained"}  # the grader reads every label
    assert all("apples and buys 4" in sample["prompt_text"] for sample in samples)


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        (r"So it is \boxed{72}.", "72", 1.0),
        (r"\boxed{7} no, \boxed{72}", "72", 1.0),
        (r"\boxed{72} no, \boxed{7}", "72", 0.0),
        (r"\boxed{\$1,200.00}", "1200", 1.0),
        (r"\boxed{-3}", "-3", 1.0),
        ("72", "72", 0.0),
        (r"\boxed{x}", "72", 0.0),
        (r"\boxed{1.2.3}", "72", 0.0),
    ],
)
def test_the_benchmark_rewards_the_number_in_the_last_box(answer, label, expected):
    spec = importlib.util.spec_from_file_location("gsm8k_task", ROOT / "bench" / "lib" / "gsm8k_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    completions = [[{"role": "assistant", "content": answer}]]
    assert module.reward_func(completions=completions, label=[label], prompts=None) == [expected]
