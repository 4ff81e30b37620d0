"""Packed attention against one dense block-diagonal mask over all tokens, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from hotseat.errors import UnsupportedError
from hotseat.train.attention import BLOCKS, Blocks, causal_attention, gather


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [7], [1, 9, 2, 8, 1, 5], [3, 0, 6]])
def test_blocks_equal_a_block_diagonal_mask(lengths: list[int], window: int | None) -> None:
    num_tokens, heads, key_heads, size = sum(lengths), 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, num_tokens, size, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads, key_heads, key_heads)
    )
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    blocks = Blocks.of(torch.tensor(lengths), offsets, device=None, has_flash=False)
    found, _ = causal_attention(
        nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, **{BLOCKS: blocks}
    )

    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    behind = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    mask = (segment[:, None] == segment) & (behind >= 0) & (behind < (window or num_tokens))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    upstream = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(found, [query, key, value], upstream)
    theirs = torch.autograd.grad(expected.transpose(1, 2), [query, key, value], upstream)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact)


def test_segments_that_share_their_first_tokens_equal_whole_ones() -> None:
    # Three segments; the second and third begin with the first two tokens of the first.
    token = torch.tensor([0, 1, 2, 0, 1, 3, 4, 5, 0, 1, 6])
    lengths, offsets = torch.tensor([3, 5, 3]), torch.tensor([0, 3, 8, 11])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, 7, 8, generator=generator, dtype=torch.float64).requires_grad_() for count in (4, 2, 2)
    )
    shared = Blocks.of(lengths, offsets, token, device=None, has_flash=False)
    found, _ = causal_attention(nn.Identity(), query, key, value, None, **{BLOCKS: shared})
    whole = Blocks.of(lengths, offsets, device=None, has_flash=False)
    copies = [tensor[:, :, token] for tensor in (query, key, value)]
    expanded, _ = causal_attention(nn.Identity(), *copies, None, **{BLOCKS: whole})
    torch.testing.assert_close(found[:, token], expanded)
    # Each token of the shared one counts once; so does one of its copies.
    upstream = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    first = [int((token == index).nonzero()[0]) for index in range(7)]
    of_copies = torch.zeros_like(expanded)
    of_copies[:, first] = upstream
    ours = torch.autograd.grad(found, [query, key, value], upstream)
    theirs = torch.autograd.grad(expanded, [query, key, value], of_copies)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact)


def test_gradients_of_16_bit_copies_are_added_in_32_bits() -> None:
    values = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.tensor([[256.0], *[[1.0]] * 16], dtype=torch.bfloat16)
    [found] = torch.autograd.grad(gather(values, torch.zeros(17, dtype=torch.int64)), values, upstream)
    assert found.item() == 272  # one by one in 16 bits, 256 + 1 stays 256


def test_short_segments_do_not_pay_for_a_long_one() -> None:
    lengths = torch.tensor([100, *[4] * 50])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    blocks = Blocks.of(lengths, offsets, device=None, has_flash=False)
    assert [(num_segments, length) for _, num_segments, length in blocks.rows] == [(1, 100), (50, 4)]


@pytest.mark.parametrize("extra", [{"position_bias": torch.zeros(4)}, {"dropout": 0.1}])
def test_attention_that_we_do_not_have_is_refused(extra: dict[str, object]) -> None:
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(UnsupportedError, match=f"Identity asks for attention with {next(iter(extra))}"):
        causal_attention(nn.Identity(), query, query, query, None, **extra)  # type: ignore[arg-type]


def test_sinks_are_not_cut_over_ranks() -> None:
    query = torch.zeros(1, 4, 3, 8)
    blocks = Blocks(None, 3, slice=object())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="Identity has attention sinks, and sequences over several ranks"):
        causal_attention(nn.Identity(), query, query, query, None, s_aux=torch.zeros(4), **{BLOCKS: blocks})


def test_capped_scores_and_sinks_are_as_defined() -> None:
    """One query over two keys: scores 2 and 1, capped to 1.5, a sink of 0.5."""
    query, key = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[2.0], [1.0]]]])
    value = torch.tensor([[[[3.0], [5.0]]]])
    out, _ = causal_attention(
        nn.Identity(), query, key, value, None, scaling=1.0, softcap=1.5, s_aux=torch.tensor([0.5])
    )
    first, second = (1.5 * math.tanh(score / 1.5) for score in (2.0, 1.0))
    total = math.exp(first) + math.exp(second) + math.exp(0.5)
    expected = (3 * math.exp(first) + 5 * math.exp(second)) / total
    assert float(out[0, 1, 0, 0]) == pytest.approx(expected, rel=1e-6)
    # The first token sees itself, with a score of 0, and the sink.
    assert float(out[0, 0, 0, 0]) == pytest.approx(3 / (1 + math.exp(0.5)), rel=1e-6)
