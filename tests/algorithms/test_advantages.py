import math
import random
from functools import reduce
from operator import add

import pytest
import torch
from algorithm_cases import (
    NAN,
    assert_close,
    episode_lists,
    few,
    layouts,
    make_layout,
    numbers,
    pairs_of_groups,
    permuted,
    quick,
    sampled_tokens,
    seeds,
    some_order,
    with_rubbish,
)
from hypothesis import given
from hypothesis import strategies as st

from hotseat.algorithms.advantages import (
    Moments,
    compute_advantages,
    discounted_returns,
    gae,
    moments,
    normalise_by,
    place_rewards,
)
from hotseat.algorithms.baselines import group_mean_centred, group_normalised, leave_one_out, parts_normalised
from hotseat.algorithms.time_steps import step_starts
from hotseat.algorithms.turns import turn_ends
from hotseat.errors import RewardError, UserError
from hotseat.registry.estimators import ESTIMATORS

BASELINES = (group_mean_centred, group_normalised, leave_one_out)
TOTALS = [name for name, facts in ESTIMATORS.items() if not facts.compares_parts]
GROUP_ESTIMATORS = [name for name in TOTALS if ESTIMATORS[name].needs_group]
TWO = [[[0, 1, 1]], [[0, 1]]]  # two episodes, of 2 and 1 sampled tokens


# ---------------------------------------------------------------------------------------------- baselines per episode


def normalised(advantages, mask, *, with_std=True):
    """Normalise a batch that is all on one rank."""
    return normalise_by(advantages, mask, moments(advantages, mask), with_std=with_std)


def test_group_mean_is_subtracted_in_uneven_groups_out_of_order():
    # group 7: 1, 2, 6 with mean 3; group 3: 0, 4 with mean 2
    rewards, groups = torch.tensor([1.0, 0, 2, 4, 6]), torch.tensor([7, 3, 7, 3, 7])
    assert_close(group_mean_centred(rewards, groups), [-2, -2, -1, 2, 3])


def test_group_norm_divides_by_the_sample_standard_deviation():
    # group 7: deviations -2, -1, 3; 14 / (3 - 1) = 7; std 2.6457513
    # group 3: deviations -2, 2; 8 / (2 - 1) = 8; std 2.8284271
    rewards, groups = torch.tensor([1.0, 0, 2, 4, 6], dtype=torch.float64), torch.tensor([7, 3, 7, 3, 7])
    expected = [-2 / math.sqrt(7), -2 / math.sqrt(8), -1 / math.sqrt(7), 2 / math.sqrt(8), 3 / math.sqrt(7)]
    assert_close(group_normalised(rewards, groups, eps=0.0), expected)
    # with eps 1: 2 / (2.8284271 + 1) = 0.5224078
    assert_close(group_normalised(rewards, groups, eps=1.0)[3], 0.5224077499274831)


def test_leave_one_out_compares_with_the_siblings_only():
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5; 0 - 4 = -4; 4 - 0 = 4
    rewards, groups = torch.tensor([1.0, 0, 2, 4, 6]), torch.tensor([7, 3, 7, 3, 7])
    assert_close(leave_one_out(rewards, groups), [-3, -4, -1.5, 4, 4.5])


@quick
@given(seeds, st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_baselines_equal_a_loop_over_the_group(seed, ids):
    ids = ids + sorted(set(ids))  # no group of one
    rewards = numbers(seed, len(ids), scale=3)
    means, norms, loos = [], [], []
    for index, group in enumerate(ids):
        members = [float(rewards[other]) for other in range(len(ids)) if ids[other] == group]
        siblings = [float(rewards[other]) for other in range(len(ids)) if ids[other] == group and other != index]
        own = float(rewards[index])
        mean = sum(members) / len(members)
        std = math.sqrt(sum((member - mean) ** 2 for member in members) / (len(members) - 1))
        means.append(own - mean)
        norms.append((own - mean) / (std + 1e-4))
        loos.append(own - sum(siblings) / len(siblings))
    groups = torch.tensor(ids)
    assert_close(group_mean_centred(rewards, groups), means)
    assert_close(group_normalised(rewards, groups, eps=1e-4), norms, 1e-9)
    assert_close(leave_one_out(rewards, groups), loos)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_have_exactly_no_advantage(baseline, dtype):
    # In float32 the mean of three 0.1 is not 0.1, and GRPO's eps of 1e-9 would blow the difference up.
    for reward in (0.1, -7.3, 1e6 + 1 / 3):
        rewards = torch.full((10,), reward, dtype=dtype)
        assert bool((baseline(rewards, torch.tensor([0] * 3 + [1] * 7)) == 0).all())


@quick
@given(baseline=st.sampled_from(BASELINES), seed=seeds)
def test_baselines_do_not_depend_on_the_order_of_samples(baseline, seed):
    rewards, groups = numbers(seed, 9), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    order = torch.tensor(some_order(seed, 9))
    assert_close(baseline(rewards[order], groups[order]), baseline(rewards, groups)[order])


@pytest.mark.parametrize("baseline", BASELINES)
def test_integer_rewards_become_floats_and_float64_stays(baseline):
    groups = torch.tensor([0, 0, 1, 1])
    assert baseline(torch.tensor([0, 1, 1, 1]), groups).dtype == torch.float32
    assert baseline(torch.tensor([0, 1, 1, 1], dtype=torch.bfloat16), groups).dtype == torch.float32
    assert baseline(torch.tensor([0.0, 1, 1, 1], dtype=torch.float64), groups).dtype == torch.float64


@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_of_no_samples_are_empty(baseline):
    assert baseline(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_group_of_one_is_refused_by_name(baseline):
    with pytest.raises(UserError, match=r"group 8: only one sample.*rollout.samples_per_prompt to 2 or more"):
        baseline(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4, 8, 4]))
    with pytest.raises(UserError, match=r"groups 0, 1, 2, 3, 4, \.\.\.: only one sample"):
        baseline(torch.zeros(6), torch.arange(6))


# ------------------------------------------------------------------------------------------------- rewards on tokens


def test_a_turn_ends_where_the_sampled_run_or_the_segment_ends():
    # tokens 0-4, 5-6 in the first episode, 7-8 in the second, 9-10 and 11-12, without a gap, in the third
    layout = make_layout([[[0, 1, 1, 0, 1], [0, 1]], [[0, 0]], [[0, 1], [1, 1]]])
    assert turn_ends(layout).tolist() == [2, 4, 6, 10, 12]
    assert turn_ends(make_layout([[[]]])).tolist() == []


@quick
@given(layouts())
def test_turn_ends_equal_a_walk_over_the_segments(layout):
    expected = []
    for segment in range(layout.num_segments):
        for token in range(int(layout.offsets[segment]), int(layout.offsets[segment + 1])):
            is_last = token + 1 == int(layout.offsets[segment + 1])
            if bool(layout.mask[token]) and (is_last or not bool(layout.mask[token + 1])):
                expected.append(token)
    assert turn_ends(layout).tolist() == expected


def test_rewards_land_on_the_last_sampled_token_of_episode_and_turn():
    layout = make_layout([[[0, 1, 1, 0, 1], [0, 1, 0]], [[0, 0]]])
    # turns end at 2, 4, 6; the episode's 10 joins its last turn's 3; the second episode has no place for its reward
    placed = place_rewards(layout, torch.tensor([10.0, NAN]), turn_rewards=torch.tensor([1.0, 2, 3]))
    assert_close(placed, [0, 0, 1, 0, 2, 0, 13, 0, 0, 0])


def test_kl_is_charged_on_every_sampled_token():
    layout = make_layout([[[0, 1, 0, 1]]])
    # -0.1 * 0.5 = -0.05, and 1 - 0.1 * 2 = 0.8
    kl = torch.tensor([NAN, 0.5, NAN, 2.0])
    assert_close(place_rewards(layout, torch.tensor([1]), kl=kl, kl_coefficient=0.1), [0, -0.05, 0, 0.8], 1e-6)


def test_turns_that_nothing_separates_can_be_told_apart_by_position():
    layout = make_layout([[[0, 1, 1, 1]]])
    placed = place_rewards(
        layout, torch.tensor([0.0]), turn_rewards=torch.tensor([1.0, 2.0]), turns=torch.tensor([1, 3])
    )
    assert_close(placed, [0, 1, 0, 2])


@quick
@given(layouts(), seeds)
def test_placed_rewards_equal_a_loop(layout, seed):
    rewards, kl = numbers(seed, layout.num_episodes), numbers(seed + 1, layout.num_tokens)
    turn_rewards = numbers(seed + 2, len(turn_ends(layout)))
    expected = [0.0] * layout.num_tokens
    for episode in range(layout.num_episodes):
        tokens = sampled_tokens(layout, episode)
        for token in tokens:
            expected[token] -= 0.3 * float(kl[token])
        if tokens:
            expected[tokens[-1]] += float(rewards[episode])
    for end, reward in zip(turn_ends(layout).tolist(), turn_rewards.tolist(), strict=True):
        expected[end] += reward
    placed = place_rewards(
        layout, rewards, turn_rewards=turn_rewards, kl=with_rubbish(kl, layout.mask), kl_coefficient=0.3
    )
    assert_close(placed, expected)


def test_rewards_that_cannot_be_placed_are_refused():
    layout = make_layout([[[0, 1, 0, 1]]])
    reward = torch.tensor([1.0])
    with pytest.raises(UserError, match=r"3 turn rewards for 2 turns: give one per turn"):
        place_rewards(layout, reward, turn_rewards=torch.zeros(3))
    with pytest.raises(UserError, match=r"turns end at tokens \[2, 3\]: name the last token that the policy sampled"):
        place_rewards(layout, reward, turn_rewards=torch.zeros(2), turns=torch.tensor([2, 3]))
    with pytest.raises(UserError, match=r"turns end at tokens \[3, 1\].*in order"):
        place_rewards(layout, reward, turn_rewards=torch.zeros(2), turns=torch.tensor([3, 1]))
    with pytest.raises(UserError, match=r"the KL coefficient is 0.1 but no KL was given"):
        place_rewards(layout, reward, kl_coefficient=0.1)


# --------------------------------------------------------------------------------------------- returns and advantages


def test_returns_decay_per_sampled_token_not_per_inserted_one():
    # gamma 0.5, reward 1 at the third sampled token, which is in the second segment: 0.25, 0.5, 1
    layout = make_layout([[[0, 1, 0, 0, 1], [0, 1, 0]]])
    rewards = torch.tensor([NAN, 0, NAN, NAN, 0, NAN, 1, NAN])
    assert_close(discounted_returns(layout, rewards, gamma=0.5), [0, 0.25, 0, 0, 0.5, 0, 1, 0])


def test_gae_over_the_sampled_tokens():
    # gamma = lambda = 0.5, rewards 0, 0, 1, values 1, 2, 3
    # delta: 0 + 0.5*2 - 1 = 0;  0 + 0.5*3 - 2 = -0.5;  1 + 0 - 3 = -2
    # A: -2;  -0.5 + 0.25*(-2) = -1;  0 + 0.25*(-1) = -0.25.  Returns A + V: 1, 1, 0.75
    layout = make_layout([[[0, 1, 0], [1, 0, 1]]])
    rewards = torch.tensor([NAN, 0, NAN, 0, NAN, 1])
    values = torch.tensor([NAN, 1, NAN, 2, NAN, 3])
    advantages, returns = gae(layout, rewards, values, gamma=0.5, lam=0.5)
    assert_close(advantages, [0, -0.25, 0, -1, 0, -2])
    assert_close(returns, [0, 0.75, 0, 1, 0, 1])


@quick
@given(layouts(), seeds, st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_and_gae_equal_a_loop_over_time(layout, seed, gamma, lam):
    rewards, values = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    expected_returns = [0.0] * layout.num_tokens
    expected_advantages = [0.0] * layout.num_tokens
    expected_targets = [0.0] * layout.num_tokens
    for episode in range(layout.num_episodes):
        following, next_value, next_advantage = 0.0, 0.0, 0.0
        for token in reversed(sampled_tokens(layout, episode)):
            reward, value = float(rewards[token]), float(values[token])
            following = reward + gamma * following
            next_advantage = (reward + gamma * next_value - value) + gamma * lam * next_advantage
            next_value = value
            expected_returns[token] = following
            expected_advantages[token] = next_advantage
            expected_targets[token] = next_advantage + value
    rewards, values = with_rubbish(rewards, layout.mask), with_rubbish(values, layout.mask)
    advantages, targets = gae(layout, rewards, values, gamma=gamma, lam=lam)
    assert_close(discounted_returns(layout, rewards, gamma=gamma), expected_returns)
    assert_close(advantages, expected_advantages)
    assert_close(targets, expected_targets)


def test_a_long_episode_is_summed_over_all_its_steps():
    layout = make_layout([[[1] * 1000], [[1] * 3]])
    returns = discounted_returns(layout, torch.ones(1003, dtype=torch.float64), gamma=0.9)
    # 1 + 0.9 + ... + 0.9^(n-1) = (1 - 0.9^n) / 0.1
    assert_close(returns[[0, 500, 999, 1000]], [10 * (1 - 0.9**n) for n in (1000, 500, 1, 3)])


# ------------------------------------------------------------------------------------------------------- normalisation


def test_normalising_takes_mean_and_population_std_of_the_sampled_tokens():
    # 1, 2, 3: mean 2, variance (1 + 0 + 1) / 3 = 2/3, 1 / sqrt(2/3) = 1.2247449
    advantages = torch.tensor([1.0, NAN, 2.0, 3.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    assert moments(advantages, mask) == Moments(3, 6.0, 14.0)
    assert_close(normalised(advantages, mask), [-math.sqrt(1.5), 0, 0, math.sqrt(1.5)])
    assert_close(normalised(advantages, mask, with_std=False), [-1, 0, 0, 1])


def test_the_variance_has_a_floor():
    # 0 and 2e-5: mean 1e-5, variance 1e-10 < 1e-8, so divided by 1e-4: -0.1, 0.1
    advantages = torch.tensor([0.0, 2e-5], dtype=torch.float64)
    assert_close(normalised(advantages, torch.ones(2, dtype=torch.bool)), [-0.1, 0.1], 1e-9)


@quick
@given(layouts(), seeds, st.booleans())
def test_normalising_equals_a_loop_over_the_tokens(layout, seed, with_std):
    advantages = numbers(seed, layout.num_tokens, scale=2)
    kept = [float(advantages[t]) for t in range(layout.num_tokens) if bool(layout.mask[t])]
    mean = sum(kept) / len(kept) if kept else 0.0
    std = math.sqrt(max(sum((a - mean) ** 2 for a in kept) / len(kept), 1e-8)) if kept and with_std else 1.0
    expected = [(float(a) - mean) / std if m else 0.0 for a, m in zip(advantages, layout.mask, strict=True)]
    actual = normalised(with_rubbish(advantages, layout.mask), layout.mask, with_std=with_std)
    assert_close(actual, expected, 1e-9)


@quick
@given(seeds, st.lists(st.integers(0, 20), max_size=4))
def test_ranks_that_add_up_moments_normalise_like_one(seed, cuts):
    advantages, mask = numbers(seed, 20), numbers(seed + 1, 20) > -0.5
    parts = torch.tensor_split(torch.arange(20), sorted(cuts))
    batch = reduce(add, [moments(advantages[part], mask[part]) for part in parts])
    together = torch.cat([normalise_by(advantages[part], mask[part], batch) for part in parts])
    assert_close(together, normalised(advantages, mask), 1e-9)


def test_normalising_nothing_gives_zeros():
    nothing = torch.zeros(3, dtype=torch.bool)
    assert_close(normalised(torch.full((3,), NAN), nothing), [0, 0, 0])


# --------------------------------------------------------------------------------------------------------- estimators


OPENRLHFS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo")


def test_the_table_of_estimators_says_what_openrlhf_does():
    entries = [ESTIMATORS[name] for name in OPENRLHFS]
    assert {entry.name for entry in entries if entry.discounts} == {"gae", "reinforce"}
    assert {entry.name for entry in entries if entry.needs_critic} == {"gae"}
    assert {entry.name for entry in entries if entry.needs_group} == {*OPENRLHFS} - {"gae", "reinforce"}
    normalised = {entry.name for entry in entries if entry.normalisation == "batch"}
    assert normalised == {"gae", "reinforce", "reinforce_baseline"}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("dr_grpo", [-1, -1, 1]),  # 1 - 2, 3 - 2
        ("rloo", [-2, -2, 2]),  # 1 - 3, 3 - 1
        ("group_norm", [-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(0.5)]),  # std sqrt((1 + 1) / 1)
        # tokens -1, -1, 1: mean -1/3, variance 1 - 1/9 = 8/9; (-2/3) / sqrt(8/9) and (4/3) / sqrt(8/9)
        ("reinforce_baseline", [-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2)]),
        # tokens 1, 1, 3: mean 5/3, variance 8/9; the same numbers again
        ("reinforce", [-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2)]),
    ],
)
def test_each_estimator_on_two_episodes(estimator, expected):
    rewards = torch.tensor([1.0, 3.0], dtype=torch.float64)
    result = compute_advantages(estimator, make_layout(TWO), rewards, groups=torch.tensor([0, 0]))
    assert_close(result.advantages, [0, *expected[:2], 0, expected[2]], 1e-8)


def test_reinforce_baseline_takes_the_mean_of_uneven_groups():
    # rewards 1, 3 | 0, 0, 3: centred -1, 1 | -1, -1, 2, with mean 0 already
    layout = make_layout([[[1]]] * 5)
    result = compute_advantages(
        "reinforce_baseline",
        layout,
        torch.tensor([1.0, 3, 0, 0, 3], dtype=torch.float64),
        groups=torch.tensor([0, 0, 1, 1, 1]),
        divide_by_std=False,
    )
    assert_close(result.advantages, [-1, 1, -1, -1, 2])


def test_reinforce_discounts_and_keeps_the_returns_unnormalised():
    # gamma 0.5: returns 0.5, 1 and 3; mean 1.5, deviations -1, -0.5, 1.5, variance 3.5 / 3
    result = compute_advantages("reinforce", make_layout(TWO), torch.tensor([1.0, 3.0], dtype=torch.float64), gamma=0.5)
    std = math.sqrt(3.5 / 3)
    assert_close(result.returns, [0, 0.5, 1, 0, 3])
    assert_close(result.advantages, [0, -1 / std, -0.5 / std, 0, 1.5 / std])


def test_gae_uses_values_and_normalises_advantages_only():
    # gamma = lambda = 1, values 1, 1 and 2: A = return - V: 0, 0 and 1; mean 1/3, without std
    layout, rewards = make_layout(TWO), torch.tensor([1.0, 3.0], dtype=torch.float64)
    values = torch.tensor([NAN, 1, 1, NAN, 2], dtype=torch.float64)
    result = compute_advantages("gae", layout, rewards, values=values, divide_by_std=False)
    assert_close(result.advantages, [0, -1 / 3, -1 / 3, 0, 2 / 3])
    assert_close(result.returns, [0, 1, 1, 0, 3])


def test_without_std_group_norm_is_dr_grpo():
    layout, rewards, groups = make_layout(TWO), torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    without = compute_advantages("group_norm", layout, rewards, groups=groups, divide_by_std=False)
    assert_close(without.advantages, [0, -1, -1, 0, 1])


def test_any_estimator_may_be_normalised_over_the_batch_or_not():
    # Two sampled tokens with reward 1, one with 3: as they are, and with mean 5/3 and variance 8/9.
    layout, rewards = make_layout(TWO), torch.tensor([1.0, 3.0], dtype=torch.float64)
    raw = compute_advantages("reinforce", layout, rewards, over_batch=False)
    assert_close(raw.advantages, [0, 1, 1, 0, 3])
    # Of the group: -1, -1 and 1 over sqrt(2). Their mean is -1/3 and their variance 8/9 before that division, which
    # the batch's deviation undoes: (-1 + 1/3) / sqrt(8/9), (1 + 1/3) / sqrt(8/9).
    twice = compute_advantages("group_norm", layout, rewards, groups=torch.tensor([0, 0]), over_batch=True)
    std = math.sqrt(8 / 9)
    assert_close(twice.advantages, [0, -2 / 3 / std, -2 / 3 / std, 0, 4 / 3 / std], 1e-8)


def test_rewards_are_clipped_after_the_baseline():
    # 0 and 30: centred -15 and 15, clipped to -10 and 10. Clipped first it would have been 0, 10: -5 and 5.
    result = compute_advantages(
        "dr_grpo", make_layout(TWO), torch.tensor([0, 30]), groups=torch.tensor([0, 0]), reward_clip=(-10, 10)
    )
    assert_close(result.advantages, [0, -10, -10, 0, 10])


def test_kl_in_the_reward_reaches_every_earlier_token():
    # rewards centred -1, 1; KL 0.5, 1 | 2 at 0.1: returns -1 - 0.05 - 0.1 = -1.15, -1.1 | 1 - 0.2 = 0.8
    result = compute_advantages(
        "dr_grpo",
        make_layout(TWO),
        torch.tensor([1.0, 3.0], dtype=torch.float64),
        groups=torch.tensor([0, 0]),
        kl=torch.tensor([NAN, 0.5, 1, NAN, 2], dtype=torch.float64),
        kl_coefficient=0.1,
    )
    assert_close(result.advantages, [0, -1.15, -1.1, 0, 0.8])


def test_turn_rewards_are_compared_with_the_same_turn_of_the_siblings():
    # Turn rewards 1, 2 and 3, episode rewards 0 and 4. Means: first turn 2, second turn 1 (the second episode has
    # none: 0), own 2. First episode: -1, 1, -2: its turns' tokens get -1 + 1 - 2 = -2 and 1 - 2 = -1.
    # Second: 1, and on its last token 0 - 1 + 2 = 1: together 2. The sums are 3 and 7, so -2 and 2 at the first tokens.
    layout = make_layout([[[0, 1, 1, 0, 1]], [[0, 1]]])
    inputs = {
        "layout": layout,
        "rewards": torch.tensor([0.0, 4.0], dtype=torch.float64),
        "groups": torch.tensor([0, 0]),
        "turn_rewards": torch.tensor([1.0, 2.0, 3.0]),
    }
    centred = torch.tensor([0.0, -2, -2, 0, -1, 0, 2], dtype=torch.float64)
    assert_close(compute_advantages("dr_grpo", **inputs).advantages, centred)
    # From the first turn on there are 3 and 7, with std sqrt((4 + 4) / 1), from the second 2 and 4, sqrt((1 + 1) / 1).
    normalised = [0, -2 / math.sqrt(8), -2 / math.sqrt(8), 0, -1 / math.sqrt(2), 0, 2 / math.sqrt(8)]
    assert_close(compute_advantages("group_norm", **inputs, eps=0.0).advantages, normalised)
    # with siblings alone everything is twice as far
    assert_close(compute_advantages("rloo", **inputs).advantages, centred * 2)
    # each clipped to +-0.5: -0.5, 0.5, -0.5 and 0.5, 0.5, so -0.5, 0 and 1
    clipped = compute_advantages("dr_grpo", **inputs, reward_clip=(-0.5, 0.5))
    assert_close(clipped.advantages, [0, -0.5, -0.5, 0, 0, 0, 1])


def test_turn_rewards_without_a_group_are_rewards_to_go():
    layout = make_layout([[[0, 1, 1, 0, 1]], [[0, 1]]])
    result = compute_advantages(
        "reinforce", layout, torch.tensor([0.5, 4.0]), turn_rewards=torch.tensor([1.0, 2.0, 3.0]), divide_by_std=False
    )
    # 1 + 2 + 0.5, the same, 2.5 | 7; mean (3.5 + 3.5 + 2.5 + 7) / 4 = 4.125
    assert_close(result.returns, [0, 3.5, 3.5, 0, 2.5, 0, 7])
    assert_close(result.advantages, [0, -0.625, -0.625, 0, -1.625, 0, 2.875])


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@few
@given(episodes=episode_lists(4, 6), seed=seeds)
def test_the_first_token_sees_the_sum_of_turn_and_episode_rewards(estimator, episodes, seed):
    episodes = [[[1, *episode[0]], *episode[1:]] for episode in episodes]  # at least one sampled token each
    layout, groups = make_layout(episodes), pairs_of_groups(len(episodes))
    rewards, turn_rewards = numbers(seed, len(episodes)), numbers(seed + 1, len(turn_ends(layout)))
    sums = rewards.index_add(0, layout.token_episode[turn_ends(layout)], turn_rewards)
    by_turn = compute_advantages(estimator, layout, rewards, groups=groups, turn_rewards=turn_rewards)
    by_sum = compute_advantages(estimator, layout, sums, groups=groups)
    first = torch.tensor([sampled_tokens(layout, episode)[0] for episode in range(len(episodes))])
    assert_close(by_turn.returns[first], by_sum.returns[first], 1e-9)


def compared(estimator, at, rewards, divide_by_std=True):
    """Compare a reward with its group's, in Python's own floats. Every built-in estimator has its formula here."""
    own, mean = rewards[at], sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return {
        "gae": own,
        "reinforce": own,
        "reinforce_baseline": own - mean,
        "group_norm": (own - mean) / (std + 1e-9 if divide_by_std else 1),
        "dr_grpo": own - mean,
        "rloo": own - (sum(rewards) - own) / (len(rewards) - 1),
    }[estimator]


def oracle_of_turns(estimator, episodes, groups, rewards, turn_rewards, credit):
    """Advantages by a walk over lists, in Python's own floats: each turn's credit against that of its siblings."""
    turns = []  # of each episode: its turns, each the flat positions of its tokens
    position = 0
    for episode in episodes:
        mine = []
        for segment in episode:
            was_sampled = False
            for sampled in segment:
                if sampled and not was_sampled:
                    mine.append([])
                if sampled:
                    mine[-1].append(position)
                was_sampled, position = bool(sampled), position + 1
        turns.append(mine)
    given = iter(turn_rewards)
    rows = [[next(given) for _ in mine] for mine in turns]
    advantages = [0.0] * position
    for at, mine in enumerate(turns):
        siblings = [other for other in range(len(episodes)) if groups[other] == groups[at]]
        for turn, tokens in enumerate(mine):
            if credit == "sum":
                credits = {other: sum(rows[other]) + rewards[other] for other in siblings}
            elif credit == "to_go" or turn == len(mine) - 1:
                credits = {other: sum(rows[other][turn:]) + rewards[other] for other in siblings}
            else:
                credits = {other: rows[other][turn] if turn < len(rows[other]) else 0.0 for other in siblings}
            value = compared(estimator, siblings.index(at), list(credits.values()))
            for token in tokens:
                advantages[token] = value
    if estimator == "reinforce_baseline":
        learned = [token for mine in turns for tokens in mine for token in tokens]
        mean = sum(advantages[token] for token in learned) / len(learned)
        variance = sum((advantages[token] - mean) ** 2 for token in learned) / len(learned)
        for token in learned:
            advantages[token] = (advantages[token] - mean) / math.sqrt(max(variance, 1e-8))
    return advantages


@pytest.mark.parametrize("credit", ["to_go", "own", "sum"])
@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@few
@given(episodes=episode_lists(4, 6), seed=seeds)
def test_credits_of_turns_equal_a_walk_over_lists(estimator, credit, episodes, seed):
    episodes = [[[1, *episode[0]], *episode[1:]] for episode in episodes]
    layout, groups = make_layout(episodes), pairs_of_groups(len(episodes))
    rewards, turn_rewards = numbers(seed, len(episodes)), numbers(seed + 1, len(turn_ends(layout)))
    ours = compute_advantages(
        estimator, layout, rewards, groups=groups, turn_rewards=turn_rewards, turn_credit=credit
    ).advantages
    walked = oracle_of_turns(estimator, episodes, groups.tolist(), rewards.tolist(), turn_rewards.tolist(), credit)
    assert_close(ours, torch.tensor(walked, dtype=torch.float64), 1e-8)


def four_episodes():
    """Turn rewards (0, 1), (1), (0, 0, 1) and (0, 1): different turns, equal sums. Two sampled tokens a turn."""
    rows = [[0.0, 1.0], [1.0], [0.0, 0.0, 1.0], [0.0, 1.0]]
    episodes = [[[token for _ in row for token in (0, 1, 1)]] for row in rows]
    return make_layout(episodes), torch.tensor([reward for row in rows for reward in row])


@pytest.mark.parametrize("clip", [None, (-10.0, 10.0)])
def test_turns_are_divided_by_their_own_deviation_where_the_sums_have_none(clip):
    layout, turn_rewards = four_episodes()
    inputs = {"groups": torch.zeros(4, dtype=torch.int64), "turn_rewards": turn_rewards, "reward_clip": clip}

    def of_turns(credit):
        found = compute_advantages("group_norm", layout, torch.zeros(4), turn_credit=credit, **inputs).advantages
        by_turn = found[layout.mask].reshape(-1, 2)
        assert torch.equal(by_turn[:, 0], by_turn[:, 1])
        return by_turn[:, 0]

    assert of_turns("sum").tolist() == [0.0] * 8
    # Rewards to go: 1 each from the first turn on. From the second on 1, 0, 1, 1, with mean 3/4 and std 1/2; from the
    # third on 0, 0, 1, 0, with mean 1/4 and std 1/2.
    assert_close(of_turns("to_go"), [0, 0.5, 0, 0, 0.5, 1.5, 0, 0.5], 1e-6)
    # Of their own: first turns have 0, 1, 0, 0. The last turn of an episode has what is left, as above.
    assert_close(of_turns("own"), [-0.5, 0.5, 0, -0.5, (0 - 0.5) / math.sqrt(1 / 3), 1.5, -0.5, 0.5], 1e-6)


turn_lists = st.lists(st.lists(st.integers(-30, 30), min_size=1, max_size=4), min_size=2, max_size=6)  # in tenths


@pytest.mark.parametrize("credit", ["to_go", "own", "sum"])
@pytest.mark.parametrize("estimator", [*TOTALS, "user"])
@few
@given(rows=turn_lists, rest=st.sampled_from([0, 1, 10_001]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_no_credit_of_turns_blows_up(estimator, credit, rows, rest, dtype):
    """Whatever the rewards, nothing is divided by the deviation of something else, or of rounding errors."""
    if credit == "own" and estimator in ("gae", "reinforce", "user"):
        return  # refused
    layout = make_layout([[[token for _ in row for token in (0, 1)]] for row in rows])
    found = compute_advantages(
        group_normalised if estimator == "user" else estimator,
        layout,
        torch.full((len(rows),), rest / 10, dtype=dtype),
        groups=torch.zeros(len(rows), dtype=torch.int64),
        values=torch.zeros(layout.num_tokens, dtype=dtype),
        turn_rewards=torch.tensor([reward / 10 for row in rows for reward in row], dtype=torch.float64),
        turn_credit=credit,
    )
    size = len(rows)
    if estimator in ("group_norm", "user"):
        bound = (size - 1) / math.sqrt(size)
    elif ESTIMATORS[estimator].normalisation == "batch":
        bound = math.sqrt(int(layout.mask.sum()))
    else:  # up to four turns between -3 and 3, and siblings twice as far as their mean
        bound = 4 * 6 * 2
    assert float(found.advantages.abs().max()) <= bound * (1 + 1e-6)
    # Where siblings are credited with the same number of tenths there is no advantage, not even of rounding.
    of_turns = iter(found.returns[layout.mask].tolist())
    for row in rows:
        for turn in range(len(row)):
            begin = 0 if credit == "sum" or estimator == "user" else turn
            credits = {sum(other[begin:]) for other in rows}
            if credit == "own" and turn < len(row) - 1:
                credits = {sum(other[turn : turn + 1]) for other in rows}
            ours = next(of_turns)
            if len(credits) == 1 and estimator not in ("gae", "reinforce"):
                assert abs(ours) <= (0.0 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, "user"])
@few
@given(
    rows=st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=4), min_size=2, max_size=6),
    reward=st.floats(-3, 3),
)
def test_equal_rewards_of_episodes_have_exactly_no_advantage_however_turns_divide_them(estimator, rows, reward):
    layout = make_layout([[[token for _ in row for token in (0, 1)]] for row in rows])
    turn_rewards = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    rest = torch.tensor([reward - sum(row) for row in rows], dtype=torch.float32)
    first = torch.tensor([sampled_tokens(layout, episode)[0] for episode in range(len(rows))])
    for credit in ("sum", "to_go"):
        found = compute_advantages(
            group_normalised if estimator == "user" else estimator,
            layout,
            rest,
            groups=torch.zeros(len(rows), dtype=torch.int64),
            turn_rewards=turn_rewards,
            totals=torch.full((len(rows),), reward),
            turn_credit=credit,
        ).returns
        assert not found[first].any()
        assert credit == "to_go" or not found.any()


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo"])
@few
@given(episodes=episode_lists(4, 6), seed=seeds)
def test_a_step_of_time_has_one_advantage_where_turns_are_credited_with_their_own(estimator, episodes, seed):
    """Turns of one or two tokens that nothing separates; a step is a whole run of them."""
    episodes = [[[1, *episode[0]], *episode[1:]] for episode in episodes]
    layout, groups = make_layout(episodes), pairs_of_groups(len(episodes))
    starts, draw = step_starts(layout, None), random.Random(seed)
    turns, last = [], -1
    for end in turn_ends(layout).tolist():
        begin = max(token for token in range(end + 1) if starts[token])
        ends = [token for token in range(begin, end) if draw.random() < 0.5]
        turns += [*ends, end]
        last = end
    assert last == turns[-1]
    turn_rewards, rewards = numbers(seed, len(turns)), numbers(seed + 1, len(episodes))
    kl = numbers(seed + 2, layout.num_tokens)
    found = compute_advantages(
        estimator,
        layout,
        rewards,
        groups=groups,
        turn_rewards=turn_rewards,
        turns=torch.tensor(turns),
        turn_credit="own",
        kl=kl,
        kl_coefficient=0.1,
        starts=starts,
    ).advantages
    # A step is credited with all turns in it: compared by a walk over the steps of this and the sibling episodes, turn
    # by turn, since a sibling's steps may have other turns.
    by_episode = {
        at: [turn for turn, end in enumerate(turns) if int(layout.token_episode[end]) == at]
        for at in range(len(episodes))
    }
    for at in range(len(episodes)):
        siblings = [other for other in range(len(episodes)) if groups[other] == groups[at]]
        tokens = sampled_tokens(layout, at)
        begins = [token for token in tokens if starts[token]]
        for number, begin in enumerate(begins):
            step = [
                token
                for token in tokens
                if begin <= token and (number + 1 == len(begins) or token < begins[number + 1])
            ]
            places = [place for place, turn in enumerate(by_episode[at]) if turns[turn] in step]

            is_last = number + 1 == len(begins)

            def credit(other, places=places, is_last=is_last):
                mine = [float(turn_rewards[turn]) for turn in by_episode[other]]
                if is_last:
                    return sum(mine[places[0] :]) + float(rewards[other])
                return sum(mine[place] for place in places if place < len(mine))

            credits = [credit(other) for other in siblings]
            mean = sum(credits) / len(credits)
            value = credit(at) - mean
            if estimator == "rloo":
                value *= len(credits) / (len(credits) - 1)
            elif estimator == "group_norm":
                value /= math.sqrt(sum((each - mean) ** 2 for each in credits) / (len(credits) - 1)) + 1e-9
            value -= 0.1 * sum(float(kl[token]) for token in step)
            assert [float(found[token]) for token in step] == pytest.approx([value] * len(step), abs=1e-8)


def test_a_turn_may_be_credited_with_its_own_reward_or_with_the_sum():
    # As above: compared with the siblings' turns, first episode -1, 1, -2, the last two of them on its last turn.
    layout = make_layout([[[0, 1, 1, 0, 1]], [[0, 1]]])
    inputs = {
        "layout": layout,
        "rewards": torch.tensor([0.0, 4.0], dtype=torch.float64),
        "groups": torch.tensor([0, 0]),
        "turn_rewards": torch.tensor([1.0, 2.0, 3.0]),
    }
    own = compute_advantages("dr_grpo", **inputs, turn_credit="own")
    assert_close(own.advantages, [0, -1, -1, 0, -1, 0, 2])
    summed = compute_advantages("dr_grpo", **inputs, turn_credit="sum")
    assert_close(summed.advantages, [0, -2, -2, 0, -2, 0, 2])


@pytest.mark.parametrize("estimator", ["gae", "reinforce", lambda rewards, groups: rewards])
def test_estimators_that_cannot_credit_turns_with_their_own_rewards_are_named(estimator):
    name = estimator if isinstance(estimator, str) else "of your own"
    with pytest.raises(UserError, match=f"estimator '{name}' cannot credit turns .* use rloo, .*group_norm, dr_grpo"):
        compute_advantages(
            estimator, make_layout([[[1]], [[1]]]), torch.zeros(2), groups=torch.tensor([0, 0]), turn_credit="own"
        )


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_an_episode_without_sampled_tokens_is_in_no_baseline(estimator):
    """Scenario 37."""
    layout = make_layout([*TWO, [[0, 0]], [[]]])
    with_empty = compute_advantages(
        estimator, layout, torch.tensor([1.0, 3.0, 100.0, NAN]), groups=torch.tensor([0, 0, 0, 1])
    )
    without = compute_advantages(estimator, make_layout(TWO), torch.tensor([1.0, 3.0]), groups=torch.tensor([0, 0]))
    assert_close(with_empty.advantages[:5], without.advantages)
    with pytest.raises(UserError, match=r"group 0: only one sample"):
        compute_advantages(
            estimator, make_layout([TWO[0], [[0]]]), torch.tensor([1.0, 3.0]), groups=torch.tensor([0, 0])
        )


def _any_estimator(estimator, layout, rewards, values, kl, **options):
    return compute_advantages(
        estimator,
        layout,
        rewards,
        groups=pairs_of_groups(layout.num_episodes),
        values=values,
        kl=kl,
        kl_coefficient=0.2,
        **options,
    )


@pytest.mark.parametrize("estimator", TOTALS)
@few
@given(episodes=episode_lists(4, 6), seed=seeds, divide_by_std=st.booleans())
def test_estimators_equal_a_loop_from_the_formulas(estimator, episodes, seed, divide_by_std):
    episodes = [[*episode, [0, 1]] for episode in episodes]
    layout, groups = make_layout(episodes), pairs_of_groups(len(episodes)).tolist()
    rewards, values, kl = (numbers(seed + i, n) for i, n in enumerate([len(episodes), *[layout.num_tokens] * 2]))
    gamma = 0.9 if ESTIMATORS[estimator].discounts else 1.0
    lam = 0.8 if estimator == "gae" else 1.0

    advantages = [0.0] * layout.num_tokens
    for episode in range(len(episodes)):
        members = [other for other in range(len(episodes)) if groups[other] == groups[episode]]
        rewards_of_group = [float(rewards[other]) for other in members]
        shaped = compared(estimator, members.index(episode), rewards_of_group, divide_by_std)
        tokens = sampled_tokens(layout, episode)
        following, next_value = 0.0, 0.0
        for token in reversed(tokens):
            reward = -0.2 * float(kl[token]) + (shaped if token == tokens[-1] else 0.0)
            if estimator == "gae":
                delta = reward + gamma * next_value - float(values[token])
                following, next_value = delta + gamma * lam * following, float(values[token])
            else:
                following = reward + gamma * following
            advantages[token] = following
    if estimator in ("gae", "reinforce", "reinforce_baseline"):
        kept = [a for a, m in zip(advantages, layout.mask, strict=True) if m]
        mean = sum(kept) / len(kept)
        std = math.sqrt(max(sum((a - mean) ** 2 for a in kept) / len(kept), 1e-8)) if divide_by_std else 1.0
        advantages = [(a - mean) / std if m else 0.0 for a, m in zip(advantages, layout.mask, strict=True)]

    result = _any_estimator(estimator, layout, rewards, values, kl, gamma=gamma, lam=lam, divide_by_std=divide_by_std)
    assert_close(result.advantages, advantages, 1e-8)


@pytest.mark.parametrize("estimator", TOTALS)
@few
@given(episodes=episode_lists(4, 6), seed=seeds)
def test_what_stands_at_unsampled_tokens_never_matters(estimator, episodes, seed):
    episodes = [[*episode, [1]] for episode in episodes]
    layout = make_layout(episodes)
    rewards, values, kl = (numbers(seed + i, n) for i, n in enumerate([len(episodes), *[layout.num_tokens] * 2]))
    clean = _any_estimator(estimator, layout, rewards, values, kl)
    dirty = _any_estimator(estimator, layout, rewards, with_rubbish(values, layout.mask), with_rubbish(kl, layout.mask))
    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.returns, dirty.returns)
    assert bool((clean.advantages[~layout.mask] == 0).all())


@pytest.mark.parametrize("estimator", TOTALS)
@few
@given(episodes=episode_lists(4, 6), seed=seeds)
def test_tokens_of_the_environment_change_no_advantage(estimator, episodes, seed):
    episodes = [[*episode, [1]] for episode in episodes]
    layout = make_layout(episodes)
    longer = make_layout([[[0, 0, *[t for token in seg for t in (token, 0)]] for seg in ep] for ep in episodes])
    rewards, values, kl = (numbers(seed + i, n) for i, n in enumerate([len(episodes), *[layout.num_tokens] * 2]))

    def spread(flat):
        result = torch.full((longer.num_tokens,), NAN, dtype=flat.dtype)
        result[longer.mask] = flat[layout.mask]
        return result

    here = _any_estimator(estimator, layout, rewards, values, kl)
    there = _any_estimator(estimator, longer, rewards, spread(values), spread(kl))
    assert_close(there.advantages[longer.mask], here.advantages[layout.mask])


@pytest.mark.parametrize("estimator", TOTALS)
@few
@given(episodes=episode_lists(4, 6), seed=seeds)
def test_permuting_episodes_permutes_their_advantages(estimator, episodes, seed):
    episodes = [[*episode, [1]] for episode in episodes]
    layout, order = make_layout(episodes), some_order(seed, len(episodes))
    other, tokens = permuted(episodes, order)
    groups, rewards = pairs_of_groups(len(episodes)), numbers(seed, len(episodes))
    values = numbers(seed + 1, layout.num_tokens)
    here = compute_advantages(estimator, layout, rewards, groups=groups, values=values)
    there = compute_advantages(estimator, other, rewards[order], groups=groups[order], values=values[tokens])
    assert_close(there.advantages, here.advantages[tokens], 1e-9)


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, "reinforce"])
@few
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    episodes=episode_lists(2, 6),
    reward=st.sampled_from([0.0, 1.0, 0.1, -3.7]),
)
def test_constant_rewards_give_no_advantage(estimator, dtype, episodes, reward):
    layout = make_layout([[*episode, [1]] for episode in episodes])
    rewards = torch.full((layout.num_episodes,), reward, dtype=dtype)
    groups = torch.zeros(layout.num_episodes, dtype=torch.int64)
    result = compute_advantages(estimator, layout, rewards, groups=groups)
    assert_close(result.advantages, torch.zeros(layout.num_tokens, dtype=dtype), 1e-9)


@pytest.mark.parametrize("estimator", TOTALS)
def test_ranks_with_whole_groups_compute_what_one_place_computes(estimator):
    episodes = [[[0, 1, 1]], [[0, 1]], [[1, 0], [1]], [[1, 1, 1]], [[1]], [[0, 0, 1]]]
    groups, rewards = torch.tensor([0, 0, 1, 1, 1, 0]), numbers(3, 6)
    values = numbers(4, make_layout(episodes).num_tokens)
    together = compute_advantages(estimator, make_layout(episodes), rewards, groups=groups, values=values)

    ranks = [permuted(episodes, [0, 1, 5]), permuted(episodes, [2, 3, 4])]
    members = [torch.tensor([0, 1, 5]), torch.tensor([2, 3, 4])]
    sent = []

    def on_rank(rank, add_up):
        layout, tokens = ranks[rank]
        own = members[rank]
        return compute_advantages(
            estimator, layout, rewards[own], groups=groups[own], values=values[tokens], add_up=add_up
        )

    for rank in (0, 1):
        on_rank(rank, lambda local: sent.append(local) or local)
    for rank in (0, 1):
        result = on_rank(rank, lambda local: reduce(add, sent))
        assert_close(result.advantages, together.advantages[ranks[rank][1]], 1e-9)


@pytest.mark.parametrize("estimator", TOTALS)
def test_no_sampled_token_anywhere_gives_zeros(estimator):
    # none sampled, no tokens at all, and a rank that was left without episodes
    for episodes in ([[[0, 0]], [[0]]], [[[]], [[]]], []):
        layout = make_layout(episodes)
        result = compute_advantages(
            estimator,
            layout,
            torch.tensor([1.0, NAN])[: len(episodes)],
            groups=torch.tensor([0, 0])[: len(episodes)],
            values=torch.full((layout.num_tokens,), NAN),
            turn_rewards=torch.zeros(0),
        )
        assert_close(result.advantages, torch.zeros(layout.num_tokens))


@pytest.mark.parametrize("estimator", TOTALS)
def test_precision_and_gradients_of_advantages(estimator):
    layout, groups = make_layout(TWO), torch.tensor([0, 0])
    for given_dtype, expected in ((torch.int64, torch.float32), (torch.float64, torch.float64)):
        values = torch.ones(5, dtype=expected, requires_grad=True)
        result = compute_advantages(
            estimator, layout, torch.tensor([1, 0]).to(given_dtype), groups=groups, values=values
        )
        assert result.advantages.dtype == result.returns.dtype == expected
        assert not result.advantages.requires_grad


# ------------------------------------------------------------------------------------------ several rewards, each apart


def test_each_reward_is_normalised_before_they_are_summed():
    # right: 1, 0, 0 and cheap: 2, 4 in two groups. Means 1/3 and 3, deviations sqrt(1/3) and sqrt(2).
    # style: 10, 30, none, then 5, 5: mean 20 and deviation sqrt(200) of the two; equal ones have exactly 0.
    groups = torch.tensor([0, 0, 0, 1, 1])
    parts = {
        "right": torch.tensor([1.0, 0, 0, 2, 4], dtype=torch.float64),
        "style": torch.tensor([10, 30, NAN, 5, 5], dtype=torch.float64),
    }
    weights = {"right": 1.0, "style": 0.5}
    third, half = 1 / math.sqrt(1 / 3), 1 / math.sqrt(2)
    expected = [third * 2 / 3 - half / 2, -third / 3 + half / 2, -third / 3, -half, half]
    totals = torch.zeros(5, dtype=torch.float64)
    assert_close(parts_normalised(totals, groups, parts=parts, part_weights=weights, eps=1e-30), expected)
    # the sum would have compared 6, 15, 0 instead, where style outweighs the rest twelve times
    without = parts_normalised(totals, groups, parts=parts, part_weights=weights, with_std=False)
    assert_close(without, [2 / 3 - 5, -1 / 3 + 5, -1 / 3, -1, 1])


def test_a_reward_that_applies_to_one_sample_of_a_group_says_nothing():
    parts = {"a": torch.tensor([NAN, 3.0, NAN]), "b": torch.tensor([1.0, 0.0, 1.0])}
    weights = {"a": 5.0, "b": 1.0}
    alone = parts_normalised(torch.zeros(3), torch.zeros(3), parts=parts, part_weights=weights)
    assert_close(alone, parts_normalised(torch.zeros(3), torch.zeros(3), parts={"b": parts["b"]}, part_weights=weights))
    assert alone.abs().min() > 0


@few
@given(seed=seeds, over_batch=st.sampled_from([None, True, False]))
def test_gdpo_equals_a_loop_over_ranks_with_whole_groups(seed, over_batch):
    episodes = [[[0, 1, 1]], [[0, 1]], [[1, 0], [1]], [[1, 1, 1]], [[1]], [[0, 0, 1]]]
    groups, layout = torch.tensor([0, 0, 1, 1, 1, 0]), make_layout(episodes)
    parts = {name: numbers(seed + at, 6, scale=10.0**at) for at, name in enumerate("abc")}
    weights = {"a": 1.0, "b": -0.5, "c": 2.0}
    sums = []
    for episode in range(6):
        members = [other for other in range(6) if groups[other] == groups[episode]]
        sums.append(0.0)
        for name, values in parts.items():
            of_group = [float(values[other]) for other in members]
            mean = sum(of_group) / len(of_group)
            std = math.sqrt(sum((value - mean) ** 2 for value in of_group) / (len(of_group) - 1))
            sums[-1] += weights[name] * (float(values[episode]) - mean) / (std + 1e-9)
    counts = layout.sampled_per_episode.tolist() if over_batch else [1] * 6
    mean = sum(n * value for n, value in zip(counts, sums, strict=True)) / sum(counts)
    std = math.sqrt(sum(n * (value - mean) ** 2 for n, value in zip(counts, sums, strict=True)) / sum(counts))
    expected = sums if over_batch is False else [(value - mean) / std for value in sums]

    sent = []

    def on_rank(members, add_up):
        own, _ = permuted(episodes, members)
        mine = {name: values[members] for name, values in parts.items()}
        totals = torch.full((3,), 7.0, dtype=torch.float64)  # which is not read
        options = {"parts": mine, "part_weights": weights, "over_batch": over_batch, "add_up": add_up}
        found = compute_advantages("gdpo", own, totals, groups=groups[members], **options).advantages
        return zip(own.token_episode[own.mask].tolist(), found[own.mask].tolist(), strict=True)

    ranks = [0, 1, 5], [2, 3, 4]
    for members in ranks:
        on_rank(members, lambda local: sent.append(local) or local)
    for members in ranks:
        for at, advantage in on_rank(members, lambda local: reduce(add, sent)):
            assert advantage == pytest.approx(expected[members[at]], abs=1e-8)


def test_a_custom_estimator_gets_the_rewards_apart():
    given = {"right": torch.tensor([1.0, 0.0]), "style": torch.tensor([NAN, 4.0])}

    def mine(rewards, groups, parts, part_weights):
        assert part_weights == {"right": 1.0, "style": 0.25}
        return parts["right"] - parts["style"].nan_to_num(0.0)

    weights = {"right": 1.0, "style": 0.25}
    rewards, groups = torch.tensor([1.0, 1.0]), torch.tensor([0, 0])
    found = compute_advantages(mine, make_layout(TWO), rewards, groups=groups, parts=given, part_weights=weights)
    assert found.advantages.tolist() == [0, 1, 1, 0, -4]


def test_what_cannot_be_computed_is_refused():
    layout, rewards, groups = make_layout(TWO), torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    with pytest.raises(UserError, match=r"no advantage estimator 'group_nrom': .*; did you mean group_norm\?"):
        compute_advantages("group_nrom", layout, rewards)
    with pytest.raises(UserError, match=r"no advantage estimator 'xyz': choose one of gae, reinforce"):
        compute_advantages("xyz", layout, rewards)
    with pytest.raises(UserError, match=r"gamma 0.9 has no effect with estimator 'rloo': .* use gae or reinforce"):
        compute_advantages("rloo", layout, rewards, groups=groups, gamma=0.9)
    with pytest.raises(UserError, match=r"lambda 0.9 has no effect with estimator 'reinforce'"):
        compute_advantages("reinforce", layout, rewards, lam=0.9)
    with pytest.raises(UserError, match=r"'rloo' compares an episode with its group: pass groups"):
        compute_advantages("rloo", layout, rewards)
    with pytest.raises(UserError, match=r"'gae' needs a critic: pass its values"):
        compute_advantages("gae", layout, rewards)
    with pytest.raises(RewardError, match=r"the reward of episode 1 is nan \(1 such\).*drop the sample"):
        compute_advantages("dr_grpo", layout, torch.tensor([1.0, NAN]), groups=groups)
    with pytest.raises(RewardError, match=r"the reward of turn 0 is inf"):
        compute_advantages("reinforce", layout, rewards, turn_rewards=torch.tensor([torch.inf, 0]))
