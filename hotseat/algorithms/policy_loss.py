"""The actor's loss, one value per token; `aggregation` makes the step's loss of it.

With ρ = exp(log π − log π_old) and the advantage A (Schulman et al., "Proximal Policy Optimization", 2017):

    loss = −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A)

ε_low ≠ ε_high is DAPO's clip-higher. Dual clip (Ye et al., "Mastering Complex Control in MOBA Games", 2020) bounds the
loss where A < 0: loss = min(loss, −c·A), c > 1. GSPO (Zheng et al., 2025) uses one ratio per episode, the geometric
mean of its tokens' ratios; where the tokens of an episode have different advantages it is GSPO-token. The log-ratio is
clamped to ±20 before it is exponentiated, as in OpenRLHF.

CISPO (MiniMax, "MiniMax-M1", 2025, equations 4 and 5) bounds the importance weight instead of the update: with sg for
a constant without gradient,

    loss = −sg(clip(ρ, 1 − ε_low, 1 + ε_high))·A·log π

so a token outside the range is weighed less but never dropped.

SAPO (Gao et al., "Soft Adaptive Policy Optimization", 2025) has a gate in the place of the clip. With the logistic
function σ and a temperature τ, which is another one where A ≤ 0,

    loss = −(4/τ)·σ(τ·(ρ − 1))·A

whose gradient at ρ = 1 is that of −ρ·A, and fades as ρ leaves 1, on either side.

GMPO (Zhao et al., "Geometric-Mean Policy Optimization", 2025) takes the geometric mean of an episode's ratios, like
GSPO, but clips the ratio of each token before, so that one wild token moves the mean only so far.

The whole loss of a token is  correction · surrogate + β·KL − c_H·entropy  with `correction_weights`, `estimate_kl` and
`entropy_bonus`; all three terms are weighed alike by `loss_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotseat.algorithms.time_steps import sum_on_tokens
from hotseat.algorithms.token_masks import mean_per_episode, sampled_only
from hotseat.errors import UserError
from hotseat.types import TokenLayout

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token and its terms. Where the policy did not sample: loss 0, ratio 1, log-ratio 0, no clip."""

    loss: Tensor  # [num_tokens], with gradient
    ratio: Tensor  # [num_tokens] detached
    log_ratio: Tensor  # [num_tokens] detached, of the token itself, not clamped: −log_ratio estimates KL(old || new)
    clipped: Tensor  # [num_tokens] bool: the clip, lower or upper, holds this token back; cispo's bounds its weight
    dual_clipped: Tensor  # [num_tokens] bool: the dual clip does


def call_policy_loss(
    function: Callable[..., Any],
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    layout: TokenLayout,
    *,
    takes_mask: bool = False,
    **options: Any,
) -> PolicyLoss:
    """Call a loss, built-in or a user's, and complete a plain tensor of losses by the ratios. [num_tokens] in and out.

    takes_mask: the function takes the layout's mask instead of the layout.
    """
    result = function(log_probs, old_log_probs, advantages, layout.mask if takes_mask else layout, **options)
    if isinstance(result, PolicyLoss):
        return result
    log_ratio = torch.where(layout.mask, log_probs - old_log_probs, 0.0).detach()
    nothing = torch.zeros_like(layout.mask)
    return PolicyLoss(result, log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp(), log_ratio, nothing, nothing)


def ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    starts: Tensor | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate with one ratio per token. [num_tokens] in and out.

    starts: first tokens of longer steps, as `step_starts` returns them, each with one advantage. The ratio is then that
    of a step, the product over its tokens. Each of them has the step's loss, so under `token_mean` a step weighs as
    many times as it has tokens; where steps are of one length, the mean over tokens is the mean over steps.
    """
    log_ratio = sampled_only(log_probs, mask) - sampled_only(old_log_probs, mask).detach()
    of_step = log_ratio if starts is None else sum_on_tokens(log_ratio, starts, mask)
    return _surrogate(of_step, log_ratio, advantages, mask, eps_low, eps_high, dual_clip)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    layout: TokenLayout,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    ratio_base_log_probs: Tensor | None = None,
) -> PolicyLoss:
    """Compute the clipped surrogate with one ratio per episode: exp(mean over its sampled tokens of log π − log π_old).

    With `ratio_base_log_probs`, the engine's log-probs, the ratio is π/π_rollout instead (`rollout-ratio`). It corrects
    both for the gap between engine and trainer and for the update, in one number per sequence that the clip bounds.
    Zheng et al. divide by the policy that sampled, and propose the engine's likelihoods for it, because likelihoods of
    whole sequences tolerate the gap; additional weights per token would bring back the noise that they argue against.

    Where the tokens of an episode have different advantages (rewards of turns, a KL in the reward, gae, discounting, a
    teacher), it is GSPO-token, section 4.3 of the paper, as in verl. With s the ratio of the episode and sg for a
    constant without gradient, the ratio of token t is

        s_t = sg(s) · π_t / sg(π_t)

    which has the value of s, but each token learns from its own advantage; the gradient of s itself would give every
    token the mean of all. Where an episode has one advantage the two are the same under every aggregation.

    The ratio runs over all segments of an episode, so they must be in the same micro-batch. GSPO's own aggregation is
    `sequence_mean`, and its clips are much narrower than PPO's (the paper has 3e-4 and 4e-4): the ratio is a mean.
    """
    mask = layout.mask
    log_ratio = sampled_only(log_probs, mask) - sampled_only(old_log_probs, mask).detach()
    based = log_ratio
    if ratio_base_log_probs is not None:
        based = sampled_only(log_probs, mask) - sampled_only(ratio_base_log_probs, mask).detach()
    episode_log_ratio = sampled_only(mean_per_episode(based, layout)[layout.token_episode], mask)
    of_token = episode_log_ratio.detach() + log_ratio - log_ratio.detach()
    ratio = torch.where(_has_one_advantage(advantages, layout)[layout.token_episode], episode_log_ratio, of_token)
    return _surrogate(ratio, log_ratio, advantages, mask, eps_low, eps_high, dual_clip)


def _has_one_advantage(advantages: Tensor, layout: TokenLayout) -> Tensor:
    """[num_episodes] bool: all sampled tokens of the episode have the same advantage."""
    sampled = layout.mask.nonzero().squeeze(1)
    values, episode = advantages.detach()[sampled], layout.token_episode[sampled]
    zeros = values.new_zeros(layout.num_episodes)
    least, most = (zeros.scatter_reduce(0, episode, values, how, include_self=False) for how in ("amin", "amax"))
    return least == most


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
) -> PolicyLoss:
    """Compute CISPO: REINFORCE on each token, weighted by its clipped ratio. [num_tokens] in and out.

    The paper has no lower bound, which is eps_low 1, and tunes eps_high alone. Its aggregation is `token_mean`.
    """
    _check_clips(eps_low, eps_high)
    log_probs = sampled_only(log_probs, mask)
    log_ratio = (log_probs - sampled_only(old_log_probs, mask)).detach()
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1 - eps_low, 1 + eps_high)
    return PolicyLoss(
        loss=-weight * sampled_only(advantages, mask).detach() * log_probs,
        ratio=ratio,
        log_ratio=log_ratio,
        clipped=weight != ratio,
        dual_clipped=torch.zeros_like(mask),
    )


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> PolicyLoss:
    """Compute −(4/τ)·σ(τ·(ρ − 1))·A, τ = temperature_pos where A > 0, else temperature_neg. [num_tokens] in and out.

    No token counts as clipped: the gate weighs a gradient by 4·σ·(1 − σ), which is 1 at ρ = 1 and 0 nowhere.
    """
    if not (temperature_pos > 0 and temperature_neg > 0):
        raise UserError(
            f"the gate's temperatures are {temperature_pos} and {temperature_neg}: set both above 0 (1 and 1.05 are"
            " usual)"
        )
    log_ratio = sampled_only(log_probs, mask) - sampled_only(old_log_probs, mask).detach()
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    advantages = sampled_only(advantages, mask).detach()
    temperature = torch.where(advantages > 0, temperature_pos, temperature_neg).to(ratio.dtype)
    nothing = torch.zeros_like(mask)
    return PolicyLoss(
        loss=-torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * advantages,
        ratio=ratio.detach(),
        log_ratio=log_ratio.detach(),
        clipped=nothing,
        dual_clipped=nothing,
    )


def gmpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    layout: TokenLayout,
    *,
    eps_low: float,
    eps_high: float,
    ratio_base_log_probs: Tensor | None = None,
) -> PolicyLoss:
    """Compute −A·exp(mean over the episode's sampled tokens of the clipped log π − log π_old).

    Each log-ratio is bounded on the side to which its advantage pulls it: above by log(1 + ε_high) where A > 0, below
    by log(1 − ε_low) otherwise. The range is that of ratios, as for every loss here; the paper's, e^−0.4 to e^0.4, is
    eps_low 0.33 and eps_high 0.49, and its aggregation is `sequence_mean`.

    The gradient of token t is that of sg(s)·π_t/sg(π_t) with the mean s, and 0 where t is clipped, so that tokens of
    one episode may have different advantages, as in `gspo_loss`, which says what `ratio_base_log_probs` are for.
    """
    _check_clips(eps_low, eps_high)
    mask = layout.mask
    advantages = sampled_only(advantages, mask).detach()
    log_ratio = sampled_only(log_probs, mask) - sampled_only(old_log_probs, mask).detach()
    based = log_ratio
    if ratio_base_log_probs is not None:
        based = sampled_only(log_probs, mask) - sampled_only(ratio_base_log_probs, mask).detach()
    bounded = based.clamp(math.log1p(-eps_low) if eps_low < 1 else -math.inf, math.log1p(eps_high))
    held = torch.where(advantages > 0, torch.minimum(based, bounded), torch.maximum(based, bounded))
    mean = sampled_only(mean_per_episode(held.detach(), layout)[layout.token_episode], mask)
    ratio = (mean + held - held.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    return PolicyLoss(
        loss=-ratio * advantages,
        ratio=ratio.detach(),
        log_ratio=log_ratio.detach(),
        clipped=(held != based).detach(),
        dual_clipped=torch.zeros_like(mask),
    )


def entropy_bonus(entropies: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """−coefficient · H per token, to be added to the loss. [num_tokens] in and out."""
    return -coefficient * sampled_only(entropies, mask)


def _check_clips(eps_low: float, eps_high: float) -> None:
    if not (0 < eps_low <= 1 and eps_high > 0):
        raise UserError(
            f"the clip range is eps_low {eps_low}, eps_high {eps_high}: the ratio is kept in"
            " [1 - eps_low, 1 + eps_high], so set 0 < eps_low <= 1 and eps_high > 0"
        )


def _surrogate(
    log_ratio: Tensor,
    token_log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    _check_clips(eps_low, eps_high)
    if dual_clip is not None and not dual_clip > 1:
        raise UserError(f"dual_clip is {dual_clip}: it bounds ratios from above, set it above 1 (3 is usual)")
    advantages = sampled_only(advantages, mask).detach()
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    free = ratio * advantages
    held = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    gain = torch.minimum(free, held)
    dual_clipped = torch.zeros_like(mask)
    if dual_clip is not None:
        floor = dual_clip * advantages
        dual_clipped = (advantages < 0) & (floor > gain)
        gain = torch.where(dual_clipped, floor, gain)
    return PolicyLoss(
        loss=-gain,
        ratio=ratio.detach(),
        log_ratio=token_log_ratio.detach(),
        clipped=(held < free).detach(),
        dual_clipped=dual_clipped.detach(),
    )
