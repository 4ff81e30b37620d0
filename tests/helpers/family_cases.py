"""Tiny random models of the families that people train: one shape each, with what is special about the family.

Windows are shorter than the sequences that the tests run, caps are low enough to bend logits, layers alternate as in
the real models, and every norm, bias and sink is random: a mistake with any of them shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 14  # of the demo's tokenizer: digits, + and =, pad and eos
WINDOW = 5

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Family:
    """A family as people call it, the class of its config in transformers, and a tiny shape of it."""

    name: str
    config: str
    special: str  # what a trainer or an engine may get wrong
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_in_transformers(self) -> bool:
        return hasattr(transformers, self.config)

    def make_config(self, **changes: Any) -> PreTrainedConfig:
        made: PreTrainedConfig = getattr(transformers, self.config)(**{**_SIZES, **self.settings, **changes})
        return made

    def make_model(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(self.make_config(**changes))
        with torch.no_grad():
            for weight in [*model.parameters(), *_corrections(model)]:
                if weight.dim() == 1:
                    weight.add_(torch.randn_like(weight) * 0.1)
        return model.eval()

    def write(self, directory: Path, seed: int = 0) -> Path:
        """Model and tokenizer, as files."""
        from hotseat.demo import make_tokenizer

        make_tokenizer().save_pretrained(directory)
        self.make_model(seed).save_pretrained(directory)
        return directory


def _corrections(model: PreTrainedModel) -> list[torch.Tensor]:
    """Buffers that checkpoints hold: what DeepSeek-V3 adds to the scores of its experts."""
    return [buffer for name, buffer in model.named_buffers() if name in model.state_dict()]


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

# In the order of how many people use them.
FAMILIES: tuple[Family, ...] = (
    Family("Qwen2.5", "Qwen2Config", "biases on queries, keys and values; tied embeddings", _TIED),
    Family(
        "Llama 3",
        "LlamaConfig",
        "stretched rotary frequencies",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    Family("Qwen3", "Qwen3Config", "norms of queries and keys"),
    Family(
        "Gemma 3",
        "Gemma3TextConfig",
        "windows in some layers, with another rotary base; norms around both halves; scaled embeddings",
        {
            **_TIED,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    Family("Mistral", "MistralConfig", "a window in every layer", {"sliding_window": WINDOW}),
    Family(
        "Gemma 2",
        "Gemma2Config",
        "capped attention scores and capped logits; windows in every other layer",
        {
            **_TIED,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Family("SmolLM3", "SmolLM3Config", "layers without positions", {**_TIED, "no_rope_layers": [1, 0]}),
    Family(
        "Phi-4",
        "Phi3Config",
        "q, k, v and gate, up stored as one; a part of each head rotated",
        {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64},
    ),
    Family("OLMo 2", "Olmo2Config", "norms after each half; norms over all queries and keys"),
    Family("GLM-4", "Glm4Config", "norms around both halves; half of each head rotated", {"attention_bias": True}),
    Family("Mixtral", "MixtralConfig", "experts; a window", {"num_local_experts": 4, "sliding_window": WINDOW}),
    Family("Qwen3-MoE", "Qwen3MoeConfig", "experts; norms of queries and keys", {**_MOE, "num_experts": 4}),
    Family(
        "gpt-oss",
        "GptOssConfig",
        "attention sinks; windows in every other layer; experts with biases",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Family(
        "DeepSeek-V3",
        "DeepseekV3Config",
        "latent attention, stretched; experts in groups, with a correction that no gradient trains",
        {
            **_MOE,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",  # read by vLLM, as scoring_func is
            "scoring_func": "sigmoid",
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 512,  # with the next the only size that vLLM has kernels for
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    Family(
        "DeepSeek-V2",
        "DeepseekV2Config",
        "latent attention whose queries are not; experts in groups, by softmax",
        {
            **_MOE,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 64,
        },
    ),
    Family(
        "Qwen3.5",
        "Qwen3_5TextConfig",
        "linear attention in most layers; gated attention; a part of each head rotated",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
