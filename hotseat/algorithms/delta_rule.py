"""The gated delta rule: linear attention with a state per head, [key_dim, value_dim], in place of keys and values.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024): a token decays the state S, corrects what its key reads
there towards its value, and reads with its query,

    S_t = exp(g_t) S_{t-1} + k_t u_tᵀ        u_t = β_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)        o_t = S_tᵀ q_t

with keys and queries of length 1, queries then scaled by key_dim^-½. `step` does that for one token of many sequences;
`over_chunks` for whole sequences. Unrolled over a chunk that begins with S, with G_t the sum of its g up to t,

    u_t + β_t Σ_{j<t} exp(G_t - G_j) (k_t · k_j) u_j = β_t v_t - β_t exp(G_t) Sᵀ k_t

is a triangular system that does not contain S but on its right side: its inverse is computed for all chunks at once,
and only products with S go chunk after chunk. A token with g = 0 and β = 0 leaves the state as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 64  # tokens; a power of two
_EPSILON = 1e-6  # in the length of keys and queries
# Layers of transformers that are this rule behind a convolution: all have the same weights and sizes.
_LAYERS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
DELTA_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")  # the model types with these layers


class Heads(NamedTuple):
    """Inputs of the rule for each token: keys, queries and values of each head, the log of the decay g, and β."""

    query: Tensor  # [..., heads, key_dim]
    key: Tensor  # [..., heads, key_dim]
    value: Tensor  # [..., heads, value_dim]
    decay: Tensor  # [..., heads], at most 0
    beta: Tensor  # [..., heads]


def delta_nets(model: nn.Module) -> list[Any]:
    """List the layers of a model that are the gated delta rule, also where a wrapper made subclasses of theirs."""
    return [module for module in model.modules() if any(kind.__name__ in _LAYERS for kind in type(module).__mro__)]


def gates(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Compute decay and β of each token from the hidden states in front of a layer: [..., hidden] -> [..., heads]."""
    return decay_and_beta(layer, layer.in_proj_a(hidden), layer.in_proj_b(hidden))


def decay_and_beta(layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute decay and β from what a layer projects for them: [..., heads] each."""
    rate = functional.softplus(at_least_fp32(a) + layer.dt_bias)
    return -at_least_fp32(layer.A_log).exp() * rate, at_least_fp32(b.sigmoid())


def heads(layer: Any, convolved: Tensor, decay: Tensor, beta: Tensor) -> Heads:
    """Cut what comes out of a layer's convolution, [..., channels], into heads."""
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    query, key, value = at_least_fp32(convolved).split(sizes, dim=-1)
    query, key = (tensor.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)) for tensor in (query, key))
    query = _of_length_one(query) * layer.head_k_dim**-0.5
    copies = layer.num_v_heads // layer.num_k_heads
    query, key = (tensor.repeat_interleave(copies, -2) for tensor in (query, _of_length_one(key)))
    return Heads(query, key, value.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)), decay, beta)


def gated_output(layer: Any, read: Tensor, hidden: Tensor) -> Tensor:
    """Compute a layer's output from what was read: [..., heads, value_dim], [..., hidden] -> [..., hidden]."""
    gate = layer.in_proj_z(hidden).view(-1, layer.head_v_dim)
    normed = layer.norm(read.to(hidden.dtype).reshape(-1, layer.head_v_dim), gate)
    output: Tensor = layer.out_proj(normed.view(*hidden.shape[:-1], -1))
    return output


def over_chunks(tokens: Heads, counts: Sequence[int], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply the rule to sequences that are cut into chunks: [chunks, length, ...] each.

    The first chunks of all sequences come first, then the second ones of those that have one, in the same order, and
    so on: `counts` says how many there are each time. Returns what the queries read, [chunks, length, heads,
    value_dim], and the last state of every sequence, [sequences, heads, key_dim, value_dim]. state: the first ones in
    the same form; zeros without it.
    """
    query, key, value, decay, beta = (tensor.transpose(1, 2) for tensor in tokens)  # [chunks, heads, length, ...]
    length, key_dim = key.shape[-2:]
    total = decay.cumsum(-1)
    is_later = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(is_later, -torch.inf).exp()  # [.., to, from]
    decayed = total.exp()[..., None]
    corrected = key * beta[..., None]
    system = corrected @ key.transpose(-1, -2) * between  # its diagonal is taken for ones
    sides = torch.cat([corrected * decayed, value * beta[..., None]], dim=-1)
    solved: Tensor = _UnitInverse.apply(system) @ sides
    to_end = key * between[..., -1, :, None]
    at_end = decayed[..., -1:, :]

    if state is None:
        state = value.new_zeros(counts[0] if counts else 0, key.shape[1], key_dim, value.shape[-1])
    befores, updates, ended = [], [], []
    each = (tensor.split(list(counts)) for tensor in (*solved.split([key_dim, value.shape[-1]], -1), to_end, at_end))
    for keys, values, weights, share in zip(*each, strict=True):
        if len(keys) < len(state):
            ended.append(state[len(keys) :])
            state = state[: len(keys)]
        update = values - keys @ state
        befores.append(state)
        updates.append(update)
        state = state * share + weights.transpose(-1, -2) @ update
    read = (query * decayed) @ torch.cat(befores) + (query @ key.transpose(-1, -2) * between) @ torch.cat(updates)
    return read.transpose(1, 2), torch.cat([state, *reversed(ended)])


class _UnitInverse(torch.autograd.Function):
    """The inverse of triangular matrices, [..., length, length], whose diagonal is taken for ones and upper half for 0.

    By products of blocks alone: a GPU solves many small systems slowly. Blocks of 8 by the finite series of their
    powers, whose largest entries still are small; larger ones by [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]].
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        inverse = _unit_inverse(system)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (inverse,) = ctx.saved_tensors
        grad: Tensor = -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)
        return grad


def _unit_inverse(system: Tensor) -> Tensor:
    num_rows = system.shape[-1]
    length = 1 << (num_rows - 1).bit_length()
    if num_rows < length:
        system = functional.pad(system, (0, length - num_rows, 0, length - num_rows))
    size = min(8, length)

    def blocks(size: int, row: int, column: int, stride: int) -> Tensor:
        """Return blocks of `size` at (row, column), (row + stride, column + stride), ...: [..., blocks, size, size]."""
        of_rows = system[..., row:, column:]
        batch, (high, wide) = of_rows.stride()[:-2], of_rows.stride()[-2:]
        shape = (*system.shape[:-2], length // stride, size, size)
        return of_rows.as_strided(shape, (*batch, stride * (high + wide), high, wide))

    power = blocks(size, 0, 0, size).tril(-1)
    inverse = torch.eye(size, dtype=system.dtype, device=system.device) - power
    for _ in range(size.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    while size < length:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ blocks(size, size, 0, 2 * size) @ first)
        above = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([above, torch.cat([corner, second], dim=-1)], dim=-2)
        size *= 2
    return inverse[..., 0, :num_rows, :num_rows]


def step(tokens: Heads, state: Tensor) -> Tensor:
    """Apply the rule to one token of each row, and change the state in place.

    [rows, heads, ...] each, state [rows, heads, key_dim, value_dim] -> [rows, heads, value_dim].
    """
    query, key, value, decay, beta = tokens
    state *= decay.exp()[..., None, None]
    update = (value - (key[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state += key[..., None] * update[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :]


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor


def _of_length_one(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + _EPSILON)
