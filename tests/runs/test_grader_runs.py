"""Graders in a run: what is refused before a model loads, and what a tiny run logs and records."""

import json
import os
import sys

import pytest
from model_shells import make_shell

from hotseat.checks.pipeline import check_config, check_user_code
from hotseat.config import loads
from hotseat.errors import ConfigError, UserError


def refusal(tmp_path, graders: str) -> str:
    make_shell(tmp_path / "model", model_type="llama", max_position_embeddings=32)
    (tmp_path / "rows.jsonl").write_text('{"input": "1+1="}\n')
    with pytest.raises(UserError) as caught:
        check_config(
            loads(
                f"{{actor: {{model: {tmp_path}/model}}, data: {{path: {tmp_path}/rows.jsonl, max_length: 16}},"
                f" rollout: {{samples_per_prompt: 8}}, name: mine, reward: {{graders: {graders}}}}}"
            )
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("reward", "key", "said"),
    [
        ("{graders: [{kind: maths}]}", "reward.graders[0].kind", "math"),
        ("{graders: [{kind: exact, patern: x}]}", "reward.graders[0].patern", "pattern"),
        ("{graders: [{kind: regex}]}", "reward.graders[0].pattern", "not set: kind regex needs it"),
        ("{graders: [{kind: json}]}", "reward.graders[0].json_schema", "not set: kind json needs it"),
        (
            "{graders: [{kind: exact, pattern: x}]}",
            "reward.graders[0].pattern",
            "no effect on kind exact; it is for kind",
        ),
        ("{graders: [{kind: exact, partial: true}]}", "reward.graders[0].partial", "it is for kind code"),
        ("{graders: [{kind: code, timeout_s: 3}]}", "reward.graders[0].timeout_s", "set reward.sandbox.timeout_s"),
        ("{graders: [{kind: exact}, {kind: exact}]}", "reward.graders[1].name", "'exact' is taken"),
        ("{function: f.py, graders: [{kind: exact, name: function}]}", "reward.graders[0].name", "is taken"),
        ("{model: m, graders: [{kind: exact}]}", "reward.graders", "cannot be added to reward.model"),
        (
            "{graders: [{kind: code}], sandbox: {command: [docker]}}",
            "reward.sandbox.command",
            "no part of it contains {folder}",
        ),
        (
            "{graders: [{kind: code}], sandbox: {command: ['{folder}'], python: p}}",
            "reward.sandbox.python",
            "reward.sandbox.command starts Python itself",
        ),
    ],
)
def test_bad_options_are_errors_of_the_config(reward, key, said):
    with pytest.raises(ConfigError) as caught:
        loads(f"reward: {reward}")
    [problem] = caught.value.problems
    assert problem.key == key
    assert said in str(caught.value)


def test_bad_patterns_and_schemas_are_refused_at_once(tmp_path):
    said = refusal(tmp_path, "[{kind: exact}, {kind: regex, pattern: 'a(b'}]")
    assert "reward.graders[1]: pattern 'a(b' is no regular expression" in said
    said = refusal(tmp_path, "[{kind: json, json_schema: {type: text}}]")
    assert "reward.graders[0]: json_schema is no JSON schema: 'text'" in said


def test_a_missing_package_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as if it were not installed
    assert "reward.graders[0]: kind math needs the package math-verify" in refusal(tmp_path, "[{kind: math}]")


def test_a_missing_sandbox_is_refused_before_a_model_loads(monkeypatch):
    shown = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(UserError, match="bwrap is missing; install the package bubblewrap"):
        check_user_code(loads("reward: {graders: [{kind: code}]}"), shown.append)
    assert shown == ["running a program in the sandbox, to see that it works"]
    check_user_code(loads("reward: {graders: [{kind: exact}]}"), shown.append)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere")
    check_user_code(loads("reward: {graders: [{kind: code}]}"), shown.append)
    assert len(shown) == 1


@pytest.mark.slow
def test_a_run_with_graders_logs_each_of_them(task):
    from loop_cases import rl_yaml

    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    graders = "[{kind: regex, name: digit, pattern: '[0-9]', weight: 0.5}, {kind: number, weight: 2}]"
    reward = f"{{function: {task}/reward.py, max_failed_fraction: 0.5, graders: {graders}}}"
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    rows[0]["label"] = "none"  # a label that the grader of numbers cannot read
    (task / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start(loads(rl_yaml(task, reward=reward), ["log.samples_every=1", "log.samples_per_step=16"]))
    run = task / "runs" / "run"
    steps = [line for line in read_lines(run / "metrics.jsonl") if "extra/digit" in line]
    assert len(steps) == 2
    samples = [line for line in read_lines(run / "samples.jsonl") if line["reward"] is not None]
    assert len(samples) > 8
    for sample in samples:
        extra = sample["extra"]
        assert set(extra) == {"digit", "number", "function"}
        assert sample["reward"] == pytest.approx(0.5 * extra["digit"] + 2 * extra["number"] + extra["function"])
    ledger = (run / "ledger.jsonl").read_text()
    assert "grader number: the label has no number: 'none'" in ledger


@pytest.mark.slow
def test_a_run_with_generated_code(task):
    """Every answer is a program; the texts of digits and signs that are expressions pass, the others crash."""
    from loop_cases import rl_yaml

    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    config = "{graders: [{kind: code}], sandbox: {max_cpu_s: 2}}"
    try:
        check_user_code(loads(f"reward: {config}"), print)
    except UserError as error:
        pytest.skip(str(error))
    rows = [{"input": f"{number}+1=", "label": [{"call": "2 + 3", "result": 5}]} for number in range(4)]
    (task / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start(loads(rl_yaml(task, reward=config), ["log.samples_every=1", "log.samples_per_step=16"]))
    samples = read_lines(task / "runs" / "run" / "samples.jsonl")
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}
    assert all(sample["extra"] == {"code": sample["reward"]} for sample in samples)
