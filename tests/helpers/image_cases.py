"""Tiny random models that see images, of each family, with processors made from their classes; no hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from hotseat.vision import TOKENS

_LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789 ?.:\n<>|_-=+,!"]
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
_QWEN_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}"
    + _QWEN_PROMPT
    + "{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "idefics3", "llava")
PLACE = {
    "qwen2_5_vl": _QWEN_PROMPT,
    "qwen3_vl": _QWEN_PROMPT,
    "idefics3": "<image>",
    "llava": "<image>",
    "smolvlm": "<image>",  # whose processor needs a package: num2words
}


def save(family: str, folder: Path, *, seed: int = 0, hidden_size: int = 32) -> str:
    """Write a random model of a family, its tokenizer and its processor to a folder; return the folder."""
    torch.manual_seed(seed)
    model, processor = _MAKERS[family](hidden_size)
    with torch.no_grad():
        for weight in model.parameters():  # larger than at first, so that pixels matter to what is sampled
            if weight.ndim > 1:
                weight.mul_(3.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def drawn(seed: int, width: int = 56, height: int = 42) -> Image.Image:
    """Draw noise, the same for the same seed."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def tokenizer_with(special: tuple[str, ...], *, adds_beginning: bool = False) -> Any:
    """Make a tokenizer of characters. adds_beginning: it writes `<bos>` in front of a text, unless told not to."""
    words = ["[UNK]", "<pad>", "<eos>", *_LETTERS]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="[UNK]"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if adds_beginning:
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
        )
    return tokenizer


def _text(tokenizer: Any, hidden_size: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }


def _without_videos(kind: Any, *parts: Any, **settings: Any) -> Any:
    only = {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])}
    return type(kind.__name__, (kind,), only)(*parts, **settings)


def _qwen(kind: str, hidden_size: int) -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tokenizer_with(_QWEN)
    tokenizer.chat_template = CHAT
    names = {
        "vision_start_token_id": _QWEN[0],
        "vision_end_token_id": _QWEN[1],
        "image_token_id": _QWEN[2],
        "video_token_id": _QWEN[3],
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    quarter = hidden_size // 4  # of a head's angles
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    rope["mrope_section"] = [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3]
    if kind == "qwen3_vl":
        rope["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text = _text(tokenizer, hidden_size, rope_parameters=rope, head_dim=hidden_size // 2)
        config: Any = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        model: Any = transformers.Qwen3VLForConditionalGeneration(config)
        processor: Any = transformers.Qwen3VLProcessor
    else:
        vision |= {"window_size": 28, "fullatt_block_indexes": [1]}
        text = _text(tokenizer, hidden_size, rope_parameters=rope)
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        processor = transformers.Qwen2_5_VLProcessor
    images = Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=14 * 14 * 64)
    return model, _without_videos(processor, images, tokenizer)


def _idefics(kind: str, hidden_size: int) -> tuple[Any, Any]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    is_smol = kind == "smolvlm"
    rows = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
    special = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *rows)
    tokenizer = tokenizer_with(special)
    config = (transformers.SmolVLMConfig if is_smol else transformers.Idefics3Config)(
        text_config=_text(tokenizer, hidden_size, model_type="llama"),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    sizes: dict[str, Any] = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    if is_smol:
        images: Any = SmolVLMImageProcessorPil(**sizes)
        made = _without_videos(transformers.SmolVLMProcessor, images, tokenizer, video_processor=None, image_seq_len=4)
        return transformers.SmolVLMForConditionalGeneration(config), made
    images = Idefics3ImageProcessorPil(**sizes)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
    return transformers.Idefics3ForConditionalGeneration(config), processor


def _llava(hidden_size: int) -> tuple[Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tokenizer_with(("<image>",), adds_beginning=True)
    config = transformers.LlavaConfig(
        text_config=_text(tokenizer, hidden_size, model_type="llama"),
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "projection_dim": 32,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return transformers.LlavaForConditionalGeneration(config), processor


_MAKERS = {
    "qwen2_5_vl": lambda hidden_size: _qwen("qwen2_5_vl", hidden_size),
    "qwen3_vl": lambda hidden_size: _qwen("qwen3_vl", hidden_size),
    "idefics3": lambda hidden_size: _idefics("idefics3", hidden_size),
    "smolvlm": lambda hidden_size: _idefics("smolvlm", hidden_size),
    "llava": _llava,
}


def write_pixels(folder: Path, seed: int, rows: int = 4, columns: int = 4) -> str:
    """Write a prepared image for the Qwen models above, of so many patches, and return its path."""
    from safetensors.torch import save

    pixels = torch.randn(rows * columns, 3 * 2 * 7 * 7, generator=torch.Generator().manual_seed(seed))
    tensors = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}
    path = folder / f"{seed}-{rows}-{columns}.safetensors"
    temporary = folder / f"{seed}-{rows}-{columns}.{os.getpid()}"
    image_id = tokenizer_with(_QWEN).convert_tokens_to_ids("<|image_pad|>")
    temporary.write_bytes(save(tensors, {TOKENS: json.dumps([image_id] * (rows * columns // 4))}))
    temporary.replace(path)
    return str(path)


def make(family: str, seed: int = 0) -> Any:
    """Make a random model of a family."""
    torch.manual_seed(seed)
    return _MAKERS[family](32)[0]


def make_value(family: str, seed: int = 0) -> Any:
    """Make a random value model of a family."""
    from hotseat.vision import value_class

    torch.manual_seed(seed)
    config = _MAKERS[family](32)[0].config
    config.num_labels = 1
    return value_class(config).from_config(config)
