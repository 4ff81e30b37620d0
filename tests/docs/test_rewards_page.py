"""docs/rewards.md: its functions can be used, and say what the page says."""

import re
from pathlib import Path

import pytest

from hotseat.rewards import RewardFunction, Score
from hotseat.rewards.scorer import NamedArguments
from hotseat.types import Failed

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
ONE_NUMBER, BY_NAMES, TENSOR, DICT, NONE = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)


def scores(tmp_path, text: str, answers: list[str], label: str | None) -> list[Score | Failed]:
    (tmp_path / "reward.py").write_text(text)
    with RewardFunction(tmp_path / "reward.py", retries=0) as function:
        queries = [f"Q:{answer}" for answer in answers]
        ids = [f"0/0/{number}" for number in range(len(answers))]
        return function.submit(queries, ["Q:"] * len(answers), [label] * len(answers), ids).result(60)


@pytest.mark.parametrize("text", [ONE_NUMBER, pytest.param(TENSOR, marks=pytest.mark.slow)])
def test_numbers_in_every_form(tmp_path, text):
    assert [score.reward for score in scores(tmp_path, text, ["it is two", "three"], "two")] == [1.0, 0.0]


def test_a_function_of_trls_form(tmp_path):
    (tmp_path / "reward.py").write_text(BY_NAMES)
    named = NamedArguments({"prompt": "Q:", "answer": "two"}, ["two ", "three"], [[1], [2]])
    with RewardFunction(tmp_path / "reward.py", retries=0) as function:
        found = function.submit(["Q:two ", "Q:three"], ["Q:"] * 2, [""] * 2, ["0/0/0", "0/0/1"], named).result(60)
    assert [score.reward for score in found] == [1.0, 0.0]


def test_a_dict_with_scores_and_logs(tmp_path):
    right, wrong = scores(tmp_path, DICT, ["two", "three"], "two")
    assert right == Score(1 - 0.03, 1.0, {"right": 1.0, "group_size": 2.0})
    assert wrong == Score(-0.05, 0.0, {"right": 0.0, "group_size": 2.0})


def test_none_is_a_reward_that_failed(tmp_path):
    assert all(isinstance(sample, Failed) for sample in scores(tmp_path, NONE, ["two", "three"], ""))
    assert [sample.reward for sample in scores(tmp_path, NONE, ["two", "three"], "two")] == [1.0, 0.0]


def test_a_list_of_dicts_is_an_error(tmp_path):
    text = "def reward_func(queries, prompts, labels):\n    return [{'rewards': 1.0} for _ in queries]\n"
    assert "returned rewards with a dict for sample 0, not a number" in scores(tmp_path, text, ["two"], "two")[0].reason
