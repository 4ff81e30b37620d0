"""Losses on answers from the data set: SFT per token, preferences per pair.

A preference loss takes log-probs of whole answers, [num_pairs] each, as `episode_log_probs` makes them. With
Δ = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected), and ℓ(y) = log π(y) / tokens of y:

    DPO    −log σ(β·Δ)                                        Rafailov et al. 2023, equation 7
    cDPO   −(1 − ε)·log σ(β·Δ) − ε·log σ(−β·Δ)                Mitchell, "A note on DPO with noisy preferences", 2023
    IPO    (Δ − 1/(2β))²                                      Azar et al. 2023, equation 17
    ORPO   −ℓ(c) − β·log σ(log odds(c) − log odds(r))         Hong et al. 2024, equations 4, 6 and 7
    SimPO  −log σ(β·ℓ(c) − β·ℓ(r) − γ)                        Meng et al. 2024, equation 6

where odds(y) = e^ℓ(y) / (1 − e^ℓ(y)). The loss of a step is the mean over all its pairs: sum, then divide by the number
of pairs of the step, not of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hotseat.algorithms.token_masks import floating, sampled_only, sum_per_episode
from hotseat.errors import UserError
from hotseat.types import TokenLayout

PairwiseKind = Literal["sigmoid", "logexp"]


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of each pair, and the implicit rewards of its answers."""

    loss: Tensor  # [num_pairs], with gradient
    # [num_pairs] detached: β·(log π − log π_ref) of the chosen answer, or β·ℓ for losses without a reference
    chosen_rewards: Tensor
    rejected_rewards: Tensor  # [num_pairs] detached: the same of the rejected one


def sft_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Compute −log π of each token to learn, 0 elsewhere. [num_tokens] in and out.

    With `token_mean` weights this is the cross-entropy over the step's tokens, with `sequence_mean` the mean over
    answers of each answer's mean.
    """
    return -sampled_only(log_probs, mask)


def episode_log_probs(log_probs: Tensor, layout: TokenLayout) -> Tensor:
    """Sum log π over the tokens of each answer under the mask: [num_tokens] to [num_episodes]."""
    return sum_per_episode(sampled_only(log_probs, layout.mask), layout)


def answer_nll(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Compute −log π(y) / number of tokens of y, from log-probs and lengths of answers, [num_answers] each.

    This is the NLL term that a preference loss can add for its chosen answers: the mean over answers of each answer's
    mean, as in OpenRLHF. (TRL's "sft" term is the mean over tokens: use `sft_loss` on the chosen answers.)
    """
    return -floating(log_probs) / lengths.clamp(min=1)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """Compute the loss of DPO, or of cDPO with a label smoothing ε > 0, from log-probs of answers, [num_pairs] each."""
    if not 0 <= label_smoothing < 0.5:
        raise UserError(
            f"label_smoothing is {label_smoothing}: it is the share of labels taken to be flipped, set it in [0, 0.5)"
        )
    chosen_margin, rejected_margin = _margins(chosen, rejected, reference_chosen, reference_rejected, beta)
    logits = beta * (chosen_margin - rejected_margin)
    loss = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return PreferenceLoss(loss, beta * chosen_margin.detach(), beta * rejected_margin.detach())


def ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
) -> PreferenceLoss:
    """Compute the loss of IPO, in one of its two variants, from log-probs summed over each answer, [num_pairs] each.

    With lengths, each answer's log-ratio is divided by its number of tokens, as in TRL and, according to its authors,
    in the paper's own experiments. Without lengths it is the sum, as in the paper's printed equation and in OpenRLHF.
    """
    if (chosen_lengths is None) != (rejected_lengths is None):
        raise UserError(
            "IPO needs the lengths of both answers (length-normalised) or of neither (summed): one is missing"
        )
    chosen_margin, rejected_margin = _margins(chosen, rejected, reference_chosen, reference_rejected, beta)
    delta = chosen_margin - rejected_margin
    if chosen_lengths is not None and rejected_lengths is not None:
        delta = chosen_margin / chosen_lengths.clamp(min=1) - rejected_margin / rejected_lengths.clamp(min=1)
    loss = (delta - 1 / (2 * beta)).square()
    return PreferenceLoss(loss, beta * chosen_margin.detach(), beta * rejected_margin.detach())


def orpo_loss(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, *, beta: float
) -> PreferenceLoss:
    """Compute the loss of ORPO, β being the paper's λ, from log-probs summed over each answer, [num_pairs] each.

    The likelihood term is of the answer alone, as in the paper, and a mean per answer. (TRL also counts the prompt in
    it, and takes the mean over the tokens of a micro-batch.)
    """
    _check_beta(beta)
    chosen_mean, rejected_mean = -answer_nll(chosen, chosen_lengths), -answer_nll(rejected, rejected_lengths)
    log_odds = (chosen_mean - _log_of_rest(chosen_mean)) - (rejected_mean - _log_of_rest(rejected_mean))
    loss = -chosen_mean - beta * logsigmoid(log_odds)
    return PreferenceLoss(loss, beta * chosen_mean.detach(), beta * rejected_mean.detach())


def simpo_loss(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, *, beta: float, gamma: float
) -> PreferenceLoss:
    """Compute the loss of SimPO with target margin γ, from log-probs summed over each answer, [num_pairs] each."""
    _check_beta(beta)
    chosen_mean, rejected_mean = -answer_nll(chosen, chosen_lengths), -answer_nll(rejected, rejected_lengths)
    loss = -logsigmoid(beta * (chosen_mean - rejected_mean) - gamma)
    return PreferenceLoss(loss, beta * chosen_mean.detach(), beta * rejected_mean.detach())


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """Compute log(1 − e^x) for x < 0 without cancellation. At x = 0, a certain answer, x is taken as just below 0."""
    below = log_prob.clamp(max=-torch.finfo(log_prob.dtype).tiny)
    is_near = below > -0.6931  # log ½, where the two forms are equally exact
    # Each form gets a harmless number where the other is used, so that its gradient is finite there.
    near = torch.where(is_near, below, -0.1).expm1().neg().log()
    far = torch.log1p(-torch.where(is_near, -1.0, below).exp())
    return torch.where(is_near, near, far)


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise UserError(f"beta is {beta}: it scales the implicit reward, set it above 0 (0.1 is usual)")


def _margins(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Compute log π − log π_ref of the chosen and of the rejected answers."""
    _check_beta(beta)
    assert chosen.shape == rejected.shape == reference_chosen.shape == reference_rejected.shape
    return (
        floating(chosen) - floating(reference_chosen).detach(),
        floating(rejected) - floating(reference_rejected).detach(),
    )


def pairwise_loss(
    chosen_rewards: Tensor, rejected_rewards: Tensor, *, margin: Tensor | None = None, kind: PairwiseKind = "sigmoid"
) -> Tensor:
    """Compute the reward model's loss per pair, [num_pairs], with margin m (0 without `margin`).

        sigmoid   −log σ(r_chosen − r_rejected − m)      Bradley-Terry; the margin is Llama 2's (Touvron et al. 2023)
        logexp    log(1 + e^(r_rejected − r_chosen + m)) Bai et al. 2022

    The two are the same function, each written in its stable form, and so the margin counts in both. (OpenRLHF's logexp
    leaves the margin out, and overflows.)
    """
    difference = floating(chosen_rewards) - floating(rejected_rewards)
    if margin is not None:
        difference = difference - floating(margin)
    if kind == "sigmoid":
        return -logsigmoid(difference)
    if kind == "logexp":
        return torch.logaddexp(torch.zeros_like(difference), -difference)
    raise UserError(f"reward-model loss {kind!r} is not known: use one of {', '.join(get_args(PairwiseKind))}")
