"""Logits from hidden states: the head of a language model.

A 16-bit product rounds its results to 16 bits, and bfloat16 numbers between 16 and 32 are 0.125 apart. That rounding
makes about two fifths of the squared error of SmolLM2-135M's log-probs; the layers make the rest
(bench/log_prob_error.py). The product sums in float32 anyway, so float32 results cost only their bytes. The inputs,
hidden states and weights, stay 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

HALVES = (torch.bfloat16, torch.float16)
# Rows of the weight converted at a time where a product cannot have results of another type: they stay in the cache.
_BLOCK = 1024


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute hidden · weightᵀ + bias with float32 results for 16-bit inputs; for others as `linear` does.

    hidden [num_rows, hidden_size], weight [vocab_size, hidden_size], bias [vocab_size] -> [num_rows, vocab_size]. With
    16-bit inputs it is for callers that do not need its gradient, or compute it themselves.
    """
    if hidden.dtype not in HALVES:
        return functional.linear(hidden, weight, bias)
    if hidden.device.type == "cuda":
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        # The inputs are exact in float32. Block by block this is faster than the 16-bit product of a CPU without
        # instructions for it, and no copy of the weight exists.
        wide = hidden.float()
        logits = wide.new_empty(hidden.shape[0], weight.shape[0])
        for block, out in zip(weight.split(_BLOCK), logits.split(_BLOCK, dim=1), strict=True):
            torch.mm(wide, block.float().t(), out=out)
    return logits if bias is None else logits.add_(bias)
