from dataclasses import replace
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
    permuted,
    sampled_tokens,
    seeds,
    some_order,
)
from hypothesis import given
from hypothesis import strategies as st

from hotseat.algorithms.aggregation import StepTotals, loss_weights, mask_truncated, step_totals, weighted_sum
from hotseat.algorithms.kl import estimate_kl
from hotseat.algorithms.policy_loss import entropy_bonus, gspo_loss, ppo_loss
from hotseat.algorithms.value_loss import value_loss
from hotseat.errors import UserError

MODES = ("token_mean", "sequence_mean", "constant")
# 3 sampled tokens over two segments, 1 sampled token, none
EPISODES = [[[0, 1, 1], [0, 1]], [[1, 0]], [[0]]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", [0, 1 / 4, 1 / 4, 0, 1 / 4, 1 / 4, 0, 0]),
        # two episodes count, the third sampled nothing: 1 / (2 * 3) and 1 / (2 * 1)
        ("sequence_mean", [0, 1 / 6, 1 / 6, 0, 1 / 6, 1 / 2, 0, 0]),
        # 1 / (2 * 10)
        ("constant", [0, 1 / 20, 1 / 20, 0, 1 / 20, 1 / 20, 0, 0]),
    ],
)
def test_the_weights_of_three_episodes(how, expected):
    layout = make_layout(EPISODES)
    assert_close(loss_weights(layout, how, max_length=10, dtype=torch.float64), expected)
    assert step_totals(layout) == StepTotals(num_sampled=4, num_episodes=2)
    assert loss_weights(layout, how, max_length=10).dtype == torch.float32


def test_truncated_episodes_are_masked_and_counted_in_no_mean():
    # 3 sampled tokens, 1, none, 2: without the first and the third, N is 3 and E is 2.
    layout = make_layout([*EPISODES, [[1, 1]]])
    masked = replace(layout, mask=mask_truncated(layout, torch.tensor([True, False, True, False])))
    assert masked.mask.tolist() == [False] * 5 + [True, False, False, True, True]
    assert step_totals(masked) == StepTotals(3, 2)
    assert_close(loss_weights(masked, "token_mean"), [0] * 5 + [1 / 3, 0, 0, 1 / 3, 1 / 3], 1e-6)
    assert_close(loss_weights(masked, "sequence_mean"), [0] * 5 + [1 / 2, 0, 0, 1 / 4, 1 / 4], 1e-6)


@few
@given(layout=layouts(), seed=seeds)
def test_masking_truncated_episodes_equals_a_loop(layout, seed):
    truncated = numbers(seed, layout.num_episodes) > 0
    kept = [
        token
        for episode in range(layout.num_episodes)
        for token in sampled_tokens(layout, episode)
        if not truncated[episode]
    ]
    assert mask_truncated(layout, truncated).nonzero().flatten().tolist() == sorted(kept)


def test_a_weighted_sum_reads_no_token_of_weight_zero():
    losses = torch.tensor([2.0, NAN, 3.0], requires_grad=True)
    total = weighted_sum(losses, torch.tensor([0.5, 0.0, 0.25]))
    assert_close(total, 1.75)  # 2 * 0.5 + 3 * 0.25
    total.backward()
    assert_close(losses.grad, [0.5, 0, 0.25])


@pytest.mark.parametrize("how", MODES)
@few
@given(layout=layouts(), seed=seeds)
def test_weighted_losses_equal_a_loop_from_the_definition(how, layout, seed):
    losses = numbers(seed, layout.num_tokens)
    per_episode = [[float(losses[t]) for t in sampled_tokens(layout, e)] for e in range(layout.num_episodes)]
    per_episode = [tokens for tokens in per_episode if tokens]
    everything = [loss for tokens in per_episode for loss in tokens]
    if not everything:
        expected = 0.0
    elif how == "token_mean":
        expected = sum(everything) / len(everything)
    elif how == "sequence_mean":
        expected = sum(sum(tokens) / len(tokens) for tokens in per_episode) / len(per_episode)
    else:
        expected = sum(everything) / (len(per_episode) * 7)
    weights = loss_weights(layout, how, max_length=7, dtype=torch.float64)
    assert_close(weighted_sum(losses, weights), expected)


@pytest.mark.parametrize("how", MODES)
@few
@given(episodes=episode_lists(), seed=seeds)
def test_permuting_episodes_permutes_the_weights(how, episodes, seed):
    other, tokens = permuted(episodes, some_order(seed, len(episodes)))
    weights = loss_weights(make_layout(episodes), how, max_length=7, dtype=torch.float64)
    assert_close(loss_weights(other, how, max_length=7, dtype=torch.float64), weights[tokens])


def _token_losses(name, parameter, features, data, layout):
    """Losses of a linear model, so that gradients with respect to its weights, not to tokens, are compared."""
    outputs = features @ parameter
    if name == "value":
        return value_loss(outputs, data[0], data[1], layout.mask, clip=0.5).loss
    if name == "gspo":
        return gspo_loss(outputs, data[0], data[1], layout, eps_low=0.2, eps_high=0.2).loss
    surrogate = ppo_loss(outputs, data[0], data[1], layout.mask, eps_low=0.2, eps_high=0.2, dual_clip=3.0).loss
    kl = estimate_kl(outputs, data[2], layout.mask, "k3")
    return surrogate + 0.1 * kl + entropy_bonus(outputs.square(), layout.mask, 0.01)


@pytest.mark.parametrize("name", ["ppo", "gspo", "value"])
@pytest.mark.parametrize("how", MODES)
@few
@given(
    episodes=episode_lists(1, 7),
    seed=seeds,
    num_ranks=st.integers(1, 3),
    num_micro_batches=st.integers(1, 4),
)
def test_loss_and_gradient_do_not_depend_on_ranks_and_micro_batches(
    name, how, episodes, seed, num_ranks, num_micro_batches
):
    whole = make_layout(episodes)
    features = numbers(seed, whole.num_tokens, 3)
    data = numbers(seed + 1, 3, whole.num_tokens)
    options = {"max_length": 11, "dtype": torch.float64}

    parameter = numbers(seed + 2, 3, grad=True)
    loss = weighted_sum(_token_losses(name, parameter, features, data, whole), loss_weights(whole, how, **options))
    loss.backward()

    # Any share of the episodes for each rank, in any order; a rank may have none.
    order = torch.tensor(some_order(seed, len(episodes)))
    rank_of = torch.randint(num_ranks, (len(episodes),), generator=torch.Generator().manual_seed(seed))
    shares = [order[rank_of == rank] for rank in range(num_ranks)]
    totals = reduce(add, [step_totals(permuted(episodes, share.tolist())[0]) for share in shares])
    cut_parameter = numbers(seed + 2, 3, grad=True)
    cut_loss = 0.0
    for share in shares:
        weights = loss_weights(permuted(episodes, share.tolist())[0], how, totals=totals, **options)
        for members in share.tensor_split(num_micro_batches):
            micro, tokens = permuted(episodes, members.tolist())
            own, weights = weights[: micro.num_tokens], weights[micro.num_tokens :]
            part = weighted_sum(_token_losses(name, cut_parameter, features[tokens], data[:, tokens], micro), own)
            part.backward()
            cut_loss += float(part.detach())
        assert len(weights) == 0
    assert cut_loss == pytest.approx(float(loss.detach()), rel=1e-10, abs=1e-12)
    assert_close(cut_parameter.grad, parameter.grad, 1e-10)


@pytest.mark.parametrize("how", MODES)
@few
@given(layout=layouts(), seed=seeds, cuts=st.lists(st.integers(0, 60), max_size=5))
def test_tokens_may_be_cut_anywhere_once_they_are_weighed(how, layout, seed, cuts):
    losses, weights = numbers(seed, layout.num_tokens), loss_weights(layout, how, max_length=5, dtype=torch.float64)
    parts = torch.tensor_split(torch.arange(layout.num_tokens), sorted(min(cut, layout.num_tokens) for cut in cuts))
    total = sum(weighted_sum(losses[part], weights[part]) for part in parts)
    assert_close(total, weighted_sum(losses, weights))


@pytest.mark.parametrize("how", MODES)
def test_a_step_without_sampled_tokens_has_loss_zero(how):
    for episodes in ([[[0, 0]]], [[[]]]):
        layout = make_layout(episodes)
        weights = loss_weights(layout, how, max_length=3)
        assert bool(weights.isfinite().all())
        assert_close(weighted_sum(torch.full((layout.num_tokens,), NAN), weights), 0.0)


def test_aggregations_that_cannot_work_are_refused():
    layout = make_layout(EPISODES)
    for max_length in (None, 0):
        with pytest.raises(UserError, match=rf"'constant' divides by a fixed length, and max_length is {max_length}"):
            loss_weights(layout, "constant", max_length=max_length)
    with pytest.raises(UserError, match=r"'mean' is not known: use one of token_mean, sequence_mean, constant"):
        loss_weights(layout, "mean")
