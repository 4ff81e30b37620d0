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
    quick,
    sampled_tokens,
    seeds,
    some_order,
    with_rubbish,
)
from hypothesis import given
from hypothesis import strategies as st

from hotseat.algorithms.policy_loss import cispo_loss, entropy_bonus, gmpo_loss, gspo_loss, ppo_loss, sapo_loss
from hotseat.errors import UserError

CLIP = {"eps_low": 0.2, "eps_high": 0.3}
GATE = {"temperature_pos": 1.0, "temperature_neg": 2.0}
ALL = ["ppo", "gspo", "cispo", "sapo", "gmpo"]


def _loss(name, log_probs, old, advantages, layout, **options):
    if name == "ppo":
        return ppo_loss(log_probs, old, advantages, layout.mask, **CLIP, **options)
    if name == "cispo":
        return cispo_loss(log_probs, old, advantages, layout.mask, **CLIP)
    if name == "sapo":
        return sapo_loss(log_probs, old, advantages, layout.mask, **GATE)
    if name == "gmpo":
        return gmpo_loss(log_probs, old, advantages, layout, **CLIP)
    return gspo_loss(log_probs, old, advantages, layout, **CLIP, **options)


def test_the_clipped_surrogate_of_six_tokens():
    # ratio 2, 0.5, 1.1 with A = 1:  -min(2, 1.3) = -1.3;  -min(0.5, 0.8) = -0.5;  -1.1
    # the same with A = -2:          -min(-4, -2.6) = 4;    -min(-1, -1.6) = 1.6;   2.2
    ratios = torch.tensor([2, 0.5, 1.1, 2, 0.5, 1.1], dtype=torch.float64)
    log_probs = (ratios.log() - 1).requires_grad_()
    advantages = torch.tensor([1.0, 1, 1, -2, -2, -2], dtype=torch.float64)
    result = ppo_loss(log_probs, torch.full((6,), -1.0), advantages, torch.ones(6, dtype=torch.bool), **CLIP)
    assert_close(result.loss, [-1.3, -0.5, -1.1, 4, 1.6, 2.2])
    assert_close(result.ratio, ratios)
    assert_close(result.log_ratio, ratios.log())
    assert result.clipped.tolist() == [True, False, False, False, True, False]
    assert not result.dual_clipped.any()
    # the gradient is -A * ratio where nothing is clipped
    result.loss.sum().backward()
    assert_close(log_probs.grad, [0, -0.5, -1.1, 4, 0, 2.2])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    # A = -1, ratio 10: -max(min(-10, -1.3), 3 * -1) = 3, no gradient. A = 1, ratio 10: -1.3 as before.
    # A = -1, ratio 2: -max(-2, -3) = 2.
    log_probs = torch.tensor([10.0, 10.0, 2.0], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    result = ppo_loss(log_probs, torch.zeros(3), advantages, torch.ones(3, dtype=torch.bool), **CLIP, dual_clip=3.0)
    assert_close(result.loss, [3, -1.3, 2])
    assert result.dual_clipped.tolist() == [True, False, False]
    result.loss.sum().backward()
    assert_close(log_probs.grad, [0, 0, 2])


def test_gspo_has_one_ratio_per_episode_over_all_its_segments():
    # First episode: log-ratios 0.1, 0.2 in one segment and 0.6 in the next: mean 0.3, ratio e^0.3 = 1.3498588 > 1.3.
    # Second episode: log-ratio 0.1: ratio 1.1051709.
    layout = make_layout([[[0, 1, 1], [0, 1]], [[1]]])
    log_probs = torch.tensor([NAN, 0.1, 0.2, NAN, 0.6, 0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([NAN, 1, 1, NAN, -1, 1], dtype=torch.float64)
    result = gspo_loss(log_probs, torch.zeros(6), advantages, layout, **CLIP)
    ratio = math.exp(0.3)
    assert_close(result.loss, [0, -1.3, -1.3, 0, ratio, -math.exp(0.1)])
    assert_close(result.ratio, [1, ratio, ratio, 1, ratio, math.exp(0.1)])
    assert_close(result.log_ratio, [0, 0.1, 0.2, 0, 0.6, 0.1])
    assert result.clipped.tolist() == [False, True, True, False, False, False]
    # only the third token's loss is free, and it has another advantage than the others: its gradient is its own
    result.loss.sum().backward()
    assert_close(log_probs.grad, [0, 0, 0, 0, ratio, -math.exp(0.1)])


def test_gspo_of_one_advantage_has_the_gradient_of_the_ratio():
    # As above: ratio e^0.3 with A = -1, not clipped. Each token's loss has the gradient ratio / 3 in all three tokens.
    layout = make_layout([[[0, 1, 1], [0, 1]]])
    log_probs = torch.tensor([NAN, 0.1, 0.2, NAN, 0.6], dtype=torch.float64, requires_grad=True)
    result = gspo_loss(log_probs, torch.zeros(5), torch.full((5,), -1.0), layout, **CLIP)
    (result.loss * torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])).sum().backward()
    third = math.exp(0.3) / 3
    assert_close(log_probs.grad, [0, third, third, 0, third])


@few
@given(layout=layouts(), seed=seeds, dual_clip=st.sampled_from([None, 1.5]))
def test_gspo_of_one_advantage_per_episode_is_bit_for_bit_that_of_the_paper(layout, seed, dual_clip):
    """With one advantage in each episode, nothing of GSPO-token is left, not even in rounding."""
    old = numbers(seed, layout.num_tokens).float()
    fast = (old + numbers(seed + 1, layout.num_tokens, scale=0.5).float()).requires_grad_()
    plain = fast.detach().clone().requires_grad_()
    of_episodes = numbers(seed + 2, layout.num_episodes).float()[layout.token_episode]
    result = gspo_loss(fast, old, of_episodes, layout, **CLIP, dual_clip=dual_clip)
    sums = torch.zeros(layout.num_episodes).index_add(
        0, layout.token_episode, torch.where(layout.mask, plain - old, 0.0)
    )
    ratio = (sums / layout.sampled_per_episode.clamp(min=1))[layout.token_episode].exp()
    advantages = torch.where(layout.mask, of_episodes, 0.0)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    if dual_clip is not None:
        gain = torch.where((advantages < 0) & (dual_clip * advantages > gain), dual_clip * advantages, gain)
    assert torch.equal(result.loss, -gain)
    weights = numbers(seed + 3, layout.num_tokens).float()
    (result.loss * weights).sum().backward()
    (-gain * weights).sum().backward()
    assert torch.equal(fast.grad, plain.grad)


@few
@given(layout=layouts(), seed=seeds)
def test_gspo_token_and_gspo_have_one_gradient_where_the_advantages_of_an_episode_are_one(layout, seed):
    """In a mean over the tokens of each episode: GSPO-token by autograd in float64, from the paper's equation."""
    old = numbers(seed, layout.num_tokens)
    fast = (old + numbers(seed + 1, layout.num_tokens, scale=0.5)).requires_grad_()
    token = fast.detach().clone().requires_grad_()
    of_episodes = numbers(seed + 2, layout.num_episodes)
    loss = gspo_loss(fast, old, of_episodes[layout.token_episode], layout, **CLIP).loss
    lengths = layout.sampled_per_episode.clamp(min=1)
    (loss / lengths[layout.token_episode]).sum().backward()
    total = torch.zeros((), dtype=torch.float64)
    for episode in range(layout.num_episodes):
        tokens, advantage = sampled_tokens(layout, episode), float(of_episodes[episode])
        for at in tokens:
            ratio = math.exp(sum(float(fast[t].detach() - old[t]) for t in tokens) / len(tokens))
            ratio = ratio * torch.exp(token[at]) / torch.exp(token[at]).detach()
            total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage) / len(tokens)
    if total.requires_grad:
        total.backward()
    assert_close(fast.grad, torch.zeros_like(fast) if token.grad is None else token.grad)


def test_the_log_ratio_is_clamped_before_it_is_exponentiated():
    log_probs = torch.tensor([50.0, -50.0], dtype=torch.float64, requires_grad=True)
    result = ppo_loss(log_probs, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool), **CLIP)
    assert_close(result.loss, [math.exp(20), -math.exp(-20)])
    assert_close(result.log_ratio, [50, -50])
    result.loss.sum().backward()
    assert_close(log_probs.grad, [0, 0])


def _slow_loss(name, log_probs, old, advantages, layout, dual_clip):
    """The surrogate by the papers' formulas, one token at a time."""
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(layout.num_tokens)]
    for episode in range(layout.num_episodes):
        tokens = sampled_tokens(layout, episode)
        for token in tokens:
            if name == "ppo":
                ratio = torch.exp(log_probs[token] - old[token])
            else:
                ratio = torch.exp(sum(log_probs[other] - old[other] for other in tokens) / len(tokens))
                if len({float(advantages[other]) for other in tokens}) > 1:  # GSPO-token, section 4.3
                    ratio = ratio.detach() * torch.exp(log_probs[token]) / torch.exp(log_probs[token]).detach()
            advantage = float(advantages[token])
            objective = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.3) * advantage)
            if dual_clip is not None and advantage < 0:
                objective = torch.max(objective, torch.tensor(dual_clip * advantage, dtype=torch.float64))
            losses[token] = -objective
    return torch.stack(losses) if losses else torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@few
@given(layout=layouts(), seed=seeds, dual_clip=st.sampled_from([None, 1.5]))
def test_surrogates_equal_a_loop_in_loss_and_gradient(name, layout, seed, dual_clip):
    old, advantages = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    fast = (old + numbers(seed + 2, layout.num_tokens, scale=0.5)).requires_grad_()
    slow = fast.detach().clone().requires_grad_()
    weights = numbers(seed + 3, layout.num_tokens)
    result = _loss(name, fast, old, advantages, layout, dual_clip=dual_clip)
    expected = _slow_loss(name, slow, old, advantages, layout, dual_clip)
    assert_close(result.loss, expected)
    (result.loss * weights).sum().backward()
    if expected.requires_grad:
        (expected * weights).sum().backward()
    assert_close(fast.grad, torch.zeros_like(fast) if slow.grad is None else slow.grad)


@few
@given(layout=layouts(), seed=seeds)
def test_gspos_ratio_to_the_engine_equals_a_loop_in_loss_and_gradient(layout, seed):
    """The loop has the engine's log-probs in the place of the old ones, as OpenRLHF's GSPO has with its correction."""
    old, advantages = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    engine = old + numbers(seed + 4, layout.num_tokens, scale=0.3)
    fast = (old + numbers(seed + 2, layout.num_tokens, scale=0.5)).requires_grad_()
    slow = fast.detach().clone().requires_grad_()
    weights = numbers(seed + 3, layout.num_tokens)
    with_engine = with_rubbish(engine, layout.mask)
    result = _loss("gspo", fast, old, advantages, layout, ratio_base_log_probs=with_engine)
    expected = _slow_loss("gspo", slow, engine, advantages, layout, None)
    assert_close(result.loss, expected)
    assert_close(result.log_ratio, torch.where(layout.mask, fast.detach() - old, 0.0))
    (result.loss * weights).sum().backward()
    if expected.requires_grad:
        (expected * weights).sum().backward()
    assert_close(fast.grad, torch.zeros_like(fast) if slow.grad is None else slow.grad)


@few
@given(layout=layouts(), seed=seeds)
def test_cispo_equals_a_loop_in_loss_and_gradient(layout, seed):
    """By numbers instead of autograd: the weight is a constant, so the gradient is loss / log π."""
    old, advantages = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    log_probs = (old + numbers(seed + 2, layout.num_tokens, scale=0.5)).requires_grad_()
    result = _loss("cispo", log_probs, old, advantages, layout)
    result.loss.sum().backward()
    losses, slopes = [0.0] * layout.num_tokens, [0.0] * layout.num_tokens
    for episode in range(layout.num_episodes):
        for token in sampled_tokens(layout, episode):
            weight = min(max(math.exp(float(log_probs[token]) - float(old[token])), 0.8), 1.3)
            slopes[token] = -weight * float(advantages[token])
            losses[token] = slopes[token] * float(log_probs[token])
    assert_close(result.loss, losses)
    assert_close(log_probs.grad, slopes)


def test_cispo_weighs_tokens_and_drops_none():
    # ratio 2, 0.5, 1.1: weights 1.3, 0.8, 1.1; with eps_low 1 the second is 0.5. The loss is -weight * A * log-prob.
    ratios = torch.tensor([2, 0.5, 1.1], dtype=torch.float64)
    log_probs = (ratios.log() - 1).requires_grad_()
    advantages, old, mask = torch.tensor([1.0, -2.0, 1.0]), torch.full((3,), -1.0), torch.ones(3, dtype=torch.bool)
    result = cispo_loss(log_probs, old, advantages, mask, **CLIP)
    assert_close(result.loss, torch.tensor([-1.3, 1.6, -1.1], dtype=torch.float64) * log_probs)
    assert_close(result.ratio, ratios)
    assert result.clipped.tolist() == [True, True, False]
    result.loss.sum().backward()
    assert_close(log_probs.grad, [-1.3, 1.6, -1.1])
    without_lower = cispo_loss(log_probs.detach(), old, advantages, mask, eps_low=1.0, eps_high=0.3)
    assert_close(without_lower.loss, torch.tensor([-1.3, 1.0, -1.1], dtype=torch.float64) * log_probs)
    assert without_lower.clipped.tolist() == [True, False, False]


def test_sapo_weighs_gradients_by_how_far_the_ratio_is():
    # A = 2, ratio 1: -4 * sigmoid(0) * 2 = -4; the gradient is 4 * 1/4 * ratio * -A = -2.
    # A = 1, ratio 2: -4 * sigmoid(1); the gradient -4 * sigmoid'(1) * 2.
    # A = -1, ratio 2, temperature 2: 2 * sigmoid(2); the gradient 2 * sigmoid'(2) * 2 * 2.
    ratios = torch.tensor([1, 2, 2], dtype=torch.float64)
    log_probs = (ratios.log() - 1).requires_grad_()
    advantages, old, mask = torch.tensor([2.0, 1.0, -1.0]), torch.full((3,), -1.0), torch.ones(3, dtype=torch.bool)
    result = sapo_loss(log_probs, old, advantages, mask, **GATE)
    one, two = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert_close(result.loss, [-4, -4 * one, 2 * two])
    assert not result.clipped.any()
    result.loss.sum().backward()
    assert_close(log_probs.grad, [-2, -8 * one * (1 - one), 8 * two * (1 - two)])


def test_gmpo_clips_each_token_and_then_takes_the_geometric_mean():
    # First episode, A = 1: log-ratios 0.1, 0.5, -3; the second is held at log 1.3, the third is free: only the
    # upper bound counts. Second episode, A = -2: 0.5 is free, -3 is held at log 0.8.
    layout = make_layout([[[0, 1, 1], [0, 1]], [[1, 1]]])
    log_probs = torch.tensor([NAN, 0.1, 0.5, NAN, -3, 0.5, -3], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([NAN, 1, 1, NAN, 1, -2, -2], dtype=torch.float64)
    result = gmpo_loss(log_probs, torch.zeros(7), advantages, layout, **CLIP)
    first, second = math.exp((0.1 + math.log(1.3) - 3) / 3), math.exp((0.5 + math.log(0.8)) / 2)
    assert_close(result.loss, [0, -first, -first, 0, -first, 2 * second, 2 * second])
    assert_close(result.ratio, [1, first, first, 1, first, second, second])
    assert_close(result.log_ratio, [0, 0.1, 0.5, 0, -3, 0.5, -3])
    assert result.clipped.tolist() == [False, False, True, False, False, False, True]
    # under sequence_mean the weight is 1 / n for each token: the gradient of -A * exp(mean), 0 where clipped
    result.loss.sum().backward()
    assert_close(log_probs.grad, [0, -first, 0, 0, -first, 2 * second, 0])


@few
@given(layout=layouts(), seed=seeds, has_engine=st.booleans())
def test_sapo_and_gmpo_equal_loops_in_loss_and_gradient(layout, seed, has_engine):
    """By numbers: each token learns from its own advantage, weighed by what the loop computes."""
    old, advantages = numbers(seed, layout.num_tokens), numbers(seed + 1, layout.num_tokens)
    engine = old + numbers(seed + 4, layout.num_tokens, scale=0.3) if has_engine else old
    log_probs = (old + numbers(seed + 2, layout.num_tokens, scale=0.5)).requires_grad_()
    options = {"ratio_base_log_probs": with_rubbish(engine, layout.mask)} if has_engine else {}
    gmpo = gmpo_loss(log_probs, old, advantages, layout, **CLIP, **options)
    [gmpo_slope] = torch.autograd.grad(gmpo.loss.sum(), [log_probs])
    sapo = _loss("sapo", log_probs, old, advantages, layout)
    [sapo_slope] = torch.autograd.grad(sapo.loss.sum(), [log_probs])
    expected = torch.zeros(4, layout.num_tokens, dtype=torch.float64)
    for episode in range(layout.num_episodes):
        tokens = sampled_tokens(layout, episode)
        gaps = {token: float(log_probs[token]) - float(engine[token]) for token in tokens}
        held = {
            token: min(gap, math.log(1.3)) if float(advantages[token]) > 0 else max(gap, math.log(0.8))
            for token, gap in gaps.items()
        }
        for token in tokens:
            of_token, ratio = float(advantages[token]), math.exp(float(log_probs[token]) - float(old[token]))
            expected[0, token] = -of_token * math.exp(sum(held.values()) / len(held))
            expected[1, token] = expected[0, token] if held[token] == gaps[token] else 0.0
            temperature = 1.0 if of_token > 0 else 2.0
            gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
            expected[2, token] = -of_token * gate * 4 / temperature
            expected[3, token] = -of_token * 4 * gate * (1 - gate) * ratio
    for ours, theirs in zip((gmpo.loss, gmpo_slope, sapo.loss, sapo_slope), expected, strict=True):
        assert_close(ours, theirs)


def test_a_gate_without_temperature_is_refused():
    nothing = torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool)
    with pytest.raises(UserError, match=r"temperatures are 1\.0 and 0\.0: set both above 0"):
        sapo_loss(*nothing, temperature_pos=1.0, temperature_neg=0.0)


@pytest.mark.parametrize("name", ALL)
@few
@given(layout=layouts(), seed=seeds)
def test_policy_loss_never_reads_unsampled_tokens(name, layout, seed):
    tokens = layout.num_tokens
    clean = numbers(seed, tokens, grad=True), numbers(seed + 1, tokens), numbers(seed + 2, tokens)
    dirty = tuple(with_rubbish(values, layout.mask) for values in clean)
    here, there = _loss(name, *clean, layout, dual_clip=2.0), _loss(name, *dirty, layout, dual_clip=2.0)
    for field in ("loss", "ratio", "log_ratio", "clipped", "dual_clipped"):
        assert torch.equal(getattr(here, field), getattr(there, field))
    here.loss.sum().backward()
    there.loss.sum().backward()
    assert torch.equal(clean[0].grad, dirty[0].grad)
    assert bool((here.loss[~layout.mask] == 0).all())


@pytest.mark.parametrize("name", ALL)
@few
@given(episodes=episode_lists(), seed=seeds)
def test_permuting_episodes_permutes_the_policy_loss(name, episodes, seed):
    layout = make_layout(episodes)
    other, tokens = permuted(episodes, some_order(seed, len(episodes)))
    log_probs, old, advantages = (numbers(seed + i, layout.num_tokens) for i in range(3))
    here = _loss(name, log_probs, old, advantages, layout).loss
    there = _loss(name, log_probs[tokens], old[tokens], advantages[tokens], other).loss
    assert_close(there, here[tokens])


def test_entropy_bonus_is_negative_and_masked():
    entropies = torch.tensor([2.0, NAN, 0.5], dtype=torch.float64, requires_grad=True)
    bonus = entropy_bonus(entropies, torch.tensor([True, False, True]), 0.1)
    assert_close(bonus, [-0.2, 0, -0.05])
    bonus.sum().backward()
    assert_close(entropies.grad, [-0.1, 0, -0.1])


@quick
@given(seeds, st.floats(0, 1))
def test_entropy_bonus_equals_a_loop(seed, coefficient):
    mask, entropies = numbers(seed, 8) > 0, numbers(seed + 1, 8).abs()
    expected = [-coefficient * float(h) if m else 0.0 for h, m in zip(entropies, mask, strict=True)]
    assert_close(entropy_bonus(with_rubbish(entropies, mask), mask, coefficient), expected)


@pytest.mark.parametrize("name", ALL)
def test_policy_loss_precision(name):
    layout = make_layout([[[0, 1]]])
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        inputs = [torch.zeros(2, dtype=dtype) for _ in range(3)]
        assert _loss(name, *inputs, layout).loss.dtype == expected


@pytest.mark.parametrize("name", ALL)
def test_no_gradient_flows_into_old_log_probs_or_advantages(name):
    layout = make_layout([[[0, 1, 1]]])
    log_probs, old, advantages = (numbers(i, 3, grad=True) for i in range(3))
    _loss(name, log_probs, old, advantages, layout).loss.sum().backward()
    assert old.grad is None
    assert advantages.grad is None


def test_clips_that_cannot_work_are_refused():
    inputs = [torch.zeros(1)] * 3
    for low, high in ((0.0, 0.2), (1.5, 0.2), (0.2, -0.1)):
        with pytest.raises(UserError, match=rf"eps_low {low}, eps_high {high}: .*set 0 < eps_low <= 1"):
            ppo_loss(*inputs, torch.ones(1, dtype=torch.bool), eps_low=low, eps_high=high)
        with pytest.raises(UserError, match=rf"eps_low {low}, eps_high {high}: .*set 0 < eps_low <= 1"):
            cispo_loss(*inputs, torch.ones(1, dtype=torch.bool), eps_low=low, eps_high=high)
    with pytest.raises(UserError, match=r"dual_clip is 1.0: .* set it above 1"):
        gspo_loss(*inputs, make_layout([[[1]]]), **CLIP, dual_clip=1.0)
