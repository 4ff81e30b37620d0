"""Steps of time that are longer than a token: the actions of a simulator, chunks of them, or turns."""

from __future__ import annotations

import torch
from torch import Tensor

from hotseat.types import TokenLayout


def step_starts(layout: TokenLayout, tokens_per_step: int | None) -> Tensor:
    """[num_tokens] bool: the first token of each step of time.

    Steps are `tokens_per_step` tokens each, counted from the beginning of every unbroken run of sampled tokens in a
    segment; None: the whole run is one. The last step of a run may be shorter.
    """
    mask, segment = layout.mask, layout.token_segment
    goes_on = torch.zeros_like(mask)
    goes_on[1:] = mask[:-1] & (segment[1:] == segment[:-1])
    begins = mask & ~goes_on
    if tokens_per_step is None:
        return begins
    position = torch.arange(layout.num_tokens, device=mask.device)
    begun = torch.where(begins, position, 0).cummax(0).values if len(position) else position
    return mask & ((position - begun) % tokens_per_step == 0)


def steps_of_tokens(starts: Tensor, mask: Tensor) -> Tensor:
    """[num_tokens] int64: the step of each sampled token, counted through the batch; -1 where not sampled."""
    return torch.where(mask, starts.to(torch.int64).cumsum(0) - 1, -1)


def sum_on_tokens(values: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
    """Replace the value of each sampled token by the sum over its step; 0 elsewhere. [num_tokens] in and out."""
    steps = steps_of_tokens(starts, mask)
    sums = sum_per_step(values, steps, int(starts.sum()))
    return torch.where(mask, sums[steps.clamp(min=0)], 0.0) if len(sums) else torch.zeros_like(values)


def mean_on_tokens(values: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
    """Replace the value of each sampled token by the mean over its step; 0 elsewhere. [num_tokens] in and out."""
    counts = sum_on_tokens(torch.ones_like(values), starts, mask)
    return sum_on_tokens(values, starts, mask) / counts.clamp(min=1)


def sum_per_step(values: Tensor, steps: Tensor, num_steps: int) -> Tensor:
    """Sum token values over each step: [num_tokens] to [num_steps]. Values must be 0 where not sampled."""
    sums = values.new_zeros(max(1, num_steps))  # tokens that were not sampled add 0 to the first
    return sums.index_add(0, steps.clamp(min=0), torch.where(steps >= 0, values, 0.0))[:num_steps]


def sampled_steps(layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """[num_sampled] each: the sampled tokens' flat positions, in time order within an episode, and their episodes."""
    steps = torch.nonzero(layout.mask).squeeze(1)
    return steps, layout.token_episode[steps]
