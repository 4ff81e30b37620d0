"""Token weights that turn one loss per token into the loss of an optimizer step.

The weight of every token is fixed once, over the whole step (all its micro-batches on all ranks). Then the loss is

    Σ_t weight_t · loss_t

which does not depend on where the sum is cut: any micro-batching on any number of ranks has the same loss and gradient.
A backend that averages gradients over ranks multiplies its loss by their number; one that sums them does nothing.

    token_mean      1 / N                 N sampled tokens in the step: DAPO, OpenRLHF, TRL "dapo"
    sequence_mean   1 / (E · n_e)         E episodes, n_e sampled tokens in this token's episode: GRPO, GSPO
    constant        1 / (E · max_length)  Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025

An episode without a sampled token does not count in E, as if it had been dropped. (TRL counts its empty row.)

A rank needs no other rank's layout: each sends its `step_totals`, all are added up, and `loss_weights` takes the sum.
Only an episode has to be whole on its rank, because n_e is counted there. Losses per pair (DPO, reward model) need
none of this: their weight is 1 / number of pairs in the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hotseat.errors import UserError
from hotseat.types import TokenLayout

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True)
class StepTotals:
    """Counts over a step that ranks add up before any of them can compute token weights."""

    num_sampled: int  # tokens that the policy sampled
    num_episodes: int  # episodes with at least one of them

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(self.num_sampled + other.num_sampled, self.num_episodes + other.num_episodes)


def step_totals(layout: TokenLayout) -> StepTotals:
    """Count the sampled tokens and episodes of one rank's share of a step, or of a whole step."""
    return StepTotals(num_sampled=int(layout.mask.sum()), num_episodes=int((layout.sampled_per_episode > 0).sum()))


def mask_truncated(layout: TokenLayout, truncated: Tensor) -> Tensor:
    """Return the mask of tokens to learn from, [num_tokens]: sampled, and not of a truncated episode.

        mask_t = 1 if the policy sampled t and its episode ended by itself, else 0

    DAPO's overlong filtering (Yu et al., 2025, section 3.4): the reward of an answer that was cut off says little about
    it. `truncated` is [num_episodes]. Put the mask into the layout before `step_totals`: a truncated episode then
    counts neither in N nor in E. Baselines are computed before, and compare with every sibling.
    """
    return layout.mask & ~truncated.to(torch.bool)[layout.token_episode]


def loss_weights(
    layout: TokenLayout,
    how: Aggregation,
    *,
    totals: StepTotals | None = None,
    max_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[num_tokens]: the weight of each token in the step's loss, 0 where the policy did not sample.

    `totals` are the step's; without them `layout` is the whole step. `max_length` is the constant of Dr. GRPO: the most
    tokens that an episode may sample.
    """
    totals = totals or step_totals(layout)
    mask = layout.mask.to(dtype)
    if how == "token_mean":
        return mask / max(totals.num_sampled, 1)
    if how == "sequence_mean":
        lengths = layout.sampled_per_episode.clamp(min=1).to(dtype)
        return mask / (lengths * max(totals.num_episodes, 1))[layout.token_episode]
    if how == "constant":
        if max_length is None or max_length < 1:
            raise UserError(
                f"loss aggregation 'constant' divides by a fixed length, and max_length is {max_length}: set it to the"
                " most tokens that one episode may sample"
            )
        return mask / (max(totals.num_episodes, 1) * max_length)
    raise UserError(f"loss aggregation {how!r} is not known: use one of {', '.join(get_args(Aggregation))}")


def weighted_sum(token_losses: Tensor, weights: Tensor) -> Tensor:
    """Compute the scalar Σ weight·loss. A token of weight 0 is not read, so a NaN there has no effect."""
    assert token_losses.shape == weights.shape
    return (torch.where(weights != 0, token_losses, 0.0) * weights).sum()
