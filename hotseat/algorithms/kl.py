"""Estimates of the KL divergence between policy and reference per token, and the coefficient of the KL penalty.

With d = log π(token) − log π_ref(token), for tokens sampled from π (Schulman, "Approximating KL Divergence", 2020):

    k1 = d                 unbiased, may be negative
    k2 = d² / 2            biased, low variance; its gradient is that of the true KL at the sampled tokens
    k3 = e^(−d) − 1 + d    unbiased, never negative

Each estimate is clamped to [−10, 10], as in OpenRLHF, so that a single outlier cannot dominate the step. Beyond the
clamp the gradient is zero. As a loss, the mean gradient of k1 is zero whatever the reference, that of k2 is the
gradient of KL(π || π_ref) and that of k3 the gradient of KL(π_ref || π): docs/algorithms.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from hotseat.algorithms.token_masks import sampled_only
from hotseat.errors import NonFiniteError, UserError

KlEstimator = Literal["k1", "k2", "k3"]

KL_CLAMP = 10.0
# Beyond this every estimate is clamped anyway; bounding d first keeps e^(−d) finite, so that no gradient is 0 * inf.
_MAX_LOG_RATIO = 20.0
# Ziegler et al. 2019, section 2.2: one update moves by at most this share.
_MAX_ERROR = 0.2


@torch.no_grad()
def distillation_advantages(old_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Compute log π_teacher − log π_old of each sampled token, to be added to its advantage. [num_tokens] in and out.

    On-policy distillation: with this advantage the mean gradient of the policy loss, over tokens that the policy
    samples, is that of KL(π ‖ π_teacher) of the next token. Later tokens do not count: it is no reward. Agarwal et al.,
    "On-Policy Distillation of Language Models", 2024; Thinking Machines Lab, "On-Policy Distillation", 2025.
    """
    return sampled_only(teacher_log_probs, mask) - sampled_only(old_log_probs, mask)


def estimate_kl(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate the KL of each sampled token, 0 elsewhere. [num_tokens] in and out."""
    log_ratio = sampled_only(log_probs, mask) - sampled_only(reference_log_probs, mask).detach()
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if estimator == "k1":
        estimate = log_ratio
    elif estimator == "k2":
        estimate = log_ratio.square() / 2
    elif estimator == "k3":
        estimate = (-log_ratio).exp() - 1 + log_ratio
    else:
        raise UserError(f"kl estimator {estimator!r} is not known: use one of {', '.join(get_args(KlEstimator))}")
    return estimate.clamp(-KL_CLAMP, KL_CLAMP)


@dataclass(frozen=True)
class FixedKl:
    """A constant coefficient."""

    coefficient: float

    def updated(self, kl: float, num_samples: int) -> FixedKl:
        return self


@dataclass(frozen=True)
class AdaptiveKl:
    """A coefficient that steers the measured KL towards a target: β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon).

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019; the form with a horizon is OpenRLHF's.
    The object is its own state: save it, or its coefficient, in the checkpoint.
    """

    coefficient: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise UserError(f"kl_target is {self.target}: it divides the measured KL, set it above 0")
        if not self.horizon > 0:
            raise UserError(f"kl_horizon is {self.horizon}: it counts samples, set it above 0")

    def updated(self, kl: float, num_samples: int) -> AdaptiveKl:
        """Return the controller after `num_samples` more samples whose mean KL was `kl`."""
        if not math.isfinite(kl):
            raise NonFiniteError(f"the measured KL is {kl}: the coefficient {self.coefficient} would be lost for good")
        shortest = _MAX_ERROR * num_samples
        if shortest >= self.horizon:
            raise UserError(
                f"kl_horizon {self.horizon:g} is too short for {num_samples} samples per update: the coefficient could"
                f" turn negative; set kl_horizon above {shortest:g}"
            )
        error = min(max(kl / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, coefficient=self.coefficient * (1 + error * num_samples / self.horizon))
