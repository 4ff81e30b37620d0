"""Helpers that every module here applies to its inputs: one precision, and 0 where the policy did not sample."""

from __future__ import annotations

import torch
from torch import Tensor

from hotseat.types import TokenLayout


def floating(values: Tensor) -> Tensor:
    """Convert integers and half precision to float32; float64 stays."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def sampled_only(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where the mask is set and 0 elsewhere, in value and gradient, even where they are NaN."""
    assert values.shape == mask.shape, f"{tuple(values.shape)} values for {tuple(mask.shape)} tokens"
    return torch.where(mask, floating(values), 0.0)


def sum_per_episode(values: Tensor, layout: TokenLayout) -> Tensor:
    """Sum token values over each episode: [num_tokens] to [num_episodes]."""
    return values.new_zeros(layout.num_episodes).index_add(0, layout.token_episode, values)


def mean_per_episode(values: Tensor, layout: TokenLayout) -> Tensor:
    """Average token values over each episode's sampled tokens: [num_tokens] to [num_episodes].

    Values must be 0 where not sampled. The mean is 0 where an episode has no sampled token.
    """
    return sum_per_episode(values, layout) / layout.sampled_per_episode.clamp(min=1)
