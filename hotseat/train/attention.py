"""Causal attention that stays inside the segments of a packed micro-batch.

`causal_attention` is what the models of transformers call for every layer, registered with them under `ATTENTION`. With
16-bit floats on a CUDA device packed tokens go through `torch.nn.attention.varlen`. Elsewhere the block-diagonal
attention is computed block by block: segments of like length are gathered into rows, so that it costs the sum of the
blocks and not the square of all tokens. Padded rows need neither: the padding is on the right, where no token looks.

Where segments share their first tokens, each segment gathers a copy of them: the rest of the model, which is most of
the work, sees them once.

`image_attention` is for visual encoders that pack images, or windows of them, into one row: patches see all of theirs.

Scores that are capped (Gemma 2) or compete with a sink (gpt-oss) are computed as they are defined, a chunk of queries
at a time: no kernel of torch has them.

`recorded_attention` records what layers ask for, to compare it with the masks that transformers makes for them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.sym_node import DynamicInt
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hotseat.algorithms.delta_rule import CHUNK
from hotseat.errors import UnsupportedError
from hotseat.train.sequence import Slice
from hotseat.types import to_device

ATTENTION = "hotseat"
IMAGE_ATTENTION = "hotseat_flash"  # encoders pass where images begin if the name has "flash" in it, else they loop
BLOCKS = "hotseat_blocks"  # the keyword argument that carries `Blocks` from the model's forward to its layers

# Segments down to this share of the longest are gathered into the same rows; shorter ones get rows of their own.
_LIKE_LENGTH = 0.7

# Older versions of torch take grouped-query heads as they are, newer ones need a flag.
_ASKS_FOR_GROUPING = "enable_gqa" in inspect.signature(varlen_attn).parameters


# Elements of one chunk of scores where they are computed as they are defined, in float32 4 bytes each.
_CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class Scores:
    """Changes that a layer makes to its scores, between queries times keys and values."""

    scale: float | None  # None: 1 / sqrt(head_size)
    window: int | None = None  # a token sees so many, itself included; None: all before it
    cap: float | None = None  # cap · tanh(score / cap)
    sinks: Tensor | None = None  # [num_heads]: one more score to divide by, whose value is nothing

    @property
    def are_plain(self) -> bool:
        """Tell whether torch has kernels for such scores."""
        return self.cap is None and self.sinks is None


@dataclass(frozen=True)
class Chunks:
    """The segments of packed tokens, as layers that carry a state from token to token need them.

    Each segment is cut into chunks of `length` tokens, the last of which may be cut short. The first chunks of all
    segments come first, then the second ones of those that have one, and so on.
    """

    rows: Tensor  # [chunks, num_before + length]: the rows of tokens, num_rows where there is none
    counts: tuple[int, ...]  # segments with a first chunk, with a second, ...
    length: int
    places: Tensor  # [num_rows]: where each row stands in [chunks * length]

    @staticmethod
    def of(lengths: Tensor, offsets: Tensor, token: Tensor, num_before: int, device: torch.device | None) -> Chunks:
        """Cut segments with these lengths and offsets.

        token [sum of lengths]: the row of each place of each segment. num_before: the tokens of its segment in front
        of a chunk that are listed with it.
        """
        # No longer than the longest segment asks for, by powers of two.
        length = min(CHUNK, 1 << max(3, (int(lengths.max()) - 1).bit_length()))
        num_chunks = (lengths + length - 1) // length
        order = torch.argsort(num_chunks, descending=True, stable=True)
        counts = [int((num_chunks > step).sum()) for step in range(int(num_chunks.max()))]
        segment = torch.cat([order[:count] for count in counts])
        first = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)) * length
        position = first[:, None] + torch.arange(-num_before, length)
        is_token = (position >= 0) & (position < lengths[segment, None])
        num_rows = int(token.max()) + 1
        rows = torch.full(position.shape, num_rows)
        rows[is_token] = token[(offsets[segment, None] + position)[is_token]]
        own, places = rows[:, num_before:].flatten(), torch.empty(num_rows, dtype=torch.int64)
        filled = (own < num_rows).nonzero()[:, 0]
        _set_rows(places, own[filled], filled)
        return Chunks(to_device(rows, device), tuple(counts), length, to_device(places, device))


@dataclass(frozen=True)
class Blocks:
    """The segments of packed tokens, as attention needs them."""

    offsets: Tensor | None  # [num_segments + 1] int32 on the device, for varlen attention; None elsewhere
    longest: int
    rows: tuple[tuple[Tensor, int, int], ...] = ()  # per group: tokens [segments * length], segments, length
    places: Tensor | None = None  # [num_tokens]: where each token stands in what was gathered, one group after another
    copies: Tensor | None = None  # [sum of lengths]: for varlen attention, the tokens to gather; None: all as they are
    slice: Slice | None = None  # which of the tokens this rank has; None: all of them
    chunks: Chunks | None = None  # for layers that carry a state

    @staticmethod
    def of(
        lengths: Tensor,
        offsets: Tensor,
        token: Tensor | None = None,
        *,
        device: torch.device | None,
        has_flash: bool,
        num_before: int | None = None,
    ) -> Blocks:
        """Make the blocks of segments with these lengths and offsets.

        token [sum of lengths]: the token at each place of each segment, where segments share tokens; None: no two do.
        num_before: see `Chunks`; None: no layer carries a state.
        """
        longest = DynamicInt(int(lengths.max()))  # to the compiler a number that changes, not a constant
        if token is None:
            token, is_shared = torch.arange(int(offsets[-1])), False
        else:
            is_shared = True
        chunks = None if num_before is None else Chunks.of(lengths, offsets, token, num_before, device)
        places = torch.empty(int(token.max()) + 1, dtype=torch.int64)
        if has_flash:
            starts = to_device(offsets.to(torch.int32), device)
            if not is_shared:
                return Blocks(starts, longest, chunks=chunks)
            _set_rows(places, token, torch.arange(len(token)))
            return Blocks(starts, longest, (), to_device(places, device), to_device(token, device), chunks=chunks)
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
        return Blocks(None, longest, tuple(rows), to_device(places, device), chunks=chunks)


def _set_rows(target: Tensor, index: Tensor, values: Tensor) -> None:
    """Set target[index] = values. Of several values for one index the last is taken, on every device."""
    last = torch.full_like(target, -1).scatter_reduce_(0, index, torch.arange(len(index)), "amax")
    is_set = last >= 0
    target[is_set] = values[last[is_set]]


class Gather(torch.autograd.Function):
    """`index_select` of rows, some of them several times, whose gradients are added up in fp32.

    torch would round to 16 bits after each addition.
    """

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
    """Return values[index], by rows."""
    return Gather.apply(values, index) if values.element_size() < 4 else values.index_select(0, index)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether packed attention of this type runs through the varlen kernel on the device."""
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend: query [batch, num_heads, length, head_size], key and value with fewer heads -> [batch, length, ...]."""
    if dropout or kwargs.get("position_bias") is not None:
        raise UnsupportedError(
            f"{type(module).__name__} asks for attention with {'dropout' if dropout else 'position_bias'}, which"
            " training does not have: choose a model with plain causal attention"
        )
    scores = Scores(scaling, sliding_window, softcap, s_aux)
    if _records:
        _records[-1].calls.append((attention_mask, scores))
    blocks: Blocks | None = kwargs.get(BLOCKS)
    if blocks is None:
        out = _rows(query, key, value, scores)
    elif blocks.slice is not None:
        if s_aux is not None:
            raise UnsupportedError(
                f"{type(module).__name__} has attention sinks, and sequences over several ranks give each rank a part"
                " of the heads, without their sinks: set train.sequence_parallel_size to 1"
            )
        out = blocks.slice.attend(functools.partial(_packed, blocks=blocks, scores=scores), query, key, value)
    else:
        out = _packed(query, key, value, blocks, scores)
    return out, None


def _packed(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scores: Scores) -> Tensor:
    if blocks.offsets is not None:
        return _varlen(query, key, value, blocks, blocks.offsets, scores)
    return _gathered(query, key, value, blocks, scores)


def _rows(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attend within rows, one segment each: [rows, heads, length, head_size] -> [rows, length, heads, head_size]."""
    if not scores.are_plain:
        return _defined(query, key, value, scores)
    length = query.shape[2]
    mask = None
    if scores.window is not None and length > scores.window:
        mask = _is_seen(torch.arange(length, device=query.device), length, scores.window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    ).transpose(1, 2)


def _is_seen(queries: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Tell which keys each query sees: [num_queries] positions -> [num_queries, num_keys]."""
    behind = queries[:, None] - torch.arange(num_keys, device=queries.device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


@torch.compiler.disable  # each number of chunks would be another graph
def _defined(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attend over rows, as `_rows` does, from the scores themselves. Forward and backward hold one chunk of them."""
    rows, heads, length, _ = query.shape
    limit = _CHUNK_ELEMENTS.get(query.device.type, 2**27)
    size = max(1, limit // max(1, rows * heads * length))
    parts = []
    for start in range(0, length, size):
        chunk = query[:, :, start : start + size]
        last = start + chunk.shape[2]  # nothing in the chunk sees what comes after
        arguments = (chunk, key[:, :, :last], value[:, :, :last], start, scores)
        # Computed again by the backward, also where there is one chunk: every layer would keep its scores.
        has_gradient = torch.is_grad_enabled()
        parts.append(checkpoint(_attend, *arguments, use_reentrant=False) if has_gradient else _attend(*arguments))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, start: int, scores: Scores) -> Tensor:
    """Attend with the queries from position `start` on."""
    copies = query.shape[1] // key.shape[1]
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    logits = (query @ key.transpose(-1, -2)).float() * scale
    if scores.cap is not None:
        logits = scores.cap * torch.tanh(logits / scores.cap)
    positions = torch.arange(start, start + query.shape[2], device=query.device)
    logits = logits.masked_fill(~_is_seen(positions, key.shape[2], scores.window), -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    shares = logits.softmax(-1)[..., : key.shape[2]]
    return shares.to(value.dtype) @ value


@torch.compiler.disable  # each number of groups would be another graph
def _gathered(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scores: Scores) -> Tensor:
    flat = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]  # [num_tokens, heads, head_size]
    outputs = []
    for tokens, num_segments, length in blocks.rows:
        rows = [gather(tensor, tokens).unflatten(0, (num_segments, length)).transpose(1, 2) for tensor in flat]
        outputs.append(_rows(rows[0], rows[1], rows[2], scores).flatten(0, 1))
    return torch.cat(outputs).index_select(0, blocks.places).unsqueeze(0)


def _varlen(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, offsets: Tensor, scores: Scores) -> Tensor:
    assert scores.are_plain, "blocks for varlen attention, and scores that it does not have"
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
        scale=scores.scale,
        window_size=(-1 if scores.window is None else scores.window - 1, 0),
        **extra,
    )
    return (out if blocks.places is None else out.index_select(0, blocks.places)).unsqueeze(0)


AttentionInterface.register(ATTENTION, causal_attention)


@torch.compiler.disable  # each number of images would be another graph
def image_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each image, or window: [1, num_heads, num_patches, head_size] -> [1, num_patches, ...].

    cu_seq_lens_q: where each begins, and the end of the last. max_length_q: patches of the largest.
    """
    if has_flash(query.device, query.dtype):
        flat = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        offsets = cu_seq_lens_q.to(torch.int32)
        out = varlen_attn(*flat, offsets, offsets, max_length_q, max_length_q, scale=scaling, window_size=(-1, -1))
        return out.unsqueeze(0), None
    lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([scaled_dot_product_attention(*part, scale=scaling) for part in parts], dim=2).transpose(
        1, 2
    ), None


AttentionInterface.register(IMAGE_ATTENTION, image_attention)


# --- what layers ask for, against the masks of transformers -----------------------------------------------------------

# (batch, head, query, key), indices -> whether the query sees the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class AttentionRecord:
    """The attention of one forward: the mask that transformers made for each call, and the scores asked for."""

    masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)
    calls: list[tuple[Tensor | None, Scores]] = field(default_factory=list)

    @property
    def are_plain(self) -> bool:
        return all(scores.are_plain for _, scores in self.calls)

    def is_as_masked(self, num_positions: int) -> bool:
        """Tell whether every call attends to the keys that its mask shows, from the last position."""
        position = torch.tensor(num_positions - 1)
        keys, zero = torch.arange(num_positions), torch.tensor(0)
        for mask, scores in self.calls:
            shows = next((shows for made, shows in self.masks if made is mask), None)
            if shows is None:
                continue  # the model made a mask of its own: only its outputs show whether attention is right
            seen = _is_seen(position[None], num_positions, scores.window)[0]
            if not torch.equal(shows(zero, zero, position, keys).expand(num_positions), seen):
                return False
        return True


_records: list[AttentionRecord] = []


@contextmanager
def recorded_attention() -> Iterator[AttentionRecord]:
    """Record the attention of the forwards inside. No other forward makes masks: `causal_attention` needs none."""
    record = AttentionRecord()

    def make(*, mask_function: MaskFunction, **_: Any) -> Tensor:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        record.masks.append((mask, mask_function))
        return mask

    AttentionMaskInterface.register(ATTENTION, make)
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)
        AttentionMaskInterface._global_mapping.pop(ATTENTION)
