"""Importance weights that correct for the gap between the policy that sampled and the one that the trainer computes.

The engine reports log π_rollout of each token it sampled; the trainer, with other kernels or newer weights, computes
log π_old. The surrogate's expectation is over π_rollout, so each token's loss is weighted by ρ = π_old / π_rollout,
bounded in one of these ways, with bounds [low, high]:

    tis            clamp(ρ, low, high)                               Yao et al., 2025, with low = 0
    icepop         ρ where low ≤ ρ ≤ high, else 0                    Ling team, "IcePop", 2025
    seq-mask-tis   clamp(ρ, low, high) where the episode's geometric mean of ρ is in [low, high], else 0 for all of it
    seq-tis        clamp(Π ρ over the episode, low, high)            verl, TRL: one weight for a whole answer
    seq-icepop     Π ρ over the episode where it is in [low, high], else 0 for all of it      TRL

Where several tokens share a ratio of the policy (`ppo_loss` with steps), ρ is the product over those tokens: they have
one importance weight, as they have one ratio. The bounds then hold the product.

Beside them, or alone, `rejection_weights` drops whole episodes whose mean divergence between engine and trainer is too
large, and `weight_totals` normalises weights to mean 1 over a step.

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

from hotseat.algorithms.time_steps import sum_on_tokens
from hotseat.algorithms.token_masks import mean_per_episode, sampled_only, sum_per_episode
from hotseat.errors import UserError
from hotseat.extensions import load
from hotseat.registry.correction_kinds import CORRECTIONS, correction_entry
from hotseat.registry.lookup import names_that
from hotseat.types import TokenLayout

Rejection = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class CorrectionWeights:
    """Correction of each token, detached. Where the policy did not sample: weight 0, ratio 1, not changed."""

    weights: Tensor  # [num_tokens]: factor of each token's surrogate
    ratio: Tensor  # [num_tokens]: ρ of the token or step, or of the episode (seq-tis, seq-icepop), within e^±20
    changed: Tensor  # [num_tokens] bool: the weight is not ρ (clamped or dropped)


@torch.no_grad()
def correction_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    layout: TokenLayout,
    kind: str,
    *,
    low: float,
    high: float,
    starts: Tensor | None = None,
) -> CorrectionWeights:
    """Compute the weight of each sampled token under one of the corrections. [num_tokens] in and out.

    starts: first tokens of the steps that share a ratio, as in `ppo_loss`.
    """
    if not 0 <= low < high:
        raise UserError(
            f"the truncation thresholds are [{low}, {high}]: they bound a ratio of probabilities, so they must be"
            " 0 <= low < high"
        )
    entry, mask = correction_entry(kind), layout.mask
    if entry.function is None:
        raise UserError(
            f"correction {kind} has no weights: use one of {', '.join(names_that(CORRECTIONS, 'function'))}"
        )
    log_ratio = sampled_only(old_log_probs, mask) - sampled_only(rollout_log_probs, mask)
    if entry.is_per_episode:
        ratio = torch.where(mask, _exp(sum_per_episode(log_ratio, layout))[layout.token_episode], 1.0)
    else:
        ratio = _exp(log_ratio if starts is None else sum_on_tokens(log_ratio, starts, mask))
    options = {"low": low, "high": high}
    if entry.takes_episode_mean:
        options["episode_mean"] = _exp(mean_per_episode(log_ratio, layout))[layout.token_episode]
    weights = load(entry.function)(ratio, **options)
    return CorrectionWeights(torch.where(mask, weights, 0.0), ratio, mask & (weights != ratio))


def clamped(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Return the ratios within their bounds. [num_tokens] in and out, as of the other bounds."""
    return ratio.clamp(low, high)


def dropped(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Return the ratios, 0 instead of those out of bounds."""
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def clamped_in_kept_episodes(ratio: Tensor, *, low: float, high: float, episode_mean: Tensor) -> Tensor:
    """Return the ratios within their bounds, 0 in episodes whose geometric mean is out of bounds."""
    return torch.where((episode_mean < low) | (episode_mean > high), 0.0, ratio.clamp(low, high))


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


@torch.no_grad()
def rejection_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    layout: TokenLayout,
    kind: Rejection,
    *,
    high: float,
    low: float | None = None,
) -> Tensor:
    """Return 1 for tokens of episodes to learn from and 0 for those of rejected ones. [num_tokens] in and out.

    With d = log π_old − log π_rollout, an episode is kept if, over its sampled tokens,

        k1    low ≤ exp(mean d) ≤ high        the geometric mean of ρ; low is 1 / high if it is not given
        k2    mean d²/2 ≤ high
        k3    mean (e^d − 1 − d) ≤ high

    Liu et al., "When Speed Kills Stability", 2025; verl's seq_mean_k1, seq_mean_k2, seq_mean_k3. d is clamped to ±20.
    """
    if kind not in get_args(Rejection):
        raise UserError(f"rejection by {kind!r} is not known: use one of {', '.join(get_args(Rejection))}")
    if low is not None and kind != "k1":
        raise UserError(f"a lower bound of {low} has no effect on rejection by {kind}, which is never below 0: omit it")
    low = 1 / high if low is None and high > 0 else low
    if not high > 0 or (kind == "k1" and not (low is not None and 0 <= low < high)):
        raise UserError(
            f"rejection by {kind} has the bounds [{low}, {high}]: it must be 0 <= low < high, with high above 1 if only"
            " high is given"
        )
    log_ratio = sampled_only(old_log_probs, layout.mask) - sampled_only(rollout_log_probs, layout.mask)
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if kind == "k1":
        statistic = mean_per_episode(log_ratio, layout).exp()
        outside = (statistic < low) | (statistic > high)
    else:
        divergence = log_ratio.square() / 2 if kind == "k2" else log_ratio.exp() - 1 - log_ratio
        statistic = mean_per_episode(divergence, layout)
        outside = statistic > high
    kept = torch.where(statistic.isnan(), statistic, torch.where(outside, 0.0, 1.0).to(statistic))
    return torch.where(layout.mask, kept[layout.token_episode], 0.0)


@dataclass(frozen=True)
class WeightTotals:
    """Sum and number of a step's correction weights, which ranks add up. `scale` brings their mean to 1."""

    total: float
    count: int

    def __add__(self, other: WeightTotals) -> WeightTotals:
        return WeightTotals(self.total + other.total, self.count + other.count)

    @property
    def scale(self) -> float:
        """1 / mean of the weights; 1 if all of them are 0."""
        return self.count / self.total if self.total > 0 else 1.0


@torch.no_grad()
def weight_totals(weights: Tensor, layout: TokenLayout, kind: str) -> WeightTotals:
    """Add up correction weights of one rank's part of a step: of tokens, or of episodes if each has only one weight.

    Self-normalised importance sampling: w / mean(w), after the bounds, as in verl.
    """
    values = weights.to(torch.float64)
    if correction_entry(kind).is_per_episode:
        of_episodes = mean_per_episode(values, layout)
        return WeightTotals(float(of_episodes.sum()), int((layout.sampled_per_episode > 0).sum()))
    return WeightTotals(float(values.sum()), int(layout.mask.sum()))
