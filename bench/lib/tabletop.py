"""A tiny vision-language-action model for the table-top of MuJoCo Warp, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

IMAGE = "<image>"
WORDS = "reach the red puck blue push onto green disc"  # of the instructions
INIT = 0.1  # transformers' 0.02 is for wide models


def write_policy(folder: Path, *, bins: int, pixels: int, patch: int, width: int, layers: int, seed: int = 0) -> None:
    """Write a LLaVA with random weights: `layers` in its visual encoder and its language model each."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    processor = make_processor(bins, pixels, patch)
    tokenizer = processor.tokenizer
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "initializer_range": INIT,
    }
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config={
            **shape,
            "model_type": "siglip_vision_model",
            "image_size": pixels,
            "patch_size": patch,
            "vision_use_head": False,
        },
        text_config={
            **shape,
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(pixels // patch) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        initializer_range=INIT,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def make_processor(bins: int, pixels: int, patch: int) -> Any:
    """Return a processor that takes pictures of this size as they are, with the tokenizer of the instructions."""
    from transformers import LlavaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(do_resize=False, size={"height": pixels, "width": pixels})
    return LlavaProcessor(
        images, _tokenizer(bins), patch_size=patch, vision_feature_select_strategy="full", image_token=IMAGE
    )


def _tokenizer(bins: int) -> Any:
    """Return a tokenizer with a token per word of the instructions; the last ones are the bins of actions."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "<unknown>", IMAGE, *WORDS.split()]
    words += [_bin(index) for index in reversed(range(bins))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unknown>",
        additional_special_tokens=[IMAGE],
    )


def _bin(index: int) -> str:
    return f"<bin-{index}>"
