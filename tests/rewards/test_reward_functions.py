"""Several reward functions: weights, names, answers that some do not apply to, and failures."""

import pytest

from hotseat.config import loads
from hotseat.config.presence import has_reward_file, name_of_function, reward_files
from hotseat.config.schema.reward_options import RewardConfig
from hotseat.errors import ConfigError
from hotseat.failed import Failed, NotApplicable
from hotseat.loop.workers.host_settings import ScorerSettings, make_scorer
from hotseat.rewards.scorer import NamedArguments

WIDE = 60.0  # seconds, against hangs
FUNCTIONS = """
def right(completions, answer, **columns):
    return [1.0 if text == right else 0.0 for text, right in zip(completions, answer)]


def short(queries, prompts, labels):
    return {"rewards": [4.0] * len(queries), "extra_logs": {"letters": [len(query) for query in queries]}}


def sometimes(completions, **columns):
    return [None if text == "skip" else 10.0 for text in completions]


def broken(queries, prompts, labels):
    raise ValueError("no")
"""


def scored(file, *parts, answers=("7", "skip"), graders=()):
    """Return the scores of two answers to a prompt."""
    functions = [{"function": f"{file}:{name}", "weight": weight} for name, weight in parts]
    reward = RewardConfig.model_validate({"functions": functions, "graders": list(graders), "retries": 0})
    with make_scorer(ScorerSettings(reward)) as scorer:
        named = NamedArguments({"prompt": "3+4=", "answer": "7"}, answers, [[1]] * len(answers))
        queries = [f"3+4={answer}" for answer in answers]
        future = scorer.submit(queries, ["3+4="] * 2, ["7"] * 2, ["0/0/0", "0/0/1"], named)
        return future.result(WIDE)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.slow
def test_the_reward_is_the_weighted_sum_and_each_part_is_recorded_without_its_weight(file):
    first, second = scored(file, ("right", 2.0), ("short", 0.5))
    assert (first.reward, second.reward) == (2.0 * 1.0 + 0.5 * 4.0, 0.5 * 4.0)
    assert first.extra == {"right": 1.0, "short": 4.0, "letters": 5.0}


@pytest.mark.slow
def test_what_does_not_apply_adds_nothing_and_only_nothing_at_all_is_no_reward(file):
    first, second = scored(file, ("right", 1.0), ("sometimes", 0.1))
    assert (first.reward, second.reward) == (1.0 + 0.1 * 10.0, 0.0)
    assert "sometimes" not in second.extra
    first, second = scored(file, ("sometimes", 0.1))
    assert first.reward == 1.0
    assert isinstance(second, NotApplicable)


@pytest.mark.slow
def test_graders_are_added(file):
    first, second = scored(file, ("short", 1.0), graders=[{"kind": "exact", "name": "same", "weight": 3.0}])
    assert (first.reward, second.reward) == (7.0, 4.0)


@pytest.mark.slow
def test_a_function_that_fails_fails_the_sample_with_its_name(file):
    for each in scored(file, ("right", 1.0), ("broken", 1.0)):
        assert isinstance(each, Failed)
        assert "broken: raised ValueError: no at line 15" in each.reason


def config_of(reward: str):
    return loads(f"actor: {{model: m}}\ndata: {{path: d}}\nreward: {reward}\n")


def test_names_are_those_of_the_functions_or_files_and_are_unique():
    config = config_of(
        "{functions: [{function: a.py:f}, {function: b.py}, {function: a.py:f, name: again, weight: 2}]}"
    )
    assert [name_of_function(each) for each in config.reward.functions] == ["f", "b", "again"]
    assert reward_files(config)[1] == ("reward.functions[1]", "b.py")
    assert has_reward_file(config)
    for reward, problem in (
        ("{functions: [{function: a.py:f}, {function: b.py:f}]}", r"functions\[1\]\.name: 'f' is taken"),
        ("{functions: [{function: a.py:f}], graders: [{kind: exact, name: f}]}", r"graders\[0\]\.name: 'f' is taken"),
        ("{functions: [{function: a.py:f}], function: b.py}", "reward.functions: reward.function is set too"),
        ("{functions: [{function: a.py:f, wieght: 2}]}", "unknown key; did you mean .*weight"),
    ):
        with pytest.raises(ConfigError, match=problem):
            config_of(reward)
