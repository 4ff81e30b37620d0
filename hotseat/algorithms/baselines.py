"""Baselines: the reward of an episode, compared with the rewards of its group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hotseat.algorithms.token_masks import floating
from hotseat.errors import UserError


def group_mean_centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """r − mean(group): Dr. GRPO, and REINFORCE++-baseline before its normalisation.

    Here as in the next two: `rewards` is [num_episodes] or [num_episodes, columns] (each column on its own), `groups`
    is [num_episodes] ids in any order, of groups of any size but one: an episode would be its own baseline.
    """
    return _Groups(groups).centred(rewards)


def group_normalised(rewards: Tensor, groups: Tensor, *, eps: float = 1e-9, with_std: bool = True) -> Tensor:
    """(r − mean) / (std + eps) with the sample standard deviation (n − 1): GRPO. r − mean without `with_std`.

    The eps is OpenRLHF's; verl has 1e-6, TRL 1e-4.
    """
    grouped = _Groups(groups)
    centred = grouped.centred(rewards)
    return (centred / (grouped.std(rewards) + eps)).to(centred.dtype) if with_std else centred


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r − mean of its siblings, which is (r − mean) · n / (n − 1): RLOO."""
    return _Groups(groups).minus_siblings(rewards)


def parts_normalised(
    rewards: Tensor,
    groups: Tensor,
    *,
    parts: Mapping[str, Tensor],
    part_weights: Mapping[str, float],
    eps: float = 1e-9,
    with_std: bool = True,
) -> Tensor:
    """Σ_k w_k · (r_k − mean_k) / (std_k + eps), each reward r_k of `parts` compared apart: GDPO. [num_episodes] each.

    A part is NaN where it does not apply to an episode, which then is in none of its means, and learns nothing from it.
    A part that applies to one episode of a group alone has nothing to be compared with, and counts as 0.
    """
    total = torch.zeros_like(rewards, dtype=torch.float64)
    for name, values in parts.items():
        applies = values.isfinite()
        _, index, sizes = torch.unique(groups[applies], return_inverse=True, return_counts=True)
        compared = applies.masked_scatter(applies, sizes[index] > 1)
        if compared.any():
            own = group_normalised(values[compared].double(), groups[compared], eps=eps, with_std=with_std)
            total[compared] += part_weights[name] * own
    return total.to(floating(rewards).dtype)


class _Groups:
    """Statistics per group, repeated for each episode of the group: [num_episodes, ...] in and out."""

    def __init__(self, groups: Tensor):
        ids, self.index, self.sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        if bool((self.sizes == 1).any()):
            alone = ids[self.sizes == 1].tolist()
            named = ", ".join(map(str, alone[:5])) + (", ..." if len(alone) > 5 else "")
            raise UserError(
                f"{'group' if len(alone) == 1 else 'groups'} {named}: only one sample, and a baseline needs siblings;"
                " set rollout.samples_per_prompt to 2 or more, and drop groups of which only one sample is left"
            )

    def mean(self, values: Tensor) -> Tensor:
        totals = values.new_zeros(len(self.sizes), *values.shape[1:]).index_add(0, self.index, values)
        return self._per_episode(totals, values) / self._per_episode(self.sizes, values)

    def centred(self, rewards: Tensor) -> Tensor:
        shifted = self._shifted(rewards)
        return (shifted - self.mean(shifted)).to(floating(rewards).dtype)

    def std(self, rewards: Tensor) -> Tensor:
        shifted = self._shifted(rewards)
        variance = self.mean((shifted - self.mean(shifted)).square()) * self._bessel(shifted)
        return variance.sqrt()

    def minus_siblings(self, rewards: Tensor) -> Tensor:
        shifted = self._shifted(rewards)
        return ((shifted - self.mean(shifted)) * self._bessel(shifted)).to(floating(rewards).dtype)

    def _shifted(self, rewards: Tensor) -> Tensor:
        """Subtract the group's least reward, in float64, so that the differences of equal rewards are exactly 0.

        In float32, three rewards of 0.1 have a mean that is not 0.1, and (r − mean) / (std + 1e-9) is nowhere near 0.
        """
        exact = rewards.to(torch.float64)
        index = self.index.reshape(-1, *[1] * (exact.dim() - 1)).expand_as(exact)
        least = exact.new_full((len(self.sizes), *exact.shape[1:]), torch.inf)
        return exact - least.scatter_reduce(0, index, exact, "amin")[self.index]

    def _bessel(self, like: Tensor) -> Tensor:
        sizes = self._per_episode(self.sizes, like)
        return sizes / (sizes - 1)

    def _per_episode(self, per_group: Tensor, like: Tensor) -> Tensor:
        per_episode = per_group[self.index].to(like.dtype)
        return per_episode.reshape(*per_episode.shape, *[1] * (like.dim() - per_episode.dim()))
