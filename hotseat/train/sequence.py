"""Sequences over several ranks: Ulysses (Jacobs et al., "DeepSpeed Ulysses", 2023).

The packed tokens of a micro-batch are cut into equal slices, one for each rank of a sequence group. What a model does
to single tokens happens where they are. Attention needs whole segments, but each head for itself: an all-to-all turns
[tokens / n, heads] into [tokens, heads / n], and another one back.

Every rank of a group sees the outputs for all tokens (`add_up`) and computes the same loss. Its gradient goes back
only to the rank's own tokens, so that gradients summed over all ranks are those of the loss counted once.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hotseat.algorithms.delta_rule import DELTA_FAMILIES
from hotseat.errors import UnsupportedError, UserError
from hotseat.words import quantity


class SequenceGroup:
    """The group of neighbouring ranks that share every micro-batch, as this rank sees it."""

    def __init__(self, size: int = 1, timeout_s: float = 600.0):
        """Make the group. All ranks together, if its size is above 1."""
        self.size = size
        self.rank = 0
        self.group: Any = None
        if size > 1:
            self.group, _ = dist.new_subgroups(size, timeout=datetime.timedelta(seconds=timeout_s))
            self.rank = dist.get_rank(self.group)

    def add_up(self, values: Tensor) -> Tensor:
        """Sum values over the ranks of the group. The gradient of the sum goes to each rank's own part alone."""
        return values if self.size == 1 else _AddUp.apply(values, self.group)

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


class Slice:
    """Part of a packed row on this rank. The row is padded to a multiple of the group's size."""

    def __init__(self, group: SequenceGroup, num_tokens: int):
        self._group = group
        self._num_tokens = num_tokens  # of the row, without padding
        self.length = -(-num_tokens // group.size)
        self.first = group.rank * self.length

    def of(self, row: Tensor) -> Tensor:
        """Cut this rank's slice out of a row: [1, num_tokens] -> [1, length]."""
        filled = pad(row, (0, self.length * self._group.size - self._num_tokens))
        return filled[:, self.first : self.first + self.length]

    @torch.compiler.disable
    def attend(
        self, attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend over the whole row for a part of the heads, and return this slice for all heads.

        [1, heads, length, head_size] each, key and value with their own number of heads -> [1, length, heads, ...].
        """
        size = self._group.size
        # Key heads that do not divide over the ranks are repeated: each goes to all ranks that have queries for it.
        copies = size // math.gcd(size, key.shape[1])
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
        out = attention(*(self._all_tokens(tensor) for tensor in (query, key, value)))[0]
        filled = pad(out, (0, 0, 0, 0, 0, self.length * size - self._num_tokens))
        parts = _Exchange.apply(filled.unflatten(0, (size, self.length)), self._group.group)
        return parts.transpose(0, 1).flatten(1, 2)[None]

    def _all_tokens(self, tensor: Tensor) -> Tensor:
        """Exchange heads for tokens: [1, heads, length, head_size] -> [1, heads / size, num_tokens, head_size]."""
        parts = tensor[0].unflatten(0, (self._group.size, -1)).transpose(1, 2)  # [size, length, heads / size, ...]
        row = _Exchange.apply(parts, self._group.group).flatten(0, 1)
        return row[: self._num_tokens].transpose(0, 1)[None]


class _Exchange(torch.autograd.Function):
    """An all-to-all: part j of rank i becomes part i of rank j. [size, ...] in and out; gradients take the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: Tensor, group: Any) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _AddUp(torch.autograd.Function):
    """A sum over ranks whose gradient stays on each rank."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def check_ranks(size: int, num_ranks: int, name: str = "train.sequence_parallel_size") -> None:
    """Raise unless ranks divide into groups of this size. name: the setting that it comes from."""
    if num_ranks % size:
        raise UserError(
            f"{name} is {size}, and {quantity(num_ranks, 'rank')} cannot be divided into groups of that size:"
            f" set it to {divisors(num_ranks)}, or change the number of ranks"
        )


def check_heads(size: int, model_config: Any) -> None:
    """Raise unless the layers of a model can run on the ranks of a sequence group: its heads divide over them."""
    if size > 1 and model_config.get_text_config().model_type in DELTA_FAMILIES:
        raise UnsupportedError(
            f"train.sequence_parallel_size is {size}, and the model has layers with linear attention, whose sequences"
            " are not cut over ranks: set it to 1"
        )
    num_heads = getattr(model_config.get_text_config(), "num_attention_heads", None)
    if num_heads is not None and num_heads % size:
        raise UserError(
            f"train.sequence_parallel_size is {size}, and the model's {num_heads} attention heads do not divide over"
            f" {size} ranks: set it to {divisors(num_heads)}"
        )


def divisors(number: int) -> str:
    """Name the divisors of a number: `1, 2 or 4`."""
    sizes = [str(size) for size in range(1, number + 1) if number % size == 0]
    return sizes[0] if len(sizes) == 1 else f"{', '.join(sizes[:-1])} or {sizes[-1]}"
