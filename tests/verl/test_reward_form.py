"""Reward functions of verl's form, and its built-in scoring."""

import asyncio

import pytest

from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.failed import Failed
from hotseat.rewards import RewardFunction
from hotseat.rewards.answers import Score
from hotseat.rewards.scorer import NamedArguments
from hotseat.verl.reward_form import adapted
from hotseat.verl.scores import GSM8K, verl_score

ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "mine",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}


def columns(num=2, **changes):
    row = {name: value for name, value in (ROW | changes).items() if name != "prompt"}
    return {name: [value] * num for name, value in row.items()}


# --- the form ---------------------------------------------------------------------------------------------------------


def test_each_answer_is_scored_by_names():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        return len(solution_str)

    found = adapted(compute_score)(["a", "bc"], **columns())
    assert found == {"rewards": [1.0, 2.0], "extra_logs": {}}
    assert calls == [
        ("mine", "a", "4", {"split": "train", "index": 7}),
        ("mine", "bc", "4", {"split": "train", "index": 7}),
    ]


def test_answers_of_a_chat_are_their_texts():
    chat = [[{"role": "assistant", "content": "abc"}]]
    assert adapted(lambda solution_str, **_: len(solution_str))(chat, **columns(1))["rewards"] == [3.0]


def test_other_numbers_of_a_dict_become_metrics():
    results = iter([{"score": 1, "acc": True, "pred": "4", "n": 2.5}, {"score": False, "acc": False}])
    found = adapted(lambda solution_str, **_: next(results))(["a", "b"], **columns())
    assert found == {"rewards": [1.0, 0.0], "extra_logs": {"acc": [1.0, 0.0], "n": [2.5, None]}}


def test_numbers_of_numpy_and_torch_are_numbers():
    import numpy as np
    import torch

    results = iter([np.float32(0.5), torch.tensor([2.0])])
    assert adapted(lambda solution_str, **_: next(results))(["a", "b"], **columns())["rewards"] == [0.5, 2.0]


def test_answers_of_a_coroutine_are_scored_at_the_same_time():
    both = asyncio.Barrier(2)

    async def compute_score(solution_str, **_):
        await both.wait()
        return {"score": len(solution_str)}

    async def run():
        return await asyncio.wait_for(adapted(compute_score)(["a", "bc"], **columns()), 5)

    assert asyncio.run(run())["rewards"] == [1.0, 2.0]


def test_a_row_without_extra_info_has_none():
    seen = []
    adapted(lambda solution_str, extra_info, **_: seen.append(extra_info) or 0)(["a"], ["x"], [{"ground_truth": 1}])
    assert seen == [{}]


def test_a_function_cannot_change_the_row_for_its_siblings():
    def compute_score(solution_str, extra_info, **_):
        extra_info["index"] += 1
        return extra_info["index"]

    assert adapted(compute_score)(["a", "b"], **columns())["rewards"] == [8.0, 8.0]


@pytest.mark.parametrize("result", [None, "1", {"acc": 1}, [1, 2]])
def test_what_is_no_score_is_an_error(result):
    with pytest.raises(TypeError, match="neither a number nor a dict with the key 'score'"):
        adapted(lambda solution_str, **_: result)(["a"], **columns(1))


def test_a_row_without_ground_truth_is_an_error():
    with pytest.raises(KeyError, match="has no ground_truth"):
        adapted(lambda solution_str, **_: 1)(["a"], **columns(1, reward_model={"style": "rule"}))


# --- in the process of rewards ----------------------------------------------------------------------------------------

FILE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    if solution_str == "bad":
        raise ValueError("cannot parse")
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str)}

async def slow_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def only_kwargs(**kwargs):
    return 1.0
"""


def scored(function, answers, row=ROW):
    try:
        named = NamedArguments(row, answers, [[1]] * len(answers))
        num = len(answers)
        return function.submit(answers, [""] * num, [""] * num, list(range(num)), named).result(60)
    finally:
        function.close()


@pytest.mark.slow
def test_a_file_of_verls_form_is_recognised_and_gets_its_arguments(tmp_path):
    (tmp_path / "r.py").write_text(FILE)
    function = RewardFunction(f"{tmp_path}/r.py:compute_score", kwargs={"bonus": 0.5})
    assert scored(function, ["4", "10"]) == [Score(1.5, 1.5, {"length": 1.0}), Score(0.5, 0.5, {"length": 2.0})]


@pytest.mark.slow
def test_a_coroutine_scores_too(tmp_path):
    (tmp_path / "r.py").write_text(FILE)
    assert scored(RewardFunction(f"{tmp_path}/r.py:slow_score"), ["4", "5"]) == [Score(1.0, 1.0), Score(0.0, 0.0)]


@pytest.mark.slow
def test_a_function_that_raises_has_failed_with_its_line(tmp_path):
    (tmp_path / "r.py").write_text(FILE)
    [failed] = scored(RewardFunction(f"{tmp_path}/r.py:compute_score", retries=0), ["bad"])
    assert isinstance(failed, Failed)
    assert "ValueError: cannot parse at line 4" in failed.reason


@pytest.mark.slow
def test_an_argument_that_the_function_does_not_take_is_refused(tmp_path):
    (tmp_path / "r.py").write_text(FILE)
    with pytest.raises(UserError, match="unexpected keyword argument 'bonsu'"):
        RewardFunction(f"{tmp_path}/r.py:compute_score", kwargs={"bonsu": 1})


@pytest.mark.slow
def test_a_function_of_kwargs_alone_is_refused(tmp_path):
    (tmp_path / "r.py").write_text(FILE)
    with pytest.raises(UserError, match="cannot be called with queries, prompts, labels"):
        RewardFunction(f"{tmp_path}/r.py:only_kwargs")


@pytest.mark.slow
def test_arguments_reach_functions_of_our_own_form_and_of_trls(tmp_path):
    (tmp_path / "r.py").write_text(
        "def ours(queries, prompts, labels, factor):\n    return [factor] * len(queries)\n"
        "def trls(completions, factor=1, **kwargs):\n    return [factor] * len(completions)\n"
    )
    for name in ("ours", "trls"):
        assert scored(RewardFunction(f"{tmp_path}/r.py:{name}", kwargs={"factor": 3}), ["a"]) == [Score(3.0, 3.0)]


@pytest.mark.slow
def test_the_built_in_scoring_has_a_name():
    row = ROW | {"data_source": GSM8K}
    assert scored(RewardFunction("verl_score"), ["#### 4", "4"], row) == [Score(1.0, 1.0), Score(0.0, 0.0)]
    flexible = RewardFunction("verl_score", kwargs={"method": "flexible"})
    assert scored(flexible, ["#### 4", "4"], row) == [Score(1.0, 1.0), Score(1.0, 1.0)]


def test_arguments_need_a_function():
    with pytest.raises(UserError, match=r"reward.kwargs: has no effect: reward.function is not set"):
        loads("reward: {model: rm, kwargs: {a: 1}}")


# --- the built-in scoring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("so it is #### 42", "42", 1.0),
        ("#### 41\n#### 42", "42", 1.0),  # the last one counts
        ("#### 42\n#### 41", "42", 0.0),
        ("#### 1,042", "1042", 1.0),
        ("#### -7", "-7", 1.0),
        ("#### 0.5", "0.5", 1.0),
        ("#### 42.", "42", 0.0),  # compared as text, with the full stop
        ("####42", "42", 0.0),  # without the space
        ("42", "42", 0.0),
        ("", "42", 0.0),
        ("#### x", "42", 0.0),
        ("#### 4 2", "42", 0.0),
    ],
)
def test_the_last_marked_number_is_compared_as_text(answer, truth, score):
    assert verl_score(GSM8K, answer, truth) == score


@pytest.mark.parametrize(("answer", "score"), [("it is 42", 1.0), ("42 .", 1.0), ("42 or 41", 0.0), ("none", 0.0)])
def test_flexible_scoring_takes_the_last_number_of_all(answer, score):
    assert verl_score(GSM8K, answer, "42", method="flexible") == score


def test_other_sources_and_methods_are_errors():
    with pytest.raises(ValueError, match="no built-in scoring for data_source 'lighteval/MATH'"):
        verl_score("lighteval/MATH", "", "")
    with pytest.raises(ValueError, match="must be strict or flexible"):
        verl_score(GSM8K, "", "", method="loose")
