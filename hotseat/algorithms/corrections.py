"""Importance weights that correct for the gap between the policy that sampled and the one that the trainer computes.

The engine reports log π_rollout of each token it sampled; the trainer, with other kernels or newer weights, computes
log π_old. The surrogate's expectation is over π_rollout, so each token's loss is weighted by ρ = π_old / π_rollout,
bounded in one of three ways, with bounds [low, high]:

    tis            clamp(ρ, low, high)                               Yao et al., 2025, with low = 0
    icepop         ρ where low ≤ ρ ≤ high, else 0                    Ling team, "IcePop", 2025
    seq-mask-tis   clamp(ρ, low, high) where the episode's geometric mean of ρ is in [low, high], else 0 for all of it

Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", truncate from above alone: the
lower bound of tis is OpenRLHF's, whose seq-mask-tis leaves ρ of the kept tokens unbounded, against its own comment,
and so overflows; here it is clamped.

The weights are constants: no gradient flows through them. They multiply the surrogate only, not the KL or entropy
terms. They may be computed per micro-batch, if each has all segments of its episodes, which an episode's mean needs. A
NaN log-prob of a sampled token stays NaN, for the update's check of finite losses to find; it never becomes 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hotseat.algorithms._tokens import mean_per_episode, sampled_only
from hotseat.errors import UserError
from hotseat.types import TokenLayout

Correction = Literal["tis", "icepop", "seq-mask-tis"]

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class CorrectionWeights:
    """Correction of each token, detached. Where the policy did not sample: weight 0, ratio 1, not changed."""

    weights: Tensor  # [num_tokens]: factor of each token's surrogate
    ratio: Tensor  # [num_tokens]: ρ itself, within e^±20
    changed: Tensor  # [num_tokens] bool: the weight is not ρ (clamped or dropped)


@torch.no_grad()
def correction_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    layout: TokenLayout,
    kind: Correction,
    *,
    low: float,
    high: float,
) -> CorrectionWeights:
    """Compute the weight of each sampled token under one of the three corrections. [num_tokens] in and out."""
    if not 0 <= low < high:
        raise UserError(
            f"the truncation thresholds are [{low}, {high}]: they bound a ratio of probabilities, so they must be"
            " 0 <= low < high"
        )
    mask = layout.mask
    log_ratio = sampled_only(old_log_probs, mask) - sampled_only(rollout_log_probs, mask)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if kind == "tis":
        weights = ratio.clamp(low, high)
    elif kind == "icepop":
        weights = torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    elif kind == "seq-mask-tis":
        episode_ratio = mean_per_episode(log_ratio, layout).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        outside = (episode_ratio < low) | (episode_ratio > high)
        weights = torch.where(outside[layout.token_episode], 0.0, ratio.clamp(low, high))
    else:
        raise UserError(f"correction {kind!r} is not known: use one of {', '.join(get_args(Correction))}")
    return CorrectionWeights(torch.where(mask, weights, 0.0), ratio, mask & (weights != ratio))
