"""Mixtures of experts: the loss that keeps routers from sending every token to the same few.

    aux = E · Σ_e f_e · p_e

with E experts, f_e the share of tokens that have expert e among their k, and p_e their mean probability of e, both over
all layers together (Fedus et al., "Switch Transformers", 2021, equations 4 to 6; `load_balancing_loss_func` of
transformers). It is no sum over tokens but a statistic of a micro-batch: a step has the mean of its micro-batches',
weighted by their tokens, which is not quite that of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotseat.errors import UserError


def routing_sums(router_logits: Sequence[Tensor], counts: Tensor, num_chosen: int) -> Tensor:
    """Count the tokens that chose each expert, and sum its probabilities, over all layers: [2, num_experts] float32.

    router_logits [num_rows, num_experts] of each layer; counts [num_rows]: the tokens that each row stands for.
    """
    total = torch.zeros(2, router_logits[0].shape[-1], dtype=torch.float32, device=counts.device)
    for logits in router_logits:
        probs = logits.float().softmax(-1)
        chosen = torch.zeros_like(probs).scatter(-1, probs.topk(num_chosen, -1).indices, 1.0)
        total = total + torch.stack([counts @ chosen, counts @ probs])
    return total


def balancing_loss(sums: Tensor) -> Tensor:
    """Compute the balancing loss from `routing_sums`."""
    num_tokens = sums[1].detach().sum()  # times layers: a token's probabilities add up to one
    return sums.shape[1] * (sums[0] / num_tokens * (sums[1] / num_tokens)).sum()


def has_experts(model_config: Any) -> bool:
    """Tell whether the model has routers whose choices can be seen."""
    text = model_config.get_text_config()
    # Doge counts experts without having any, and says so.
    return bool(getattr(text, "num_experts_per_tok", 0)) and bool(getattr(text, "is_moe", True))


def check_experts(model_config: Any) -> None:
    """Raise unless the model has experts."""
    if not has_experts(model_config):
        raise UserError(
            f"algorithm.aux_loss_coef is set, and a {type(model_config).__name__.removesuffix('Config')} is no mixture"
            " of experts: remove it"
        )
