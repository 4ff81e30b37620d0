import math

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
    with_rubbish,
)
from hypothesis import given

from hotseat.algorithms.corrections import WeightTotals, correction_weights, rejection_weights, weight_totals
from hotseat.errors import UserError

KINDS = ("tis", "icepop", "seq-mask-tis", "seq-tis", "seq-icepop")
BOUNDS = {"low": 0.5, "high": 2.0}
# ratios 4, 1, 0.25 | 4, 4 : geometric means 1 and 4
EPISODES = [[[0, 1, 1], [0, 1]], [[1, 1]]]
RATIOS = [1, 4, 1, 1, 0.25, 4, 4]
LOG_RATIOS = torch.tensor([NAN, math.log(4), 0, NAN, -math.log(4), math.log(4), math.log(4)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "expected", "changed", "ratio"),
    [
        ("tis", [0, 2, 1, 0, 0.5, 2, 2], [0, 1, 0, 0, 1, 1, 1], RATIOS),
        ("icepop", [0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 1], RATIOS),
        # the first episode is kept and its tokens are clamped, the second is dropped
        ("seq-mask-tis", [0, 2, 1, 0, 0.5, 0, 0], [0, 1, 0, 0, 1, 1, 1], RATIOS),
        # products 4 * 1 * 0.25 = 1 and 4 * 4 = 16
        ("seq-tis", [0, 1, 1, 0, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 16, 16]),
        ("seq-icepop", [0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 16, 16]),
    ],
)
def test_each_correction_of_two_episodes(kind, expected, changed, ratio):
    result = correction_weights(LOG_RATIOS - 1, torch.full((7,), -1.0), make_layout(EPISODES), kind, **BOUNDS)
    assert_close(result.weights, expected)
    assert_close(result.ratio, ratio)
    assert result.changed.tolist() == [bool(flag) for flag in changed]


def test_bounds_are_inclusive():
    layout = make_layout([[[1]], [[1]]])
    # log-probs chosen so that the ratios are exactly 1: both bounds at once
    for kind in KINDS:
        result = correction_weights(torch.zeros(2), torch.zeros(2), layout, kind, low=1.0, high=2.0)
        assert_close(result.weights, [1, 1])
        assert not result.changed.any()


@pytest.mark.parametrize("kind", KINDS)
def test_huge_gaps_give_finite_weights(kind):
    # an episode with mean log-ratio 0 and tokens at +-1000: OpenRLHF's seq-mask-tis has e^1000 = inf here
    layout = make_layout([[[1, 1]]])
    result = correction_weights(torch.tensor([0.0, -1000.0]), torch.tensor([-1000.0, 0.0]), layout, kind, **BOUNDS)
    expected = {"icepop": [0, 0], "seq-tis": [1, 1], "seq-icepop": [1, 1]}
    assert_close(result.weights, expected.get(kind, [2, 0.5]))
    assert bool(result.ratio.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
@few
@given(layout=layouts(), seed=seeds)
def test_corrections_equal_a_loop(kind, layout, seed):
    old, rollout = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    expected = [0.0] * layout.num_tokens
    for episode in range(layout.num_episodes):
        tokens = sampled_tokens(layout, episode)
        gaps = [float(old[token] - rollout[token]) for token in tokens]
        mean = math.exp(sum(gaps) / len(gaps)) if gaps else 1.0
        for token, gap in zip(tokens, gaps, strict=True):
            ratio = math.exp(gap)
            clamped = max(0.5, min(2.0, ratio))
            expected[token] = {
                "tis": clamped,
                "icepop": ratio if 0.5 <= ratio <= 2.0 else 0.0,
                "seq-mask-tis": clamped if 0.5 <= mean <= 2.0 else 0.0,
                "seq-tis": max(0.5, min(2.0, mean ** len(gaps))),
                "seq-icepop": mean ** len(gaps) if 0.5 <= mean ** len(gaps) <= 2.0 else 0.0,
            }[kind]
    assert_close(correction_weights(old, rollout, layout, kind, **BOUNDS).weights, expected)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(layout=layouts(), seed=seeds)
def test_corrections_never_read_unsampled_tokens(kind, layout, seed):
    clean = numbers(seed, layout.num_tokens, grad=True), numbers(seed + 1, layout.num_tokens)
    dirty = tuple(with_rubbish(values, layout.mask) for values in clean)
    here = correction_weights(*clean, layout, kind, **BOUNDS)
    there = correction_weights(*dirty, layout, kind, **BOUNDS)
    for field in ("weights", "ratio", "changed"):
        assert torch.equal(getattr(here, field), getattr(there, field))
    assert not here.weights.requires_grad


@pytest.mark.parametrize("kind", KINDS)
@few
@given(episodes=episode_lists(), seed=seeds)
def test_permuting_episodes_permutes_the_corrections(kind, episodes, seed):
    layout = make_layout(episodes)
    other, tokens = permuted(episodes, some_order(seed, len(episodes)))
    old, rollout = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    here = correction_weights(old, rollout, layout, kind, **BOUNDS).weights
    assert_close(correction_weights(old[tokens], rollout[tokens], other, kind, **BOUNDS).weights, here[tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_log_prob_that_is_not_a_number_stays_visible(kind):
    layout = make_layout([[[1, 1]], [[1]]])
    weights = correction_weights(torch.zeros(3), torch.tensor([NAN, 0.0, 0.0]), layout, kind, **BOUNDS).weights
    assert math.isnan(weights[0])
    assert float(weights[2]) == 1


def test_corrections_that_cannot_work_are_refused():
    layout = make_layout([[[1]]])
    for low, high in ((2.0, 0.5), (-1.0, 2.0), (NAN, 2.0)):
        with pytest.raises(UserError, match=rf"thresholds are \[{low}, {high}\]: .* 0 <= low < high"):
            correction_weights(torch.zeros(1), torch.zeros(1), layout, "tis", low=low, high=high)
    with pytest.raises(
        UserError, match=r"no correction 'mask': choose one of none, tis, icepop, seq-mask-tis, seq-tis"
    ):
        correction_weights(torch.zeros(1), torch.zeros(1), layout, "mask", **BOUNDS)
    with pytest.raises(UserError, match="correction rollout-ratio has no weights: use one of tis, icepop"):
        correction_weights(torch.zeros(1), torch.zeros(1), layout, "rollout-ratio", **BOUNDS)


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        # geometric means 1 and 4
        ("k1", {"high": 2.0}, [0, 1, 1, 0, 1, 0, 0]),
        ("k1", {"high": 4.1}, [0, 1, 1, 0, 1, 1, 1]),
        ("k1", {"low": 2.0, "high": 8.0}, [0, 0, 0, 0, 0, 1, 1]),
        # with l = log 4 = 1.386: means of d^2 / 2 are l^2 / 3 = 0.641 and l^2 / 2 = 0.961
        ("k2", {"high": 0.7}, [0, 1, 1, 0, 1, 0, 0]),
        ("k2", {"high": 0.6}, [0, 0, 0, 0, 0, 0, 0]),
        # means of e^d - 1 - d are (3 - l + 0 - 0.75 + l) / 3 = 0.75 and 3 - l = 1.614
        ("k3", {"high": 0.8}, [0, 1, 1, 0, 1, 0, 0]),
        ("k3", {"high": 0.7}, [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_answers_are_rejected_by_their_mean_divergence(kind, bounds, expected):
    layout = make_layout(EPISODES)
    assert_close(rejection_weights(LOG_RATIOS - 1, torch.full((7,), -1.0), layout, kind, **bounds), expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@few
@given(layout=layouts(), seed=seeds)
def test_rejection_equals_a_loop_and_never_reads_unsampled_tokens(kind, layout, seed):
    old, rollout = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    expected = [0.0] * layout.num_tokens
    for episode in range(layout.num_episodes):
        tokens = sampled_tokens(layout, episode)
        gaps = [float(old[token] - rollout[token]) for token in tokens]
        if kind == "k1":  # by the product, not by the mean of logarithms
            is_kept = bool(gaps) and 1 / 1.5 <= math.prod(math.exp(gap) for gap in gaps) ** (1 / len(gaps)) <= 1.5
        else:
            values = [gap**2 / 2 if kind == "k2" else math.expm1(gap) - gap for gap in gaps]
            is_kept = sum(values) <= 1.5 * len(values)
        for token in tokens:
            expected[token] = float(is_kept)
    dirty = [with_rubbish(values, layout.mask) for values in (old, rollout)]
    assert_close(rejection_weights(*dirty, layout, kind, high=1.5), expected)


def test_a_log_prob_that_is_not_a_number_is_not_taken_for_agreement():
    layout = make_layout([[[1, 1]], [[1]]])
    kept = rejection_weights(torch.zeros(3), torch.tensor([NAN, 0.0, 0.0]), layout, "k2", high=0.1)
    assert kept[:2].isnan().all()
    assert float(kept[2]) == 1


def test_rejections_that_cannot_work_are_refused():
    inputs = torch.zeros(1), torch.zeros(1), make_layout([[[1]]])
    for bounds in ({"high": -1.0}, {"high": 0.5}, {"low": 3.0, "high": 2.0}, {"high": NAN}):
        with pytest.raises(UserError, match=r"rejection by k1 has the bounds \[.*\]: it must be 0 <= low < high"):
            rejection_weights(*inputs, "k1", **bounds)
    with pytest.raises(UserError, match="a lower bound of 0.5 has no effect on rejection by k3"):
        rejection_weights(*inputs, "k3", low=0.5, high=1.0)
    with pytest.raises(UserError, match="rejection by 'k4' is not known: use one of k1, k2, k3"):
        rejection_weights(*inputs, "k4", high=1.0)


def test_weights_are_normalised_over_tokens_or_episodes_of_all_ranks():
    # Tokens: (3 + 3 + 3 + 1) / 4 = 2.5. Episodes: (3 + 1) / 2 = 2. The third episode sampled nothing.
    layout, weights = make_layout([[[0, 1, 1, 1]], [[1]], [[0]]]), torch.tensor([0.0, 3, 3, 3, 1, 0])
    assert weight_totals(weights, layout, "tis") == WeightTotals(10.0, 4)
    assert weight_totals(weights, layout, "seq-tis") == WeightTotals(4.0, 2)
    assert (WeightTotals(10.0, 4) + WeightTotals(2.0, 4)).scale == 8 / 12
    assert WeightTotals(0.0, 4).scale == 1


@pytest.mark.parametrize("kind", KINDS)
@few
@given(layout=layouts(), seed=seeds)
def test_normalised_weights_have_mean_one(kind, layout, seed):
    old, rollout = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    weights = correction_weights(old, rollout, layout, kind, **BOUNDS).weights
    scaled = weights * weight_totals(weights, layout, kind).scale
    of_tokens = [[float(scaled[token]) for token in sampled_tokens(layout, e)] for e in range(layout.num_episodes)]
    values = [x for each in of_tokens for x in (each[:1] if kind in ("seq-tis", "seq-icepop") else each)]
    assert not any(values) or sum(values) / len(values) == pytest.approx(1)
