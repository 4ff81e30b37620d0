"""Divergence of a policy's next-token distribution p from a teacher's q, from logits of both.

The teacher's distribution is known for the whole vocabulary, or for its `top_k` most likely tokens. These are `top_k`
classes, and what is left of the distribution is, by `tail`,

    other           one more class, with the probability of all other tokens together, in p and in q. The divergence is
                    then a lower bound of that over the vocabulary, with equality where p and q are proportional on the
                    other tokens (the log-sum inequality), so it is never negative, and 0 if p = q.
    renormalise     left out: p and q are divided by their sums over the `top_k` tokens, which says nothing about how
                    much probability p gives to all others.

Both distributions are at the temperature of the divergence, and over the first `vocab_size` tokens: checkpoints pad
their vocabularies to different sizes, and no text has the tokens of the padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotseat.errors import UserError
from hotseat.extensions import load
from hotseat.registry.divergences import divergence_entry

Tail = Literal["other", "renormalise"]


@dataclass(frozen=True)
class Divergence:
    """How a policy is compared with its teacher."""

    kind: str  # of the table of divergences
    temperature: float = 1.0
    beta: float = 0.5  # of the divergence that has one
    top_k: int | None = None  # None: the whole vocabulary
    tail: Tail = "other"
    vocab_size: int | None = None  # of the smaller of the two models; None: they have one size

    def __post_init__(self) -> None:
        divergence_entry(self.kind)
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UserError(f"a divergence at temperature {self.temperature}: set it above 0")
        if not 0 < self.beta < 1:
            raise UserError(
                f"beta {self.beta} of a divergence: set it above 0 and below 1; at the ends use forward_kl and"
                " reverse_kl"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"a divergence over {self.top_k} tokens: set top_k to 1 or more, or leave it unset")


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(q ‖ p) = Σ q·(log q − log p) of each row. [num_rows, num_classes] each -> [num_rows]."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p ‖ q) = Σ p·(log p − log q) of each row. [num_rows, num_classes] each -> [num_rows]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def generalised_jsd(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """Compute β·KL(q ‖ m) + (1 − β)·KL(p ‖ m), m = β·q + (1 − β)·p, of each row.

    Agarwal et al., "On-Policy Distillation of Language Models", 2024, equation 1. Towards β = 0 it is β·KL(q ‖ p),
    towards 1 it is (1 − β)·KL(p ‖ q). [num_rows, num_classes] each -> [num_rows].
    """
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return beta * forward_kl(log_m, log_q) + (1 - beta) * forward_kl(log_m, log_p)


def divergence(log_p: Tensor, log_q: Tensor, how: Divergence) -> Tensor:
    """Compute the divergence of each row from log-probs of all classes: [num_rows, num_classes] -> [num_rows]."""
    entry = divergence_entry(how.kind)
    options = {"beta": how.beta} if entry.has_beta else {}
    by_row: Tensor = load(entry.function)(log_p, log_q, **options)
    return by_row


def divergence_from_logits(logits: Tensor, teacher_logits: Tensor, how: Divergence) -> Tensor:
    """Compute the divergence over the whole vocabulary. logits: [num_rows, vocab_size] each -> [num_rows]."""
    return divergence(_log_probs(logits, how), _log_probs(teacher_logits, how), how)


def top_log_probs(logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens and the log-probs of the classes: [num_rows, top_k] int32, [num_rows, num_classes].

    logits: the teacher's, [num_rows, vocab_size].
    """
    assert how.top_k is not None
    most = logits.shape[-1] if how.vocab_size is None else min(logits.shape[-1], how.vocab_size)
    if how.top_k >= most:
        raise UserError(
            f"algorithm.distill.top_k is {how.top_k}, and the vocabulary has {most:,} tokens: set a smaller one, or"
            " null for the whole vocabulary"
        )
    scaled = logits[:, :most] / how.temperature
    ids = scaled.topk(how.top_k, dim=-1).indices
    return ids.to(torch.int32), _classes(scaled, ids, how.tail)


def classes_of_top(log_probs: Tensor, tail: Tail) -> Tensor:
    """Return log-probs of the classes where those of the most likely tokens alone are known, over all tokens.

    log_probs: [num_rows, top_k] -> [num_rows, num_classes] in float32. The rest of a distribution is 1 minus the sum,
    which is exact to some 1e-7: rarer than that it is not known.
    """
    if tail == "renormalise":
        return log_probs.log_softmax(-1)
    rest = 1 - log_probs.double().exp().sum(-1, keepdim=True)
    others = rest.clamp(min=torch.finfo(torch.float32).eps).log()
    return torch.cat([log_probs.double(), others], -1).log_softmax(-1).float()


def divergence_from_top(logits: Tensor, ids: Tensor, teacher_log_probs: Tensor, how: Divergence) -> Tensor:
    """Compute the divergence over a teacher's most likely tokens, which `top_log_probs` returned.

    logits [num_rows, vocab_size], ids [num_rows, top_k], teacher_log_probs [num_rows, num_classes] -> [num_rows].
    """
    scaled = logits[:, : how.vocab_size] / how.temperature
    return divergence(_classes(scaled, ids.long(), how.tail), teacher_log_probs.to(scaled.dtype), how)


def _log_probs(logits: Tensor, how: Divergence) -> Tensor:
    return (logits[:, : how.vocab_size] / how.temperature).log_softmax(-1)


def _classes(logits: Tensor, ids: Tensor, tail: Tail) -> Tensor:
    """Return the log-prob of each chosen token, and with `other` of all others together: [num_rows, num_classes]."""
    top = logits.gather(-1, ids)
    if tail == "renormalise":
        return top.log_softmax(-1)
    # Summed over the others themselves: 1 minus the sum over the chosen ones would lose all digits where it is near 0.
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([top, others], -1).log_softmax(-1)
