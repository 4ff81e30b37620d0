"""The moving average of the weights under training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class MovingAverage:
    """The average after every update: average = beta · average + (1 - beta) · weight. It begins as the weights do.

    Each rank keeps its shard, in 32 bits and in host memory: the average is needed once per update, and on a device it
    would take as much as the weights.
    """

    def __init__(self, shards: Mapping[str, Tensor], beta: float):
        self._beta = beta
        self.shards = {
            name: torch.empty(shard.shape, dtype=torch.float32, pin_memory=shard.is_cuda).copy_(shard)
            for name, shard in shards.items()
        }

    def update(self, shards: Mapping[str, Tensor]) -> None:
        for name, shard in shards.items():
            # The device adds, one weight at a time: the host would take longer to add than the bytes take to travel.
            average = self.shards[name].to(shard.device, non_blocking=True)
            average.mul_(self._beta).add_(shard.float(), alpha=1 - self._beta)
            self.shards[name].copy_(average, non_blocking=True)
        if any(shard.is_cuda for shard in shards.values()):
            torch.cuda.synchronize()

    @contextmanager
    def in_place_of(self, shards: Mapping[str, Tensor]) -> Iterator[None]:
        """Put the average in place of the live weights inside the context."""
        kept = {name: shard.to("cpu", copy=True) for name, shard in shards.items()}
        try:
            for name, shard in shards.items():
                shard.copy_(self.shards[name])
            yield
        finally:
            for name, shard in shards.items():
                shard.copy_(kept[name])
