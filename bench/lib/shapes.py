"""Models of known shapes, with random weights."""

from __future__ import annotations

from typing import Any

VOCAB_SIZES = {"tiny": 512, "1.5B": 151_936, "8B": 128_256}


def dimensions(hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int) -> dict[str, int]:
    """Return the dimensions of a model as its config names them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


def shape(model: str, eos_token_id: int) -> Any:
    """Return a Llama's config: Qwen2.5-1.5B's shape without biases, Llama-3-8B's, or one for trying out on a CPU."""
    from transformers import LlamaConfig

    sizes = {
        "tiny": dimensions(128, 384, 4, 4, 4),
        "1.5B": dimensions(1536, 8960, 28, 12, 2),
        "8B": dimensions(4096, 14336, 32, 32, 8),
    }
    return LlamaConfig(
        vocab_size=VOCAB_SIZES[model],
        max_position_embeddings=4096,
        tie_word_embeddings=model != "8B",
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
