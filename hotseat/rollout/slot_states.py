"""Linear attention over slots: a state for each slot and layer, and the last inputs of the convolution in front of it.

A forward that passes `STATES` runs the layers so; any other one runs them as transformers does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from hotseat.algorithms.delta_rule import (
    CHUNK,
    Heads,
    at_least_fp32,
    delta_nets,
    gated_output,
    gates,
    heads,
    over_chunks,
    step,
)

STATES = "hotseat_states"  # keyword argument that carries `DecodeStep` or `Rows` from the model's forward to its layers


def use_states(model: nn.Module) -> list[Any]:
    """Let layers with linear attention take `STATES`; return them."""
    nets = delta_nets(model)
    for net in nets:
        net.forward = MethodType(_forward, net)
    return nets


def _forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    work: DecodeStep | Rows | None = kwargs.get(STATES)
    output: Tensor = (
        type(self).forward(self, hidden_states, **kwargs) if work is None else work.run(self, hidden_states)
    )
    return output


@dataclass
class DecodeStep:
    """One token for each of the first slots, whose states change in place."""

    # By layer: inputs of the convolution [slots, num_before, channels], and the state of each head [slots, heads,
    # key_dim, value_dim].
    states: dict[int, tuple[Tensor, ...]]

    def run(self, layer: Any, hidden: Tensor) -> Tensor:
        """Compute a layer: [rows, 1, hidden] in and out."""
        rows = hidden[:, 0]
        inputs, state = (states[: len(rows)] for states in self.states[layer.layer_idx])
        seen = torch.cat([inputs, layer.in_proj_qkv(rows)[:, None]], dim=1)
        inputs.copy_(seen[:, 1:])
        read = step(heads(layer, convolved(layer, seen)[:, 0], *gates(layer, rows)), state)
        return gated_output(layer, read, rows)[:, None]


@dataclass
class Rows:
    """Rows of tokens, padded on the right, and the states behind the last token of each."""

    lengths: Tensor  # [rows]: of the tokens that states are of
    states: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # by layer, when it has run

    def run(self, layer: Any, hidden: Tensor) -> Tensor:
        """Compute a layer: [rows, length, hidden] in and out."""
        num_before = layer.conv_kernel_size - 1
        seen = functional.pad(layer.in_proj_qkv(hidden), (0, 0, num_before, 0))
        read, state = over_rows(layer, seen, *gates(layer, hidden), self.lengths)
        last = self.lengths[:, None] + torch.arange(num_before, device=hidden.device)  # in `seen`
        self.states[layer.layer_idx] = seen.take_along_dim(last[..., None], dim=1), state
        return gated_output(layer, read, hidden)

    def of_row(self, row: int) -> tuple[Tensor, ...]:
        """Return the states of a row in all layers, each kind with its own memory: [layers, ...]."""
        return tuple(torch.stack([each[row] for each in kind]) for kind in zip(*self.states.values(), strict=True))


def over_rows(
    layer: Any, seen: Tensor, decay: Tensor, beta: Tensor, lengths: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve and apply the rule to rows of tokens: what they read [rows, length, heads, value_dim], and the states.

    seen: [rows, num_before + length, channels]. decay and beta: [rows, length, heads]. lengths: [rows], the tokens that
    states are of. state: the states in front of the rows; zeros without it.
    """
    num_rows, length = decay.shape[:2]
    is_token = torch.arange(length, device=seen.device) < lengths[:, None]
    decay, beta = (torch.where(is_token[..., None], gate, 0.0) for gate in (decay, beta))
    size = min(CHUNK, length)
    num_chunks = -(-length // size)

    def cut(tensor: Tensor) -> Tensor:
        """Cut rows into chunks, the first ones of all rows first: [rows, length, ...] -> [chunks, size, ...]."""
        filled = functional.pad(tensor, (*[0, 0] * (tensor.ndim - 2), 0, num_chunks * size - length))
        return filled.unflatten(1, (num_chunks, size)).transpose(0, 1).flatten(0, 1)

    tokens = heads(layer, convolved(layer, seen), decay, beta)
    read, state = over_chunks(Heads(*map(cut, tokens)), [num_rows] * num_chunks, state)
    return read.unflatten(0, (num_chunks, num_rows)).transpose(0, 1).flatten(1, 2)[:, :length], state


def convolved(layer: Any, seen: Tensor) -> Tensor:
    """Convolve tokens with those in front of them: [rows, num_before + length, channels] -> [rows, length, channels].

    A product per element, so that a row's bits do not depend on other rows; rounded where transformers rounds.
    """
    kernel = at_least_fp32(layer.conv1d.weight[:, 0])  # [channels, num_before + 1]
    length = seen.shape[1] - kernel.shape[1] + 1
    wide = at_least_fp32(seen)
    total = wide[:, :length] * kernel[:, 0]
    for back in range(1, kernel.shape[1]):
        total = total + wide[:, back : back + length] * kernel[:, back]
    activated: Tensor = ACT2FN[layer.activation](total.to(seen.dtype))
    return activated


def by_layer(nets: Sequence[Any], kinds: Sequence[Tensor]) -> dict[int, tuple[Tensor, ...]]:
    """Return the states of each layer, from [layers, slots, ...] of each kind."""
    return {net.layer_idx: tuple(kind[index] for kind in kinds) for index, net in enumerate(nets)}
