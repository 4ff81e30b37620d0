"""Changes of an episode's reward between the scorer and the baseline: normalisation, penalties, clipping.

The caller keeps OpenRLHF's order: `normalise_rewards` (scores of a reward model only), then `overlong_penalty`, then
`penalise_truncation`, then the baseline, and finally `clip_rewards`, on the rewards less their baselines;
`compute_advantages` does the last two. All functions are per episode: [num_episodes] in and out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hotseat.algorithms.token_masks import floating
from hotseat.errors import UserError


def normalise_rewards(rewards: Tensor, mean: float, std: float) -> Tensor:
    """Compute (r − mean) / std, with the mean and std that were stored with the reward model."""
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise UserError(
            f"the reward model's stored mean and std are {mean} and {std}: normalising needs finite numbers and a std"
            " above 0; evaluate the reward model again or switch normalize_reward off"
        )
    return (floating(rewards) - mean) / std


def clip_rewards(rewards: Tensor, low: float, high: float) -> Tensor:
    """Compute min(max(r, low), high)."""
    if not low < high:
        raise UserError(f"reward_clip_range is [{low}, {high}]: the first number must be below the second")
    return floating(rewards).clamp(low, high)


def overlong_penalty(num_sampled: Tensor, max_sampled: int, buffer_length: int, factor: float) -> Tensor:
    """Compute the penalty to add to rewards: 0 up to max − buffer tokens, then linearly down to −factor at max.

        −factor · clip(num_sampled − (max_sampled − buffer), 0, buffer) / buffer

    Yu et al., "DAPO", 2025, equation 13. `num_sampled` is `TokenLayout.sampled_per_episode`: tokens that the
    environment inserted are not the policy's fault (OpenRLHF counts them).
    """
    if not 0 < buffer_length <= max_sampled:
        raise UserError(
            f"overlong_buffer_len is {buffer_length} with at most {max_sampled} new tokens: it must be between 1 and"
            f" {max_sampled}"
        )
    excess = (floating(num_sampled) - (max_sampled - buffer_length)).clamp(0, buffer_length)
    return -factor * excess / buffer_length


def penalise_truncation(rewards: Tensor, truncated: Tensor, coefficient: float) -> Tensor:
    """Scale or replace the rewards of episodes that ran into their length limit.

    A coefficient in [0, 1] multiplies the reward, a negative one replaces it (ProRL's penalty as in OpenRLHF,
    `stop_properly_penalty_coef`). Mind that scaling a negative reward by less than 1 rewards the truncation.
    """
    if not coefficient <= 1:
        raise UserError(
            f"stop_properly_penalty_coef is {coefficient}: give a factor between 0 and 1, or a negative number that"
            " replaces the reward"
        )
    rewards = floating(rewards)
    penalised = rewards * coefficient if coefficient >= 0 else torch.full_like(rewards, coefficient)
    return torch.where(truncated.to(torch.bool), penalised, rewards)
