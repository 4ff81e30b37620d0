"""The weights of a model under ZeRO: gathered whole, replaced, and cut into fragments for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotseat.train.fragments import Fragment
from hotseat.train.tensor import Cut, TensorGroup
from hotseat.train.zero_stages import WeightStretch


@dataclass(frozen=True)
class ShardedWeights:
    """Shares of the weights on this rank, by name, gathered to whole weights on demand."""

    parameters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, torch.Size]  # on this rank, of weights that are cut over layers
    pieces: Mapping[str, WeightStretch]  # stretches that this rank steps or holds
    cuts: Mapping[str, Cut]  # of weights that are cut over layers
    tensor: TensorGroup | None  # the ranks that have the parts of each layer
    device: torch.device
    are_masters_sharded: bool

    def gather(self, names: Collection[str], is_exact: bool) -> Iterator[tuple[str, Tensor]]:
        """Gather whole weights, each to be read before the next comes. All ranks together.

        is_exact: masters of trained weights instead of the weights that forwards use.
        """
        for name, weight in self._gather_parts(names, is_exact):
            cut = self.cuts.get(name)
            yield name, weight if cut is None or self.tensor is None else self.tensor.gather(weight, cut)

    def _gather_parts(self, names: Collection[str], is_exact: bool) -> Iterator[tuple[str, Tensor]]:
        """Gather as `gather` does, but of weights that are cut over layers only this rank's part."""
        import deepspeed

        masters = [name for name in names if is_exact and self.parameters[name].requires_grad]
        live = [name for name in names if not (is_exact and self.parameters[name].requires_grad)]
        with deepspeed.zero.GatheredParameters([self.parameters[name] for name in live]):
            for name in live:
                yield name, self.parameters[name].detach()
        counts = [math.prod(self.shapes[name]) for name in masters]
        # Every element is on one rank and zero elsewhere; a sum of integers keeps its bits.
        whole = torch.zeros(sum(counts), dtype=torch.float32, device=self.device)
        places = dict(zip(masters, whole.split(counts), strict=True))
        for name, place in places.items():
            piece = self.pieces.get(name)
            if piece is not None:
                place[piece.start : piece.start + piece.size] = piece.of(piece.owner)
        if masters and self.are_masters_sharded and dist.get_world_size() > 1:
            dist.all_reduce(whole.view(torch.int32), group=None if self.tensor is None else self.tensor.across)
        for name, place in places.items():
            yield name, place.view(self.shapes[name])

    def copies(self, names: Collection[str], is_exact: bool) -> dict[str, Tensor]:
        """Gather whole weights, and copy each. All ranks together."""
        return {name: weight.clone() for name, weight in self.gather(names, is_exact)}

    def buckets(self, names: Iterable[str], num_bytes: int, bucket_bytes: int) -> Iterator[list[str]]:
        """Group names of weights into buckets of at most `bucket_bytes`. num_bytes: per element."""
        bucket: list[str] = []
        size = 0
        for name in names:
            needed = math.prod(self.shapes[name]) * num_bytes
            if bucket and size + needed > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += needed
        if bucket:
            yield bucket

    def replace(self, name: str, whole: Tensor) -> None:
        """Copy this rank's stretch out of a whole weight, if it has one."""
        piece, cut = self.pieces.get(name), self.cuts.get(name)
        if piece is not None:
            part = whole if cut is None else cut.of(whole)
            piece.of(piece.owner).copy_(part.reshape(-1)[piece.start : piece.start + piece.size])

    def fragment(self, name: str, stretch: Tensor) -> Fragment:
        """Describe a stretch, which lies in a tensor like the weight's piece does, as a part of the whole tensor."""
        start, cut = self.pieces[name].start, self.cuts.get(name)
        if cut is None:
            return Fragment(stretch, self.shapes[name], start)
        return Fragment(stretch, cut.whole, start, cut.part, cut.shift)
