"""Models of known shapes, with random weights."""

from __future__ import annotations

from typing import Any

VOCAB_SIZES = {"tiny": 512, "1.5B": 151_936, "8B": 128_256}


def shape(model: str, eos_token_id: int) -> Any:
    """Return a Llama's config: Qwen2.5-1.5B's shape without biases, Llama-3-8B's, or one for trying out on a CPU."""
    from transformers import LlamaConfig

    sizes: dict[str, dict[str, Any]] = {
        "tiny": {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        "1.5B": {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        "8B": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    }
    return LlamaConfig(
        vocab_size=VOCAB_SIZES[model],
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=0,
        **sizes[model],
    )


def make_weights(config: Any, device: str) -> Any:
    """Return a causal language model in bf16 whose weights were drawn on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    return model.to(torch.bfloat16)
