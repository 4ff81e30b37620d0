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

from hotseat.algorithms import correction_weights
from hotseat.errors import UserError

KINDS = ("tis", "icepop", "seq-mask-tis")
BOUNDS = {"low": 0.5, "high": 2.0}
# ratios 4, 1, 0.25 | 4, 4 : geometric means 1 and 4
EPISODES = [[[0, 1, 1], [0, 1]], [[1, 1]]]
LOG_RATIOS = torch.tensor([NAN, math.log(4), 0, NAN, -math.log(4), math.log(4), math.log(4)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "expected", "changed"),
    [
        ("tis", [0, 2, 1, 0, 0.5, 2, 2], [0, 1, 0, 0, 1, 1, 1]),
        ("icepop", [0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 1]),
        # the first episode is kept and its tokens are clamped, the second is dropped
        ("seq-mask-tis", [0, 2, 1, 0, 0.5, 0, 0], [0, 1, 0, 0, 1, 1, 1]),
    ],
)
def test_each_correction_of_two_episodes(kind, expected, changed):
    result = correction_weights(LOG_RATIOS - 1, torch.full((7,), -1.0), make_layout(EPISODES), kind, **BOUNDS)
    assert_close(result.weights, expected)
    assert_close(result.ratio, [1, 4, 1, 1, 0.25, 4, 4])
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
    assert_close(result.weights, [0, 0] if kind == "icepop" else [2, 0.5])
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
    with pytest.raises(UserError, match=r"correction 'mask' is not known: use one of tis, icepop, seq-mask-tis"):
        correction_weights(torch.zeros(1), torch.zeros(1), layout, "mask", **BOUNDS)
