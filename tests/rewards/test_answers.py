import math

import pytest

from hotseat.errors import RewardError
from hotseat.rewards import RewardTally, Score
from hotseat.rewards.answers import BadAnswer, read_answer
from hotseat.rewards.builtin import exact_match, number_in, number_match
from hotseat.rewards.function_worker import plain
from hotseat.types import Failed

NAN = math.nan


def bad(answer, num_samples=2) -> str:
    with pytest.raises(BadAnswer) as caught:
        read_answer(plain(answer), num_samples)
    return str(caught.value)


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [[1, 0.5], (True, 0.5), [[1.0], [0.5]], {"rewards": [1, 0.5]}])
def test_rewards_of_any_shape(answer):
    assert read_answer(plain(answer), 2) == [Score(1.0, 1.0), Score(0.5, 0.5)]


def test_tensors_and_arrays_of_any_shape():
    import numpy as np
    import torch

    for values in (torch.tensor([1.0, 0.5]), torch.tensor([[1.0], [0.5]], dtype=torch.bfloat16, requires_grad=True)):
        assert read_answer(plain(values), 2) == [Score(1.0, 1.0), Score(0.5, 0.5)]
    assert read_answer(plain(np.array([1.0, 0.5], dtype=np.float16)), 2)[1] == Score(0.5, 0.5)
    assert read_answer(plain([torch.tensor(1.0), np.float32(0.5)]), 2)[1] == Score(0.5, 0.5)
    assert read_answer(plain(torch.tensor(3.0)), 1) == [Score(3.0, 3.0)]


def test_scores_and_logs_per_sample_or_for_all():
    answer = {
        "rewards": [1.0, -1.0],
        "scores": [[0.9], [0.1]],
        "extra_logs": {"each": [1, 2], "all": 7, "some": [None, 3]},
    }
    assert read_answer(answer, 2) == [
        Score(1.0, 0.9, {"each": 1.0, "all": 7.0}),
        Score(-1.0, 0.1, {"each": 2.0, "all": 7.0, "some": 3.0}),
    ]
    assert read_answer({"rewards": [1.0, 2.0], "scores": None, "extra_logs": None, "other": "x"}, 2)[0] == Score(
        1.0, 1.0
    )


def test_a_sample_without_a_finite_reward_or_score_fails_alone():
    """Scenario 30."""
    samples = read_answer([1.0, NAN, None, math.inf, 10**400], 5)
    assert samples == [
        Score(1.0, 1.0),
        Failed("the reward is nan"),
        Failed("the reward is None"),
        Failed("the reward is inf"),
        Failed("the reward is inf"),
    ]
    assert read_answer({"rewards": [1, 1], "scores": [1, NAN]}, 2)[1] == Failed("the score is nan")
    assert read_answer([-3.4e38, -3.5e38], 2)[1] == Failed("the reward is -3.5e+38, too large for 32 bits")


def test_answers_that_are_none():
    """Scenario 29."""
    assert bad(None) == "returned None"
    assert bad(object()) == "returned a object, neither numbers nor a dict with 'rewards'"
    assert bad([1.0]) == "returned 1 rewards for 2 samples"
    assert bad(1.0) == "returned 1 rewards for 2 samples"
    assert bad([]) == "returned 0 rewards for 2 samples"
    assert bad([[1, 2]]) == "returned rewards with a list for sample 0, not a number"
    assert bad(["0.5", 1.0]) == "returned rewards with '0.5' for sample 0, not a number"
    assert bad("high") == "returned rewards with 'high' for sample 0, not a number"
    assert bad([1.0, object()]) == "returned rewards with a object for sample 1, not a number"
    assert bad([1.0, {}]) == "returned rewards with a dict for sample 1, not a number"
    assert bad(["x" * 99, 1]).startswith("returned rewards with 'xxxxx")
    assert bad({"values": [1]}) == "returned a dict without the key 'rewards'; it has: values"
    assert bad({"reward": [1, 2]}) == "returned a dict with the key 'reward': did you mean 'rewards'?"
    assert bad({"rewards": [1, 2], "score": [1, 2]}) == "returned a dict with the key 'score': did you mean 'scores'?"
    assert bad({"rewards": [1, 2], "scores": [1]}) == "returned 1 scores for 2 samples"
    assert bad({"rewards": [1, 2], "extra_logs": [1]}) == "returned 'extra_logs' that is not a dict"
    assert bad({"rewards": [1, 2], "extra_logs": {"x": [1]}}) == "returned 1 extra_logs['x'] for 2 samples"
    assert "extra_logs['x'] with 'a' for sample 0" in bad({"rewards": [1, 2], "extra_logs": {"x": "a"}})


# --- built in ---------------------------------------------------------------------------------------------------------


def test_exact_match():
    prompts = ["1+1="] * 6
    queries = ["1+1=2", "1+1= 2 </s>", "1+1=2<|im_end|><eos>", "1+1=22", "1+1=", "2"]
    assert exact_match(queries, prompts, [" 2 "] * 6) == [1, 1, 1, 0, 0, 1]
    assert exact_match(["1+1=2"], ["1+1="], [None]) == [None]
    assert exact_match(["q<a>"], ["q"], ["<a>"]) == [0]  # what looks like an end token is none of the answer


def test_number_match():
    queries = ["q 5 so the answer is 1,234.50", "q -3", "q nothing", "q 7</s>", "q 2e3", "q 1"]
    labels = ["1234.5", "3", "3", "#### 7", "2000", "one"]
    assert number_match(queries, ["q"] * 6, labels) == [1, 0, 0, 1, 1, None]
    assert number_in("1.2.3 and -.5") == -0.5


def test_model_output_is_not_evaluated(tmp_path):
    """Scenario 44."""
    trace = tmp_path / "ran"
    attack = f"q __import__('pathlib').Path({str(trace)!r}).touch()"
    assert exact_match([attack], ["q"], ["2"]) == [0]
    assert number_match([attack, "q " + "9" * 5000], ["q"] * 2, ["2", "3"]) == [0, 0]
    assert not trace.exists()


# --- tally ------------------------------------------------------------------------------------------------------------


def test_a_tally_raises_above_the_limit_and_says_why():
    tally = RewardTally(max_failed_fraction=0.25)
    tally.check()
    tally.add([Score(1.0, 1.0)] * 3 + [Failed("a.py: reward_func: raised KeyError (sample 0/1/2)")])
    tally.check()
    tally.add([Failed("b")] * 2 + [Failed(cause) for cause in ("x", "y", "z")])
    with pytest.raises(RewardError) as caught:
        tally.check()
    message = str(caught.value)
    assert message.startswith(
        "6 of 9 samples have no reward (66.7%), and reward.max_failed_fraction is 25.0%:\n  2x such as b\n"
    )
    assert "1x a.py: reward_func: raised KeyError (sample 0/1/2)" in message
    assert message.endswith("and 2 more causes")
    with pytest.raises(RewardError, match="^evaluation: 6 of 9 samples have no reward"):
        tally.check("evaluation: ")
    tally.clear()
    tally.check()
    assert (tally.num_samples, tally.num_failed) == (0, 0)


def test_the_error_of_a_tally_ends_with_the_hint_if_there_is_one():
    tally = RewardTally(max_failed_fraction=0.0, hint=lambda: "hint: set data.label_key")
    tally.add([Failed("b")])
    with pytest.raises(RewardError, match="1x b\n  hint: set data.label_key$"):
        tally.check()


def test_a_tally_counts_by_cause_with_one_example():
    tally = RewardTally(max_failed_fraction=0.0)
    tally.add([Failed(f"reward.py: raised KeyError after {number} ms (sample 0/{number}/3)") for number in range(62)])
    with pytest.raises(RewardError) as caught:
        tally.check()
    assert str(caught.value).splitlines()[1:] == ["  62x such as reward.py: raised KeyError after 0 ms (sample 0/0/3)"]
