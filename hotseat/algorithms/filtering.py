"""DAPO's dynamic sampling, the pure half: which groups can teach anything. Asking for more prompts is the loop's part.

Yu et al., "DAPO", 2025, section 3.2: a prompt that every sample solves, or none, has no advantage. OpenRLHF's form: a
group is kept iff low < mean(scores) < high, both strict. Note that this looks at the mean, not at the spread, so it
fits scores in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotseat.errors import UserError

FilterReason = Literal["kept", "score too low", "score too high", "too few samples", "score not a number"]


@dataclass(frozen=True)
class GroupFilter:
    """One entry per group, in ascending order of group id."""

    group_ids: Tensor  # [num_groups] int64
    keep: Tensor  # [num_groups] bool
    mean_scores: Tensor  # [num_groups] float64
    reasons: tuple[FilterReason, ...]
    keep_episode: Tensor  # [num_episodes] bool: the episode's group is kept


def filter_groups(scores: Tensor, groups: Tensor, low: float, high: float, *, min_size: int = 1) -> GroupFilter:
    """Keep a group iff low < mean(scores) < high and it has at least `min_size` episodes.

    `scores` and `groups` are [num_episodes]. Set `min_size` to 2 where the estimator needs siblings, so that a group
    whose other samples failed is dropped here, with a reason, and not refused later.
    """
    if not low < high:
        raise UserError(f"dynamic_filtering_reward_range is [{low}, {high}]: the first number must be below the second")
    group_ids, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    totals = torch.zeros(len(group_ids), dtype=torch.float64, device=groups.device)
    mean_scores = totals.index_add(0, index, scores.to(groups.device, torch.float64)) / sizes
    reasons = tuple(
        _reason(mean, size, low, high, min_size)
        for mean, size in zip(mean_scores.tolist(), sizes.tolist(), strict=True)
    )
    keep = torch.tensor([reason == "kept" for reason in reasons], dtype=torch.bool, device=groups.device)
    return GroupFilter(group_ids, keep, mean_scores, reasons, keep_episode=keep[index])


def _reason(mean: float, size: int, low: float, high: float, min_size: int) -> FilterReason:
    if size < min_size:
        return "too few samples"
    if mean != mean:
        return "score not a number"
    if mean <= low:
        return "score too low"
    return "score too high" if mean >= high else "kept"
