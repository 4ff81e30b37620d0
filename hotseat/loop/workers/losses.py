"""Losses for a backend: algorithms combined for one micro-batch, weighted for the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hotseat.algorithms import corrections
from hotseat.algorithms.aggregation import weighted_sum
from hotseat.algorithms.distillation import Divergence
from hotseat.algorithms.kl import KlEstimator, estimate_kl
from hotseat.algorithms.policy_loss import PolicyLoss, call_policy_loss, entropy_bonus
from hotseat.algorithms.quantiles import count_sizes
from hotseat.algorithms.value_loss import value_loss
from hotseat.extensions import load
from hotseat.registry.policy_losses import policy_loss_entry
from hotseat.train.backend import Outputs
from hotseat.types import MicroBatch
from hotseat.user_functions import is_user_function, user_function

# Fields of a micro-batch of experience, [num_tokens] each.
ADVANTAGES = "advantages"
OLD_LOG_PROBS = "old_log_probs"  # absent where the ratio is exactly one, and the current log-probs stand for them
ROLLOUT_LOG_PROBS = "rollout_log_probs"  # the engine's
REFERENCE_LOG_PROBS = "reference_log_probs"  # absent without a reference
CORRECTION_SCALES = "correction_scales"  # present where corrections are normalised: 1 / their mean over the step
OLD_VALUES = "old_values"  # the critic's, before it learns from the rollout
RETURNS = "returns"  # what the critic learns
RATIO_STARTS = "ratio_starts"  # 1 at the first of the tokens that share a ratio; absent where each has its own
GIVEN = "given"  # 1 at tokens that the data gave; absent where the policy sampled all of them
LAGS = "lags"  # versions by which the oldest weights in a token's context are behind; absent without staleness


@dataclass(frozen=True)
class PolicyTerms:
    """Loss of a micro-batch, its metrics, and what was done to each token."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float]
    clipped: Tensor  # [num_tokens] bool: the ratio left the clip range; the token has no gradient, or less (cispo)
    corrected: Tensor  # [num_tokens] bool: its weight was changed because engine and trainer disagree


@dataclass(frozen=True)
class PolicyObjective:
    """surrogate · correction + kl_coefficient · KL − entropy_coefficient · H + divergence_coefficient · D, per token.

    ratio_to: denominator of an episode's ratio, probabilities before the update (`old`) or the engine's (`rollout`).
    max_lag: the largest lag of a token; above 0, gaps between engine and trainer are also measured for each lag.
    """

    policy_loss: str  # a policy loss of the table, or FILE.py:FUNCTION of a user
    clip_low: float
    clip_high: float
    dual_clip: float | None
    correction: str | None
    correction_low: float
    correction_high: float
    kl_estimator: KlEstimator
    kl_coefficient: float  # 0: the KL is not in the loss
    entropy_coefficient: float | None  # None: the entropy is not computed
    ratio_to: Literal["old", "rollout"] = "old"
    rejection: corrections.Rejection | None = None  # drops answers; the bounds are those of `rejection_weights`
    rejection_low: float | None = None
    rejection_high: float | None = None
    max_lag: int = 0
    gate_temperatures: tuple[float, float] = (1.0, 1.05)  # for advantages above 0, and for others
    divergence: Divergence | None = None  # D, from the teacher's distributions; None: they are not compared
    divergence_coefficient: float = 0.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient is not None

    def samples_with_gradient(self, batch: MicroBatch) -> list[int] | None:
        """Return the segments of samples whose loss can have a gradient; None: all of them.

        Where all answers to a prompt have the same reward, their advantages are exactly zero, and so is their gradient:
        it need not be computed. With a KL or an entropy, in the loss or only logged, or with a loss of which that is
        not known, such as a user's, every sample counts that has a token to learn from.
        """
        layout, learned = batch.layout, batch.mask
        has_others = REFERENCE_LOG_PROBS in batch.fields or self.needs_entropy
        if not has_others and not policy_loss_entry(self.policy_loss).learns_without_advantage:
            learned = learned & (batch.fields[ADVANTAGES] != 0)
        is_token = learned.to(torch.int64)
        num_tokens = torch.zeros(layout.num_episodes, dtype=torch.int64).index_add_(0, layout.token_episode, is_token)
        chosen: list[int] = (num_tokens[layout.segment_episode] > 0).nonzero().squeeze(-1).tolist()
        return chosen if len(chosen) < batch.num_segments else None

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        terms = self.terms(outputs, batch)
        return terms.loss, terms.metrics

    def terms(self, outputs: Outputs, batch: MicroBatch) -> PolicyTerms:
        """Compute the loss of a micro-batch, its metrics, and which tokens were clipped or corrected."""
        log_probs, mask = outputs.log_probs, batch.mask
        assert log_probs is not None
        old = batch.fields.get(OLD_LOG_PROBS, log_probs.detach())
        rollout, sampled = batch.fields[ROLLOUT_LOG_PROBS], mask
        if GIVEN in batch.fields:  # no engine has log-probs of these
            is_given = batch.fields[GIVEN].bool()
            rollout, sampled = torch.where(is_given, old, rollout), mask & ~is_given
            batch = replace(batch, fields={**batch.fields, ROLLOUT_LOG_PROBS: rollout})
        surrogate = self._surrogate(log_probs, old, batch)
        loss = surrogate.loss
        metrics: dict[str, Tensor | float] = {
            "clipped": surrogate.clipped.sum(),
            "policy_kl": -surrogate.log_ratio.sum(),
        }
        gap = torch.where(mask, old - rollout, 0.0)
        metrics["engine_gap"] = gap.abs().sum()
        metrics["engine_gap_mean"] = -gap.sum()
        metrics["engine_gap_max"] = gap.abs().max() if len(gap) else 0.0
        metrics["engine_gap_counts"] = count_sizes(gap.detach().abs(), sampled)
        if self.max_lag:
            lags, zeros = batch.fields[LAGS].long(), gap.new_zeros(self.max_lag + 1, dtype=torch.float64)
            metrics["engine_gap_lags"] = zeros.index_add(0, lags, gap.detach().abs().double())
            metrics["tokens_lags"] = zeros.index_add(0, lags, mask.double())
        corrected = torch.zeros_like(mask)
        if self.correction is not None:
            correction = self._corrections(old, batch, self.correction)
            loss = loss * correction.weights * batch.fields.get(CORRECTION_SCALES, 1.0)
            corrected = correction.changed
        if self.rejection is not None:
            assert self.rejection_high is not None
            bounds = {"low": self.rejection_low, "high": self.rejection_high}
            kept = corrections.rejection_weights(old, rollout, batch.layout, self.rejection, **bounds)
            loss = loss * kept
            metrics["rejected"] = (mask & (kept == 0)).sum()
            corrected = corrected | (mask & (kept == 0))
        if self.correction is not None or self.rejection is not None:
            metrics["corrected"] = corrected.sum()
        if REFERENCE_LOG_PROBS in batch.fields:
            kl = estimate_kl(log_probs, batch.fields[REFERENCE_LOG_PROBS], mask, self.kl_estimator)
            metrics["kl"] = kl.detach().sum()
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * kl
        if outputs.entropy is not None:
            metrics["entropy"] = torch.where(mask, outputs.entropy.detach(), 0.0).sum()
            if self.entropy_coefficient:
                loss = loss + entropy_bonus(outputs.entropy, mask, self.entropy_coefficient)
        if outputs.divergence is not None:
            apart = torch.where(mask, outputs.divergence, 0.0)
            metrics["divergence"] = apart.detach().sum()
            loss = loss + self.divergence_coefficient * apart
        return PolicyTerms(weighted_sum(loss, batch.weights), metrics, surrogate.clipped, corrected)

    def _surrogate(self, log_probs: Tensor, old: Tensor, batch: MicroBatch) -> PolicyLoss:
        entry = policy_loss_entry(self.policy_loss)
        options: dict[str, Any] = {}
        if entry.has_clip:
            options |= {"eps_low": self.clip_low, "eps_high": self.clip_high}
        if entry.has_gate:
            options["temperature_pos"], options["temperature_neg"] = self.gate_temperatures
        if entry.has_dual_clip:
            options["dual_clip"] = self.dual_clip
        if entry.has_steps:
            options["starts"] = _ratio_starts(batch)
        if entry.has_episode_ratio:
            options["ratio_base_log_probs"] = batch.fields[ROLLOUT_LOG_PROBS] if self.ratio_to == "rollout" else None
        function = user_function(self.policy_loss) if is_user_function(self.policy_loss) else load(entry.function)
        advantages, takes_mask = batch.fields[ADVANTAGES], entry.takes_mask
        return call_policy_loss(function, log_probs, old, advantages, batch.layout, takes_mask=takes_mask, **options)

    def correction_totals(self, batch: MicroBatch) -> corrections.WeightTotals:
        """Add up the correction weights of one rank's part of a step, which has old log-probs."""
        assert self.correction is not None
        weights = self._corrections(batch.fields[OLD_LOG_PROBS], batch, self.correction).weights
        return corrections.weight_totals(weights, batch.layout, self.correction)

    def _corrections(self, old: Tensor, batch: MicroBatch, kind: str) -> corrections.CorrectionWeights:
        rollout, starts = batch.fields[ROLLOUT_LOG_PROBS], _ratio_starts(batch)
        bounds = {"low": self.correction_low, "high": self.correction_high}
        return corrections.correction_weights(old, rollout, batch.layout, kind, starts=starts, **bounds)


def _ratio_starts(batch: MicroBatch) -> Tensor | None:
    """Return the first of the tokens that share a ratio: [num_tokens] bool; None where each has its own."""
    starts = batch.fields.get(RATIO_STARTS)
    return None if starts is None else starts.bool()


@dataclass(frozen=True)
class ValueObjective:
    """½ · (V − R)² per token, clipped around the values before the update. See `value_loss`."""

    clip: float | None

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        assert outputs.values is not None
        mask = batch.mask
        old = torch.where(mask, batch.fields[OLD_VALUES], 0.0)
        returns = torch.where(mask, batch.fields[RETURNS], 0.0)
        surrogate = value_loss(outputs.values, old, returns, mask, clip=self.clip)
        error = (returns - old).double()  # double: the variance subtracts squares of large returns from each other
        metrics: dict[str, Tensor | float] = {
            "value_clipped": surrogate.clipped.sum(),
            "value": old.sum(),
            "return": returns.sum(),
            "return_squares": returns.double().square().sum(),
            "value_error": error.sum(),
            "value_error_squares": error.square().sum(),
        }
        return weighted_sum(surrogate.loss, batch.weights), metrics
