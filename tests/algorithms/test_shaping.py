import pytest
import torch
from algorithm_cases import NAN, assert_close, make_layout, numbers, quick, seeds, some_order
from hypothesis import given
from hypothesis import strategies as st

from hotseat.algorithms.shaping import clip_rewards, normalise_rewards, overlong_penalty, penalise_truncation
from hotseat.errors import UserError


def test_rewards_are_normalised_by_the_stored_mean_and_std():
    assert_close(normalise_rewards(torch.tensor([1, 5]), mean=3.0, std=4.0), [-0.5, 0.5])


def test_rewards_are_clipped_on_both_sides():
    assert_close(clip_rewards(torch.tensor([-20.0, 0.5, 11.0]), -10, 10), [-10, 0.5, 10])
    assert_close(clip_rewards(torch.tensor([-20, 0, 11]), -10.5, 10), [-10.5, 0, 10])


def test_the_overlong_penalty_grows_over_the_buffer():
    # at most 100, buffer 20, factor 0.5: 80 free; 90 is half way: -0.25; 100 and more: -0.5
    penalty = overlong_penalty(torch.tensor([10, 80, 90, 100, 250]), max_sampled=100, buffer_length=20, factor=0.5)
    assert_close(penalty, [0, 0, -0.25, -0.5, -0.5])


def test_the_overlong_penalty_counts_no_tokens_of_the_environment():
    layout = make_layout([[[0, 1, *[0] * 50, 1]], [[1] * 4]])
    assert_close(overlong_penalty(layout.sampled_per_episode, 4, 2, 1.0), [0, -1])


def test_truncated_episodes_are_scaled_or_given_a_fixed_reward():
    rewards, truncated = torch.tensor([1.0, 1.0, -2.0]), torch.tensor([True, False, True])
    assert_close(penalise_truncation(rewards, truncated, 0.25), [0.25, 1, -0.5])
    assert_close(penalise_truncation(rewards, truncated, 0.0), [0, 1, 0])
    assert_close(penalise_truncation(rewards, truncated, -0.5), [-0.5, 1, -0.5])
    assert_close(penalise_truncation(torch.tensor([1, 1]), torch.tensor([1, 0]), -0.5), [-0.5, 1])


@quick
@given(seeds, st.floats(-2, 1))
def test_shaping_equals_a_loop_and_keeps_order(seed, coefficient):
    rewards = numbers(seed, 8, scale=5)
    truncated = numbers(seed + 1, 8) > 0
    lengths = (numbers(seed + 2, 8).abs() * 50).long()
    order = some_order(seed, 8)
    normalised, clipped, overlong, shortened = [], [], [], []
    for reward, is_cut, length in zip(rewards.tolist(), truncated.tolist(), lengths.tolist(), strict=True):
        normalised.append((reward - 0.5) / 1.5)
        clipped.append(min(max(reward, -1.0), 2.0))
        # equation 13 of DAPO with L_max 80, L_cache 30
        if length <= 50:
            overlong.append(0.0)
        elif length <= 80:
            overlong.append((50 - length) / 30)
        else:
            overlong.append(-1.0)
        shortened.append(reward if not is_cut else coefficient if coefficient < 0 else coefficient * reward)
    assert_close(normalise_rewards(rewards, 0.5, 1.5), normalised)
    assert_close(clip_rewards(rewards, -1.0, 2.0), clipped)
    assert_close(overlong_penalty(lengths, 80, 30, 1.0), overlong, 1e-6)
    assert_close(penalise_truncation(rewards, truncated, coefficient), shortened)
    for whole, part in (
        (normalise_rewards(rewards, 0.5, 1.5), normalise_rewards(rewards[order], 0.5, 1.5)),
        (clip_rewards(rewards, -1.0, 2.0), clip_rewards(rewards[order], -1.0, 2.0)),
        (overlong_penalty(lengths, 80, 30, 1.0), overlong_penalty(lengths[order], 80, 30, 1.0)),
        (
            penalise_truncation(rewards, truncated, coefficient),
            penalise_truncation(rewards[order], truncated[order], coefficient),
        ),
    ):
        assert_close(part, whole[order])


def test_shaping_that_cannot_work_is_refused():
    rewards = torch.zeros(1)
    for mean, std in ((0.0, 0.0), (0.0, -1.0), (NAN, 1.0)):
        with pytest.raises(UserError, match=rf"stored mean and std are {mean} and {std}: .*normalize_reward"):
            normalise_rewards(rewards, mean, std)
    with pytest.raises(UserError, match=r"reward_clip_range is \[10, -10\]"):
        clip_rewards(rewards, 10, -10)
    for buffer_length in (0, 101):
        with pytest.raises(UserError, match=rf"overlong_buffer_len is {buffer_length} .* between 1 and 100"):
            overlong_penalty(rewards, 100, buffer_length, 1.0)
    with pytest.raises(UserError, match=r"stop_properly_penalty_coef is 1.5: give a factor between 0 and 1"):
        penalise_truncation(rewards, torch.ones(1, dtype=torch.bool), 1.5)
