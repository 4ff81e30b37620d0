"""The kernel of `torch.nn.attention.varlen` for CPU tensors, slow and plain, to test what surrounds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _probs(query: Tensor, key: Tensor, scale: float, is_causal: bool) -> Tensor:
    """[heads, length, head_size] each -> [heads, length, length]."""
    length = query.shape[1]
    scores = scale * query @ key.transpose(1, 2)
    if not is_causal:
        return scores.softmax(-1)
    return scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def _segments(offsets: Tensor, *tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """[heads, length, head_size] of each segment, with as many heads as the first of `tensors`."""
    for start, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        part = slice(start, end)
        yield (
            part,
            [
                tensor[part].transpose(0, 1).repeat_interleave(tensors[0].shape[1] // tensor.shape[1], 0)
                for tensor in tensors
            ],
        )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert max_q == max_k == int(cu_seq_q.diff().max())
    out = torch.empty_like(query)
    for part, (q, k, v) in _segments(cu_seq_q, query, key, value):
        out[part] = (_probs(q, k, scale or query.shape[-1] ** -0.5, is_causal) @ v).transpose(0, 1)
    return out, query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = scale or query.shape[-1] ** -0.5
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (query, key, value))
    for part, (q, k, v, grad) in _segments(cu_seq_q, query, key, value, grad_out):
        probs = _probs(q, k, factor, is_causal)
        grad_probs = grad @ v.transpose(1, 2)
        grad_scores = factor * probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True))
        dq[part] = (grad_scores @ k).transpose(0, 1)
        # Query heads that share a key head stand next to each other.
        for out_of, found in ((dk, grad_scores.transpose(1, 2) @ q), (dv, probs.transpose(1, 2) @ grad)):
            out_of[part] = found.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
    return dq, dk, dv


varlen._varlen_attn.register_kernel("cpu")(_forward)
varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
