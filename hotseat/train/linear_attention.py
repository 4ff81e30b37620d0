"""Linear attention and its convolution inside the segments of a packed micro-batch.

The layers of transformers carry their state over the ends of segments. Here each segment is cut into chunks of up to
64 tokens (`Chunks`), whose states are computed side by side: only the chunks of one segment wait for each other, and
only the last of them is padded. In front of each chunk stand the tokens that the convolution sees from it.

Where segments share their first tokens, each gathers a copy of them, as attention does. Padded rows need none of this:
they go through the layers as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from hotseat.algorithms.delta_rule import delta_nets, gated_output, gates, heads, over_chunks
from hotseat.train.attention import BLOCKS, Blocks, Chunks, gather


def num_seen(model: nn.Module) -> int | None:
    """Count the tokens in front of one that the convolutions of linear attention see; None: there is none."""
    return max((net.conv_kernel_size - 1 for net in delta_nets(model)), default=None)


def use_own_linear_attention(layers: Sequence[nn.Module]) -> None:
    """Let linear attention in these layers keep packed segments apart."""
    for layer in layers:
        for net in delta_nets(layer):
            net.keeps_little = not getattr(layer, "gradient_checkpointing", False)
            net.forward = MethodType(_forward, net)


def _forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    blocks: Blocks | None = kwargs.get(BLOCKS)
    if blocks is None:
        output: Tensor = type(self).forward(self, hidden_states, **kwargs)
        return output
    assert blocks.chunks is not None, "packed tokens for linear attention, which were not cut into chunks"
    rows = hidden_states[0]  # [num_rows, hidden]
    read = _over_segments(self, self.in_proj_qkv(rows), *gates(self, rows), blocks.chunks)
    return gated_output(self, read, rows)[None]


@torch.compiler.disable  # each number of chunks would be another graph
def _over_segments(layer: Any, channels: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Convolve and apply the rule: [num_rows, channels], [num_rows, heads] -> [num_rows, heads, value_dim]."""
    num_before = chunks.rows.shape[1] - chunks.length
    seen = _gathered(channels, chunks.rows).transpose(1, 2)  # [chunks, channels, num_before + length]
    # It pads both ends with as many zeros as it sees tokens.
    convolved = layer.conv1d(seen)[..., num_before : num_before + chunks.length]
    own = chunks.rows[:, num_before:]
    arguments = (layer, convolved.transpose(1, 2), _gathered(decay, own), _gathered(beta, own), chunks.counts)
    # Computed again by the backward, where the layer is not: it would keep as much as all its other parts.
    keeps_little = torch.is_grad_enabled() and layer.keeps_little
    read = checkpoint(_rule, *arguments, use_reentrant=False) if keeps_little else _rule(*arguments)
    return read.to(channels.dtype).flatten(0, 1).index_select(0, chunks.places)


def _rule(layer: Any, convolved: Tensor, decay: Tensor, beta: Tensor, counts: tuple[int, ...]) -> Tensor:
    return over_chunks(heads(layer, ACT2FN[layer.activation](convolved), decay, beta), counts)[0]


def _gathered(values: Tensor, rows: Tensor) -> Tensor:
    """Return values[rows], zeros for the row after the last: [num_rows, size], [a, b] -> [a, b, size]."""
    return gather(functional.pad(values, (0, 0, 0, 1)), rows.flatten()).unflatten(0, rows.shape)
