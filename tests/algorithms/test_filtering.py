import pytest
import torch
from algorithm_cases import NAN, assert_close, numbers, quick, seeds, some_order
from hypothesis import given

from hotseat.algorithms import filter_groups
from hotseat.errors import UserError


def test_a_group_is_kept_if_its_mean_score_is_strictly_between_the_bounds():
    # group 2: all wrong, 0; group 5: all right, 1; group 7: 1/3; group 9: one sample; group 11: a failed score
    scores = torch.tensor([0, 1, 0, 0, 1, 1, 0.5, NAN, 1])
    groups = torch.tensor([2, 5, 7, 7, 7, 5, 9, 11, 11])
    result = filter_groups(scores, groups, 0.0, 1.0, min_size=2)
    # group 2 has one sample as well, and is told so first
    assert result.group_ids.tolist() == [2, 5, 7, 9, 11]
    assert result.reasons == (
        "too few samples",
        "score too high",
        "kept",
        "too few samples",
        "score not a number",
    )
    assert result.keep.tolist() == [False, False, True, False, False]
    assert result.keep_episode.tolist() == [False, False, True, True, True, False, False, False, False]
    assert_close(result.mean_scores[:4], [0, 1, 1 / 3, 0.5])
    assert filter_groups(scores[:1], groups[:1], 0.0, 1.0).reasons == ("score too low",)


@quick
@given(seeds)
def test_filtering_equals_a_loop_and_does_not_depend_on_order(seed):
    scores = (numbers(seed, 12) > 0).double()
    groups = (numbers(seed + 1, 12).abs() * 2).long()
    expected = []
    for group in groups.tolist():
        members = [float(s) for s, g in zip(scores, groups, strict=True) if int(g) == group]
        expected.append(0.0 < sum(members) / len(members) < 1.0)
    result = filter_groups(scores, groups, 0.0, 1.0)
    assert result.keep_episode.tolist() == expected
    order = some_order(seed, 12)
    shuffled = filter_groups(scores[order], groups[order], 0.0, 1.0)
    assert torch.equal(shuffled.keep_episode, result.keep_episode[order])
    assert shuffled.reasons == result.reasons


def test_integer_scores_are_compared_as_numbers():
    assert filter_groups(torch.tensor([0, 1]), torch.tensor([0, 0]), 0, 1).keep.tolist() == [True]


def test_no_groups_keep_nothing():
    result = filter_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0, 1)
    assert result.reasons == ()
    assert result.keep_episode.tolist() == []


def test_a_range_that_keeps_nothing_is_refused():
    with pytest.raises(UserError, match=r"dynamic_filtering_reward_range is \[1.0, 0.0\]"):
        filter_groups(torch.zeros(1), torch.zeros(1, dtype=torch.int64), 1.0, 0.0)
