import pytest
from algorithm_cases import NAN, numbers, quick, seeds, some_order
from hypothesis import given

from hotseat.algorithms.filtering import reason_to_drop
from hotseat.errors import UserError


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([0, 0], "score too low"),
        ([1, 1], "score too high"),
        ([1, 0, 0], None),
        ([0.5], "fewer than 2 samples have a reward"),
        ([0], "fewer than 2 samples have a reward"),  # said first
        ([NAN, 1], "score not a number"),
        ([], "fewer than 2 samples have a reward"),
    ],
)
def test_a_group_is_kept_if_its_mean_score_is_strictly_between_the_bounds(scores, reason):
    assert reason_to_drop(scores, 0.0, 1.0, min_samples=2) == reason


def test_one_sample_is_enough_where_no_siblings_are_needed():
    assert reason_to_drop([0.5], 0.0, 1.0) is None
    assert reason_to_drop([0.0], 0.0, 1.0) == "score too low"


def test_without_bounds_only_the_number_of_samples_counts():
    assert reason_to_drop([0.0, 0.0], None, None, min_samples=2) is None
    assert reason_to_drop([0.0], None, None, min_samples=2) == "fewer than 2 samples have a reward"


@quick
@given(seeds)
def test_filtering_equals_a_loop_and_does_not_depend_on_order(seed):
    scores = (numbers(seed, 6) > 0).double()
    total = 0.0
    for score in scores.tolist():
        total += score
    found = reason_to_drop(scores.tolist(), 0.0, 1.0)
    assert (found is None) == (0.0 < total / 6 < 1.0)
    assert reason_to_drop(scores[some_order(seed, 6)].tolist(), 0.0, 1.0) == found


def test_a_range_that_keeps_nothing_is_refused():
    with pytest.raises(UserError, match=r"dynamic_filtering_reward_range is \[1.0, 0.0\]"):
        reason_to_drop([0.5], 1.0, 0.0)
