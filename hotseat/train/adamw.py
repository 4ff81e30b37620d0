"""torch's AdamW as every backend uses it, and the state of what it or Muon steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from hotseat.train.backend import AdamW


def make_adamw(weights: Iterable[Tensor], settings: AdamW, apart: Collection[int] = ()) -> torch.optim.AdamW:
    """Make an optimizer without state, and with a learning rate of 0, which each step sets.

    apart: ids of weights that get parameter groups of their own.
    """
    weights = list(weights)
    groups = [
        {
            "params": [each for each in weights if (each.ndim >= 2) == decays and (id(each) in apart) == is_apart],
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for is_apart in (False, True)
        for decays in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=settings.betas, eps=settings.eps, fused=True
    )


def start_state(optimizer: torch.optim.AdamW, weights: Sequence[Tensor], groups: Sequence[int] | None = None) -> None:
    """Make the optimizer state now rather than in the first step.

    Memory is then known from the start, and there is always something to save, load and move.

    groups: the number of each weight's parameter group; None: the weights are in the groups.
    """
    if groups is None:
        number_of = {id(each): n for n, group in enumerate(optimizer.param_groups) for each in group["params"]}
        groups = [number_of[id(weight)] for weight in weights]
    for weight, number in zip(weights, groups, strict=True):
        if optimizer.param_groups[number].get("is_muon", False):
            optimizer.state[weight] = {"momentum_buffer": torch.zeros_like(weight, requires_grad=False)}
            continue
        optimizer.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }


def set_learning_rate(optimizer: torch.optim.AdamW, learning_rate: float, muon_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = muon_rate if group.get("is_muon", False) else learning_rate
