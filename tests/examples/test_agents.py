"""examples/agents: the stages fit together, the form of the data, and the READMEs' commands with their results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from environments import own_environment

from hotseat.config import load
from hotseat.observe import read_lines

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "agents"
NAMES = ("calculator", "guess_number", "reversed_words", "signals")


@pytest.mark.parametrize("name", NAMES)
def test_rl_begins_with_the_model_of_sft_and_the_readme_has_the_curve(name):
    sft, rl = (load(EXAMPLES / name / f"{stage}.yaml") for stage in ("sft", "rl"))
    assert rl.actor.model == f"{sft.run_dir}/{sft.name}/model"
    assert sft.actor.model == f"build/{name}/base_model"
    assert "![" in (EXAMPLES / name / "README.md").read_text()
    assert (EXAMPLES / name / "curve.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_answers_of_the_tiny_model_are_parsed_as_its_template_writes_them():
    from tiny_model import examples_of, make_tokenizer

    tokenizer = make_tokenizer(["calculator"])
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+2"}}}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "0003"},
        {"role": "assistant", "content": "0003"},
    ]
    first, second = examples_of(tokenizer, messages, tools)
    assert first["input"] == "<tools>calculator<end><user>1+2=<end><assistant>"
    assert second["input"] == f"{first['input']}{first['output']}<end><tool>0003<end><assistant>"
    parsed = tokenizer.parse_response(first["output"] + "<end>", prefix=first["input"], tools=tools)
    assert parsed["tool_calls"] == [call]
    assert tokenizer.parse_response("0003<end>", prefix=second["input"])["content"] == "0003"


def run(tmp_path: Path, name: str, seed: int) -> tuple[float, float]:
    """Run the README's commands with a seed; return the held-out success before and after RL."""
    folder = tmp_path / "build" / name
    commands = [
        [str(EXAMPLES / name / "prepare.py"), str(folder), "--seed", str(seed)],
        ["-m", "hotseat.cli.main", "run", str(EXAMPLES / name / "sft.yaml"), f"seed={seed}"],
        ["-m", "hotseat.cli.main", "run", str(EXAMPLES / name / "rl.yaml"), f"seed={seed}"],
    ]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".agent-envs").symlink_to(ROOT / ".agent-envs")
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=own_environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    records = read_lines(folder / "rl" / "metrics.jsonl")
    success = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    return success[0], success[-1]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_use_of_a_calculator_is_learned(tmp_path, seed):
    before, after = run(tmp_path, "calculator", seed)
    assert before <= 0.2
    assert after >= 0.8


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_agents_agree_on_a_code(tmp_path):
    before, after = run(tmp_path, "signals", 0)
    assert before <= 0.35
    assert after >= 0.75


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_environment_of_verifiers_teaches(tmp_path):
    from environment_cases import python_of

    assert python_of("verifiers") is not None
    before, after = run(tmp_path, "reversed_words", 0)
    assert before <= 0.25
    assert after >= 0.7
