"""Our policy losses and advantages against TRL's own code, loss and gradient in float64."""

import importlib
import math

import pytest
import torch
from algorithm_cases import assert_close, assert_same_gradients, make_layout, numbers

from hotseat.algorithms.advantages import compute_advantages
from hotseat.algorithms.aggregation import loss_weights, mask_truncated, weighted_sum
from hotseat.algorithms.baselines import group_mean_centred, group_normalised, leave_one_out, parts_normalised
from hotseat.algorithms.corrections import correction_weights
from hotseat.algorithms.kl import estimate_kl
from hotseat.algorithms.policy_loss import cispo_loss, entropy_bonus, gmpo_loss, gspo_loss, ppo_loss, sapo_loss
from hotseat.algorithms.shaping import clip_rewards

pytestmark = pytest.mark.slow

# Several segments, inserted tokens, lengths from 1 to 5: TRL sees each episode as one row with a tool mask.
LAYOUT = make_layout([[[0, 1, 1], [0, 1]], [[0, 1, 0, 1]], [[0, 1]], [[0, 0, 1, 1, 1, 1, 1]]])
CLIP = {"eps_low": 0.2, "eps_high": 0.28}
MAX_LENGTH = 9
AGGREGATIONS = [("dapo", "token_mean"), ("bnpo", "token_mean"), ("grpo", "sequence_mean"), ("dr_grpo", "constant")]


@pytest.fixture(scope="module")
def trl():
    return importlib.import_module("trl_oracle")


def _inputs(seed, layout=LAYOUT):
    """log-probs (twice, each to be differentiated), old ones close to them, advantages."""
    ours = numbers(seed, layout.num_tokens, grad=True)
    theirs = ours.detach().clone().requires_grad_()
    old = ours.detach() + numbers(seed + 100, layout.num_tokens, scale=0.4)
    return ours, theirs, old, numbers(seed + 200, layout.num_tokens)


def _step_loss(token_losses, how, layout=LAYOUT):
    weights = loss_weights(layout, how, max_length=MAX_LENGTH, dtype=torch.float64)
    return weighted_sum(token_losses, weights)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss_type", "how"), AGGREGATIONS)
def test_ppo_clip_and_aggregation_equal_trl(trl, loss_type, how, seed):
    ours, theirs, old, advantages = _inputs(seed)
    our_loss = _step_loss(ppo_loss(ours, old, advantages, LAYOUT.mask, **CLIP).loss, how)
    their_loss = trl.grpo_loss(loss_type, LAYOUT, theirs, old, advantages, **CLIP, max_completion_length=MAX_LENGTH)
    assert_same_gradients(our_loss, their_loss, ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip_equals_trl_delta(trl, seed):
    ours, theirs, old, advantages = _inputs(seed)
    result = ppo_loss(ours, old, advantages, LAYOUT.mask, **CLIP, dual_clip=1.4)
    their_loss = trl.grpo_loss("dapo", LAYOUT, theirs, old, advantages, **CLIP, delta=1.4)
    assert_same_gradients(_step_loss(result.loss, "token_mean"), their_loss, ours, theirs)


def test_dual_clip_case_is_reached():
    hit = [ppo_loss(*_pick(seed), LAYOUT.mask, **CLIP, dual_clip=1.4).dual_clipped.any() for seed in range(3)]
    assert all(hit)


def _pick(seed):
    ours, _, old, advantages = _inputs(seed)
    return ours, old, advantages


@pytest.mark.parametrize("seed", range(3))
def test_gspo_equals_trl_sequence_level(trl, seed):
    """With one advantage per episode, as TRL computes them; with several, GSPO-token is another loss than TRL's."""
    ours, theirs, old, _ = _inputs(seed)
    advantages = numbers(seed + 200, LAYOUT.num_episodes)[LAYOUT.token_episode]
    our_loss = _step_loss(gspo_loss(ours, old, advantages, LAYOUT, **CLIP).loss, "sequence_mean")
    their_loss = trl.grpo_loss("grpo", LAYOUT, theirs, old, advantages, **CLIP, level="sequence")
    assert_same_gradients(our_loss, their_loss, ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_equals_trl(trl, seed):
    ours, theirs, old, advantages = _inputs(seed)
    result = cispo_loss(ours, old, advantages, LAYOUT.mask, eps_low=1.0, eps_high=0.28)
    assert result.clipped.any()
    their_loss = trl.grpo_loss("cispo", LAYOUT, theirs, old, advantages, eps_high=1.28)
    assert_same_gradients(_step_loss(result.loss, "token_mean"), their_loss, ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_sapo_equals_trl(trl, seed):
    ours, theirs, old, advantages = _inputs(seed)
    temperatures = {"temperature_pos": 1.3, "temperature_neg": 1.7}
    result = sapo_loss(ours, old, advantages, LAYOUT.mask, **temperatures)
    their_loss = trl.grpo_loss("sapo", LAYOUT, theirs, old, advantages, **temperatures)
    assert_same_gradients(_step_loss(result.loss, "sequence_mean"), their_loss, ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_gmpo_equals_trl_whose_clips_are_of_log_ratios(trl, seed):
    ours, theirs, old, _ = _inputs(seed)
    advantages = numbers(seed + 200, LAYOUT.num_episodes)
    clip = {"eps_low": 1 - math.exp(-0.2), "eps_high": math.exp(0.3) - 1}
    result = gmpo_loss(ours, old, advantages[LAYOUT.token_episode], LAYOUT, **clip)
    assert result.clipped.any()
    assert not result.clipped.all()
    their_loss = trl.gmpo_loss(LAYOUT, theirs, old, advantages, low=0.2, high=0.3)
    assert_same_gradients(_step_loss(result.loss, "sequence_mean"), their_loss, ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_gspos_ratio_to_the_engine_equals_trl_with_the_engines_log_probs(trl, seed):
    ours, theirs, old, _ = _inputs(seed)
    advantages = numbers(seed + 200, LAYOUT.num_episodes)[LAYOUT.token_episode]
    engine = old + numbers(seed + 300, LAYOUT.num_tokens, scale=0.2)
    result = gspo_loss(ours, old, advantages, LAYOUT, **CLIP, ratio_base_log_probs=engine)
    their_loss = trl.grpo_loss("grpo", LAYOUT, theirs, engine, advantages, **CLIP, level="sequence")
    assert_same_gradients(_step_loss(result.loss, "sequence_mean"), their_loss, ours, theirs)


@pytest.mark.parametrize(("loss_type", "how"), AGGREGATIONS)
def test_k3_as_a_loss_equals_trl(trl, loss_type, how):
    ours, theirs, old, advantages = _inputs(4)
    reference = ours.detach() + numbers(5, LAYOUT.num_tokens, scale=0.5)
    token_losses = ppo_loss(ours, old, advantages, LAYOUT.mask, **CLIP).loss
    token_losses = token_losses + 0.3 * estimate_kl(ours, reference, LAYOUT.mask, "k3")
    their_loss = trl.grpo_loss(
        loss_type,
        LAYOUT,
        theirs,
        old,
        advantages,
        **CLIP,
        reference_log_probs=reference,
        beta=0.3,
        max_completion_length=MAX_LENGTH,
    )
    assert_same_gradients(_step_loss(token_losses, how), their_loss, ours, theirs)


def test_entropy_bonus_equals_trl_under_token_mean(trl):
    ours, theirs, old, advantages = _inputs(6)
    token_losses = ppo_loss(ours, old, advantages, LAYOUT.mask, **CLIP).loss
    token_losses = token_losses + entropy_bonus(ours.exp(), LAYOUT.mask, 0.05)
    their_loss = trl.grpo_loss(
        "dapo", LAYOUT, theirs, old, advantages, **CLIP, entropies=theirs.exp(), entropy_coef=0.05
    )
    assert_same_gradients(_step_loss(token_losses, "token_mean"), their_loss, ours, theirs)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("tis", "token_truncate"),
        ("icepop", "token_mask"),
        ("seq-tis", "sequence_truncate"),
        ("seq-icepop", "sequence_mask"),
    ],
)
def test_corrections_and_their_place_in_the_loss_equal_trl(trl, kind, mode):
    layout = make_layout([[[1] * 5]] * 4)
    ours, theirs, old, advantages = _inputs(7, layout)
    rollout = (old + numbers(8, 20, scale=0.7)).to(torch.float32).to(torch.float64)  # TRL keeps these in float32
    reference = old + 0.1
    weights = correction_weights(old, rollout, layout, kind, low=0.6, high=1.5).weights
    their_weights = trl.generated_batch(
        trl.GRPOTrainer,
        torch.arange(4.0),
        2,
        old_log_probs=old.reshape(4, 5),
        sampling_log_probs=rollout.reshape(4, 5),
        correction=mode,
        low=0.6,
        high=1.5,
    )["importance_sampling_ratio"]
    their_weights = their_weights.expand(4, 5)  # a sequence's weight is one number
    assert_close(weights.reshape(4, 5), their_weights)

    token_losses = weights * ppo_loss(ours, old, advantages, layout.mask, **CLIP).loss
    token_losses = token_losses + 0.2 * estimate_kl(ours, reference, layout.mask, "k3")
    their_loss = trl.grpo_loss(
        "grpo",
        layout,
        theirs,
        old,
        advantages,
        **CLIP,
        correction=their_weights.flatten(),
        reference_log_probs=reference,
        beta=0.2,
    )
    assert_same_gradients(_step_loss(token_losses, "sequence_mean", layout), their_loss, ours, theirs)


def test_an_empty_episode_counts_in_trl_and_not_here(trl):
    # Three episodes, one without a sampled token: TRL's mean over episodes divides by 3, ours by 2.
    layout = make_layout([[[0, 1, 1]], [[0, 1]], [[0, 0]]])
    log_probs, advantages = numbers(9, 7), numbers(10, 7)
    ours = _step_loss(ppo_loss(log_probs, log_probs, advantages, layout.mask, **CLIP).loss, "sequence_mean", layout)
    theirs = trl.grpo_loss("grpo", layout, log_probs, log_probs, advantages, **CLIP)
    assert_close(ours * 2, theirs * 3)


def test_masking_truncated_answers_equals_trl(trl):
    truncated, rewards = [False, True, True, False], numbers(15, 4)
    layout = make_layout([[[1] * 3]] * 4)
    theirs = trl.generated_batch(
        trl.GRPOTrainer, rewards, 2, old_log_probs=numbers(16, 4, 3), scale_rewards="none", truncated=truncated
    )
    assert mask_truncated(layout, torch.tensor(truncated)).reshape(4, 3).tolist() == theirs["completion_mask"].tolist()
    # Masked answers still count in baselines.
    assert_close(group_mean_centred(rewards, torch.tensor([0, 0, 1, 1])), theirs["advantages"])


@pytest.mark.parametrize("seed", range(3))
def test_group_baselines_equal_trl(trl, seed):
    # Groups of 3: TRL has n / (n - 1) in float32, which is exact for 3/2 but not for 4/3.
    rewards, groups = numbers(seed, 12, scale=2), torch.arange(12) // 3
    grpo = trl.generated_batch(trl.GRPOTrainer, rewards, 3)["advantages"]
    dr_grpo = trl.generated_batch(trl.GRPOTrainer, rewards, 3, scale_rewards="none")["advantages"]
    rloo = trl.generated_batch(trl.RLOOTrainer, rewards, 3)["advantages"]
    assert_close(group_normalised(rewards, groups, eps=1e-4), grpo)
    assert_close(group_mean_centred(rewards, groups), dr_grpo)
    assert_close(leave_one_out(rewards, groups), rloo)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_gaps", [False, True])
def test_gdpo_equals_trl_normalise_then_sum(trl, has_gaps, seed):
    # As below, and 9 episodes: 9/8 is exact in float32.
    layout, groups = make_layout([[[1, 1]]] * 9), torch.arange(9) // 3
    rewards, weights = numbers(seed, 9, 3) * torch.tensor([1.0, 20.0, 0.1]), torch.tensor([1.0, -0.5, 3.0])
    if has_gaps:
        rewards[1, 0] = rewards[4, 2] = rewards[4, 0] = torch.nan
    sums = "normalize_then_sum"
    theirs = trl.generated_batch(trl.GRPOTrainer, rewards, 3, aggregation=sums, reward_weights=weights)["advantages"]
    parts = dict(zip("abc", rewards.T, strict=True))
    of_parts = dict(zip("abc", weights.tolist(), strict=True))
    options = {"groups": groups, "parts": parts, "part_weights": of_parts, "eps": 1e-4}
    ours = compute_advantages("gdpo", layout, torch.zeros(9), **options).advantages.reshape(9, 2)[:, 0]
    apart = compute_advantages("gdpo", layout, torch.zeros(9), **options, over_batch=False).advantages[::2].double()
    # TRL divides by the sample deviation + 1e-4, here it is that of the population.
    scale = (apart.std() + 1e-4) / apart.std(correction=0)
    assert_close(ours.double(), theirs * scale, 1e-6)
    exact = parts_normalised(torch.zeros(9, dtype=torch.float64), groups, parts=parts, part_weights=of_parts, eps=1e-4)
    assert_close((exact - exact.mean()) / (exact.std() + 1e-4), theirs)


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo"])
def test_estimators_spread_trl_advantages_over_the_sampled_tokens(trl, estimator):
    rewards, groups = numbers(11, 4), torch.tensor([0, 0, 1, 1])
    trainer = trl.RLOOTrainer if estimator == "rloo" else trl.GRPOTrainer
    scale = "none" if estimator == "dr_grpo" else "group"
    theirs = trl.generated_batch(trainer, rewards, 2, scale_rewards=scale)["advantages"]
    ours = compute_advantages(estimator, LAYOUT, rewards, groups=groups, eps=1e-4).advantages
    assert_close(ours, torch.where(LAYOUT.mask, theirs[LAYOUT.token_episode], 0.0))


def test_k1_and_reward_clipping_equal_trl_rloo_which_applies_both_before_the_baseline(trl):
    rewards, groups = numbers(12, 6, scale=3), torch.arange(6) // 3
    old, reference = numbers(13, 6, 5), numbers(14, 6, 5)
    theirs = trl.generated_batch(
        trl.RLOOTrainer,
        rewards,
        3,
        old_log_probs=old,
        reference_log_probs=reference,
        beta=0.1,
        reward_clip=(-1.0, 2.0),
    )["advantages"]
    kl = estimate_kl(old.flatten(), reference.flatten(), torch.ones(30, dtype=torch.bool), "k1").reshape(6, 5).sum(1)
    assert_close(leave_one_out(clip_rewards(rewards, -1.0, 2.0) - 0.1 * kl, groups), theirs)
