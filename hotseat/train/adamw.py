"""torch's AdamW as every backend uses it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hotseat.train.backend import AdamW


def make_adamw(weights: Iterable[Tensor], settings: AdamW) -> torch.optim.AdamW:
    """Without state yet, and with a learning rate of 0: each step sets it."""
    weights = list(weights)
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=settings.betas, eps=settings.eps, fused=True
    )


def start_state(optimizer: torch.optim.AdamW, weights: Iterable[Tensor]) -> None:
    """Made now rather than in the first step: memory is then known from the start, and there is always something to
    save, load and move.
    """
    for weight in weights:
        optimizer.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }


def set_learning_rate(optimizer: torch.optim.AdamW, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
