"""Causal attention that stays inside the segments of a packed micro-batch.

`causal_attention` is what the models of transformers call for every layer, registered with them under `ATTENTION`. With
16-bit floats on a CUDA device packed tokens go through `torch.nn.attention.varlen`. Elsewhere the block-diagonal
attention is computed block by block: segments of like length are gathered into rows, so that it costs the sum of the
blocks and not the square of all tokens. Padded rows need neither: the filling is on the right, where nothing looks.

Where segments share their first tokens, each segment gathers a copy of them: the rest of the model, which is most of
the work, sees them once.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.sym_node import DynamicInt
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from hotseat.errors import NotBuiltError
from hotseat.train.sequence import Slice
from hotseat.types import to_device

ATTENTION = "hotseat"
BLOCKS = "hotseat_blocks"  # the keyword argument that carries `Blocks` from the model's forward to its layers

# Segments down to this share of the longest are gathered into the same rows; shorter ones get rows of their own.
_LIKE_LENGTH = 0.7

# Older versions take grouped-query heads as they are, newer ones want to be told.
_ASKS_FOR_GROUPING = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True)
class Blocks:
    """How packed tokens fall into segments."""

    offsets: Tensor | None  # [num_segments + 1] int32 on the device, for varlen attention; None elsewhere
    longest: int
    rows: tuple[tuple[Tensor, int, int], ...] = ()  # per group: tokens [segments * length], segments, length
    places: Tensor | None = None  # [num_tokens]: where each token stands in what was gathered, one group after another
    copies: Tensor | None = None  # [sum of lengths]: for varlen attention, the tokens to gather; None: all as they are
    slice: Slice | None = None  # which of the tokens this rank has; None: all of them

    @staticmethod
    def of(
        lengths: Tensor,
        offsets: Tensor,
        token: Tensor | None = None,
        *,
        device: torch.device | None,
        has_flash: bool,
    ) -> Blocks:
        """`token` [sum of lengths] names the token at each place of each segment where segments share some."""
        longest = DynamicInt(int(lengths.max()))  # to the compiler a number that changes, not a constant
        if token is None:
            token, is_shared = torch.arange(int(offsets[-1])), False
        else:
            is_shared = True
        places = torch.empty(int(token.max()) + 1, dtype=torch.int64)
        if has_flash:
            starts = to_device(offsets.to(torch.int32), device)
            if not is_shared:
                return Blocks(starts, longest)
            _set_rows(places, token, torch.arange(len(token)))
            return Blocks(starts, longest, (), to_device(places, device), to_device(token, device))
        order = torch.argsort(lengths, descending=True, stable=True).tolist()
        sizes = lengths.tolist()
        groups: list[list[int]] = []
        for segment in order:
            if not groups or sizes[segment] < _LIKE_LENGTH * sizes[groups[-1][0]]:
                groups.append([])
            groups[-1].append(segment)
        rows = []
        start = 0
        for group in groups:
            length = sizes[group[0]]
            if length == 0:
                continue
            members = torch.tensor(sorted(group))
            step = torch.arange(length)
            # A row that is too long repeats its last token, whose result there is never read.
            tokens = offsets[members, None] + torch.minimum(step, (lengths[members] - 1).clamp(min=0)[:, None])
            is_token = step < lengths[members, None]
            _set_rows(places, token[tokens[is_token]], start + is_token.flatten().nonzero().squeeze(-1))
            rows.append((to_device(token[tokens.flatten()], device), len(group), length))
            start += tokens.numel()
        return Blocks(None, longest, tuple(rows), to_device(places, device))


def _set_rows(target: Tensor, index: Tensor, values: Tensor) -> None:
    """target[index] = values; of several values for one index any will do, and it is always the same one."""
    last = torch.full_like(target, -1).scatter_reduce_(0, index, torch.arange(len(index)), "amax")
    is_set = last >= 0
    target[is_set] = values[last[is_set]]


class Gather(torch.autograd.Function):
    """`index_select` of rows of which some are wanted several times. Their gradients are added in fp32, not rounded to
    16 bits after each addition."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = values.shape, values.dtype
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [index] = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, index, gradient.float()).to(ctx.dtype), None


def gather(values: Tensor, index: Tensor) -> Tensor:
    """values[index] by rows."""
    return Gather.apply(values, index) if values.element_size() < 4 else values.index_select(0, index)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed attention runs through the varlen kernel there."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [batch, num_heads, length, head_size], key and value with num_key_value_heads -> [batch, length, ...]."""
    extras = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if extras or dropout:
        raise NotBuiltError(
            f"{type(module).__name__} asks for attention with {', '.join(extras) or 'dropout'}, which training does not"
            " have: choose a model with plain causal attention"
        )
    blocks: Blocks | None = kwargs.get(BLOCKS)
    if blocks is None:
        out = _rows(query, key, value, scaling, sliding_window)
    elif blocks.slice is not None:
        packed = functools.partial(_packed, blocks=blocks, scale=scaling, window=sliding_window)
        out = blocks.slice.attend(packed, query, key, value)
    else:
        out = _packed(query, key, value, blocks, scaling, sliding_window)
    return out, None


def _packed(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float | None, window: int | None
) -> Tensor:
    if blocks.offsets is not None:
        return _varlen(query, key, value, blocks, blocks.offsets, scale, window)
    return _gathered(query, key, value, blocks, scale, window)


def _rows(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Every row is one segment: [rows, heads, length, head_size] -> [rows, length, heads, head_size]."""
    length = query.shape[2]
    mask = None
    if window is not None and length > window:
        step = torch.arange(length, device=query.device)
        behind = step[:, None] - step
        mask = (behind >= 0) & (behind < window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    ).transpose(1, 2)


@torch.compiler.disable  # each number of groups would be another graph
def _gathered(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float | None, window: int | None
) -> Tensor:
    flat = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]  # [num_tokens, heads, head_size]
    outputs = []
    for tokens, num_segments, length in blocks.rows:
        rows = [gather(tensor, tokens).unflatten(0, (num_segments, length)).transpose(1, 2) for tensor in flat]
        outputs.append(_rows(rows[0], rows[1], rows[2], scale, window).flatten(0, 1))
    return torch.cat(outputs).index_select(0, blocks.places).unsqueeze(0)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    offsets: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    flat = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    if blocks.copies is not None:
        flat = [gather(tensor, blocks.copies) for tensor in flat]
    is_grouped = query.shape[1] != key.shape[1]
    extra = {"enable_gqa": True} if is_grouped and _ASKS_FOR_GROUPING else {}
    out = varlen_attn(
        *flat,
        offsets,
        offsets,
        blocks.longest,
        blocks.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **extra,
    )
    return (out if blocks.places is None else out.index_select(0, blocks.places)).unsqueeze(0)


AttentionInterface.register(ATTENTION, causal_attention)
