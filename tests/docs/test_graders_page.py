"""docs/graders.md: its configs, labels and code do what the page says; the files of examples/rewards score."""

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from hotseat.checks.reward_sources import judge
from hotseat.checks.stage import CheckContext
from hotseat.config import loads
from hotseat.config.presence import has_judge_engine
from hotseat.errors import UserError
from hotseat.loop.settings.rollout_settings import judge_of
from hotseat.rewards import Graders, RewardFunction, Sandbox, SandboxSettings, Score
from hotseat.rewards.answers import read_answer
from hotseat.rewards.function_worker import load, plain
from hotseat.rewards.graders import graders_of
from hotseat.types import Failed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "graders.md").read_text()
SUM, SCHEMA, CODE, RUNNER, JUDGE, WORDS, OWN_JUDGE = (
    loads(text) for text in re.findall(r"```yaml[^\n]*\n(.*?)```", PAGE, re.DOTALL)
)
[LABEL] = re.findall(r"```json[^\n]*\n(.*?)```", PAGE, re.DOTALL)
[IN_A_FILE] = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = ROOT / "examples" / "rewards"
WIDE = 120.0

pytestmark = pytest.mark.slow

ADDS = """
def add(a, b):
    return a + b

if __name__ == "__main__":
    print(add(*map(int, input().split())))
"""


@pytest.fixture(scope="module")
def _sandbox():
    try:
        Sandbox(SandboxSettings()).probe()
    except UserError as error:
        pytest.skip(str(error))


def scored(function, answers: list[str], label: str | None) -> list[Score | Failed]:
    ids = [f"0/0/{number}" for number in range(len(answers))]
    queries = [f"Q:{answer}" for answer in answers]
    with function:
        return function.submit(queries, ["Q:"] * len(answers), [label] * len(answers), ids).result(WIDE)


def rewards_of(config, answers: list[str], label: str | None) -> list[float]:
    found = scored(
        Graders(graders_of(config.reward.graders), sandbox=SandboxSettings.of_config(config.reward.sandbox)),
        answers,
        label,
    )
    return [each.reward for each in found]


def test_the_weighted_sum():
    assert rewards_of(SUM, ["#### 18", "18", "17", "#### 17"], "18") == pytest.approx([1.1, 1.0, 0.0, 0.1])


def test_the_schema():
    assert rewards_of(SCHEMA, ['{"city": "Rome"}', '{"city": 1}', "Rome"], None) == [1, 0, 0]


@pytest.mark.usefixtures("_sandbox")
def test_the_tests_of_code():
    label = LABEL
    assert rewards_of(CODE, [ADDS, "print(5)", "1 / 0"], label) == [1, 0.5, 0]
    assert SandboxSettings.of_config(CODE.reward.sandbox) == SandboxSettings()  # the page shows the defaults


def test_the_other_runner(tmp_path, monkeypatch):
    """A docker that runs what it was given, without a container."""
    arguments = ["run", "--rm", "-i", "--network", "none", "-v", "*:/program:ro", "python:3.12", "python", "/program/*"]
    (tmp_path / "docker").write_text(
        f'#!/bin/sh\n[ $# = {len(arguments)} ] || exit 9\nexec {sys.executable} "${{7%%:*}}/main.py"\n'
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert rewards_of(RUNNER, [ADDS, "print(5)"], LABEL) == [1, 0]


@pytest.mark.usefixtures("_sandbox")
def test_the_sandbox_in_a_reward_file(tmp_path):
    (tmp_path / "reward.py").write_text(IN_A_FILE)
    found = scored(RewardFunction(tmp_path / "reward.py", retries=0), ["print(2 + 3)", "print(2)", "oops"], "5")
    assert [each.reward for each in found] == [1, 0, 0]


# --- examples/rewards -------------------------------------------------------------------------------------------------


def test_the_example_for_numbers():
    answers = ["The answer is: 42", "40 + 2 = 42", "#### 42", "It is 42 = 41", "#### 1,042", "forty-two"]
    found = scored(RewardFunction(EXAMPLES / "reward_func_math.py", retries=0), answers, "42")
    assert [each.reward for each in found] == [1, 1, 1, 0, 0, -0.5]
    assert [each.score for each in found] == pytest.approx([1, 1, 1, 1 / 3, 1 / 3, 0])
    assert found[5].extra == {"math_accuracy": 0.0, "answer_formatted": 0.0}


@pytest.mark.usefixtures("_sandbox")
def test_the_example_for_code():
    label = json.dumps([{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "2"}])
    answers = [f"So:\n```python{ADDS}```", "print(5)", "print(0)", "while True: pass", "1 / 0"]
    found = scored(RewardFunction(EXAMPLES / "reward_func_code_gen.py", retries=0), answers, label)
    assert [each.reward for each in found] == [1, 0.3, 0, -0.5, -1]
    assert found[1].score == pytest.approx(0.65)


def test_the_example_for_conversations(tmp_path, monkeypatch):
    runpy.run_path(str(EXAMPLES / "make_classifier.py"))["main"](str(tmp_path / "classifier"))
    monkeypatch.setenv("QUALITY_MODEL", str(tmp_path / "classifier"))
    kind = "Of course, I am happy to help you, thank you for this great question, please ask again"
    rude = "You stupid idiot, I hate this, shut up, it is boring and useless, so go away, whatever"
    # Loaded as a worker process does, but in this one, which has imported transformers already.
    reward_func = load(str(EXAMPLES / "reward_func_conversation.py"), "reward_func")
    answers = [kind, rude, "thank you"]
    found = read_answer(plain(reward_func([f"Q:{each}" for each in answers], ["Q:"] * 3, [None] * 3)), 3)
    assert found[0].reward > 0.9
    assert found[1].reward < 0.1
    assert 0.4 < found[2].reward < 0.5  # kind, and short
    assert found[0].extra["max_quality"] == pytest.approx(found[0].reward)


def test_the_judges_of_the_page_and_of_the_example(monkeypatch):
    monkeypatch.chdir(ROOT)
    example = loads((ROOT / "examples" / "judge" / "run.yaml").read_text())
    for config in (JUDGE, example):
        assert list(judge(CheckContext(config=config))) == []
        found = judge_of(config, None)
        assert (found.votes, found.combine, found.weight, found.temperature) == (3, "median", 0.3, 1.0)
        assert re.findall(found.pattern, found.rubric) == []  # what it asks for is not taken for a verdict
        assert all(place in found.rubric for place in ("{prompt}", "{label}", "{answer}"))
    assert re.compile(WORDS.reward.judge.pattern).findall("Well, yes. No!") == ["yes", "No"]
    assert WORDS.reward.judge.choices == {"yes": 10, "no": 0}
    assert has_judge_engine(OWN_JUDGE)
    assert not has_judge_engine(JUDGE)
