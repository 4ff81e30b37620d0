"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotseat.algorithms.token_masks import sampled_only
from hotseat.errors import UserError


@dataclass(frozen=True)
class ValueLoss:
    """The loss of each token, 0 where the policy did not sample."""

    loss: Tensor  # [num_tokens], with gradient
    clipped: Tensor  # [num_tokens] bool: the clipped term is the larger one, no gradient flows


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None) -> ValueLoss:
    """½ · max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²) per token; ½ (V − R)² without a clip.

    Dhariwal et al., "OpenAI Baselines" (ppo2), 2017; OpenRLHF's and verl's are the same.
    """
    if clip is not None and not clip > 0:
        raise UserError(f"value_clip is {clip}: set it above 0, or leave it out for no clipping")
    values = sampled_only(values, mask)
    returns = sampled_only(returns, mask).detach()
    squared = (values - returns).square()
    if clip is None:
        return ValueLoss(squared / 2, torch.zeros_like(mask))
    old_values = sampled_only(old_values, mask).detach()
    step = values - old_values
    squared_near_old = (old_values + step.clamp(-clip, clip) - returns).square()
    clipped = (step.abs() > clip) & (squared_near_old > squared)
    return ValueLoss(torch.where(clipped, squared_near_old, squared) / 2, clipped)
