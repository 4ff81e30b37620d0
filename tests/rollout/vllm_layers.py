"""Layers of one tensor-parallel rank as vLLM would make them, without the processes of the others.

In a module of their own: vLLM takes seconds to import, and most test runs do without it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

HEAD = 4  # width of a head


class Qkv(QKVParallelLinear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, heads: int, kv_heads: int, rank: int, size: int):
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.tp_rank, self.tp_size = rank, size
        self.head_size = self.v_head_size = HEAD
        self.total_num_heads, self.total_num_kv_heads = heads, kv_heads
        self.num_heads, self.num_kv_heads = heads // size, max(1, kv_heads // size)
        self.num_kv_head_replicas = max(1, size // kv_heads)


class GateUp(MergedColumnParallelLinear):
    def __init__(self, weight: torch.Tensor, sizes: list[int], rank: int, size: int):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight)
        self.output_sizes, self.tp_rank, self.tp_size = sizes, rank, size


class Down(RowParallelLinear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, rank: int, size: int):
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.tp_rank, self.tp_size = rank, size


class Experts(RoutedExperts):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, rank: int, size: int, **moe_config: Any):
        nn.Module.__init__(self)
        self.w13_weight, self.w2_weight = nn.Parameter(gate_up), nn.Parameter(down)
        parallel = SimpleNamespace(tp_rank=rank, tp_size=size)
        self.moe_config = SimpleNamespace(**{"moe_parallel_config": parallel, "has_bias": False} | moe_config)


class Head(VocabParallelEmbedding):
    def __init__(self, weight: torch.Tensor):
        nn.Module.__init__(self)
        self.weight, self.quant_method = nn.Parameter(weight), UnquantizedEmbeddingMethod()


class Logits(LogitsProcessor):
    """As those of vLLM 0.25: no type for the head, and a gather of what all ranks have."""

    def __init__(self, vocab_size: int, others: list[torch.Tensor] | None):
        nn.Module.__init__(self)
        self.org_vocab_size, self.others = vocab_size, others
        self.scale, self.soft_cap, self.logits_as_input = 1.0, None, False

    def _gather_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        return None if self.others is None else torch.cat([logits, *self.others], dim=-1)

    def forward(self, lm_head: Any, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self._get_logits(hidden_states, lm_head, None)


class Column(ColumnParallelLinear):
    def __init__(self, weight: torch.Tensor, rank: int, size: int):
        nn.Module.__init__(self)
        self.weight, self.quant_method = nn.Parameter(weight, requires_grad=False), None
        self.tp_rank, self.tp_size = rank, size


class Latent(MLAAttention):
    """Heads with 3 keys and 2 values of latent vectors, as one rank has them, ready to decode."""

    def __init__(self, kv_b_proj: Column, backend: str = "CPU_MLA"):
        nn.Module.__init__(self)
        self.kv_b_proj = kv_b_proj
        self.qk_nope_head_dim, self.v_head_dim = 3, 2
        rows, self.kv_lora_rank = kv_b_proj.weight.shape
        self.num_heads = rows // 5
        self.impl = SimpleNamespace(process_weights_after_loading=lambda dtype: None)
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.is_amx_bmm_enabled = self.dcp_q_replicate = self.is_aiter_triton_fp4_bmm_enabled = False
        self.is_aiter_triton_fp8_bmm_enabled, self.quant_config, self.layer_name = False, None, ""
        set_default_quant_scales(self, register_buffer=True)
        self.process_weights_after_loading(kv_b_proj.weight.dtype)
