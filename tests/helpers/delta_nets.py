"""Qwen3.5's linear attention, written out token by token, and models that have it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} | {
    "shared_expert_intermediate_size": 16
}


def tiny(seed: int = 0, **settings: Any) -> Any:
    """A model with two layers of linear attention around one of attention, of which nothing is at its first value."""
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(**SIZES | settings)
    return randomized(transformers.Qwen3_5ForCausalLM(config))


def tiny_mixture(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return randomized(transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**SIZES | EXPERTS)))


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.rand_like(weight) * 4 - 3)  # decays from 0.3 to almost 1: states live long
            elif weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what each token of one sequence reads, and the last state: [length, heads, ...] each."""
    state = value.new_zeros(key.shape[1], key.shape[2], value.shape[2])
    reads = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - seen))
        reads.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(reads), state


def one_sequence(layer: Any, channels: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Convolution and rule over one sequence, token by token: [length, channels] -> [length, heads, value_dim]."""
    kernel = layer.conv1d.weight[:, 0]  # [channels, 4]
    rows = []
    for position in range(len(channels)):
        total = torch.zeros_like(channels[0])
        for back in range(kernel.shape[1]):
            if position - back >= 0:
                total = total + kernel[:, -1 - back] * channels[position - back]
        rows.append(total * torch.sigmoid(total))
    query, key, value = torch.stack(rows).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=1)
    query, key = (each.view(len(channels), layer.num_k_heads, layer.head_k_dim) for each in (query, key))
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    copies = torch.arange(layer.num_v_heads) * layer.num_k_heads // layer.num_v_heads
    value = value.view(len(channels), layer.num_v_heads, layer.head_v_dim)
    return recurrence(query[:, copies] / layer.head_k_dim**0.5, key[:, copies], value, decay, beta)[0]
