"""What every module here does to its inputs first: one precision, nothing read where the policy sampled nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from hotseat.types import TokenLayout


def floating(values: Tensor) -> Tensor:
    """float64 stays, everything else (integers, half precision) becomes float32."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def sampled_only(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set and 0 elsewhere, in the value and in the gradient, whatever stood there."""
    assert values.shape == mask.shape, f"{tuple(values.shape)} values for {tuple(mask.shape)} tokens"
    return torch.where(mask, floating(values), 0.0)


def sum_per_episode(values: Tensor, layout: TokenLayout) -> Tensor:
    """[num_tokens] to [num_episodes]."""
    return values.new_zeros(layout.num_episodes).index_add(0, layout.token_episode, values)


def mean_per_episode(values: Tensor, layout: TokenLayout) -> Tensor:
    """[num_tokens], zero where not sampled, to [num_episodes]: mean over sampled tokens, 0 where there are none."""
    return sum_per_episode(values, layout) / layout.sampled_per_episode.clamp(min=1)
