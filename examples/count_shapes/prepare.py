"""Drawn images, questions about them, and a small random Qwen2.5-VL with tokenizer and processor.

python examples/count_shapes/prepare.py build/count_shapes --seed 0

An image shows one to four discs of any colour and size. `questions.jsonl` and `held_out.jsonl` have their number as
label, for RL and for evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CELL = 14  # pixels that become one token: two by two patches of 7
NUM_CELLS = 2  # in each direction
MOST = 4  # discs
SPREAD = 0.04  # of random weights; with 0.02, the usual one, pixels hardly change the answers at first
QUESTION = "<|vision_start|><|image_pad|><|vision_end|>how many?"
_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def draw(count: int, rng: random.Random) -> Image.Image:
    """Draw so many discs, each in a cell of its own."""
    size = CELL * NUM_CELLS
    image = Image.new("RGB", (size, size), tuple(rng.randrange(40) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    for cell in rng.sample(range(NUM_CELLS**2), count):
        radius = rng.uniform(3.5, 6)
        x, y = (CELL * at + CELL / 2 + rng.uniform(-1, 1) for at in divmod(cell, NUM_CELLS))
        colour = tuple(rng.randrange(120, 256) for _ in range(3))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return image


def write_rows(folder: Path, name: str, num_rows: int, rng: random.Random) -> None:
    (folder / "drawn").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num_rows):
        count = rng.randint(1, MOST)
        path = f"drawn/{name}-{number}.png"
        draw(count, rng).save(folder / path)
        rows.append({"input": QUESTION, "images": [path], "label": str(count)})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer() -> Any:
    words = ["[UNK]", "<pad>", "<eos>", *"0123456789 abcdefghijklmnopqrstuvwxyz?"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="[UNK]")
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    return tokenizer


def save_model(folder: Path, *, width: int = 64, num_layers: int = 2) -> None:
    """Write a random model, its tokenizer and its processor."""
    tokenizer = make_tokenizer()
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL)
    angles = width // 8  # of a head: a third for each dimension
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": SPREAD,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [angles - 2 * (angles // 3), angles // 3, angles // 3],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": 4,
            "out_hidden_size": width,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 2 * CELL,
            "fullatt_block_indexes": [1],
            "initializer_range": SPREAD,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        patch_size=CELL // 2, merge_size=2, min_pixels=CELL**2, max_pixels=(CELL * NUM_CELLS) ** 2
    )
    images_alone(Qwen2_5_VLProcessor)(images, tokenizer).save_pretrained(folder)


def images_alone(kind: Any) -> Any:
    """Return a processor's class without the part for videos, which would need torchvision."""
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])})


def make_files(folder: Path, seed: int, *, num_questions: int = 768, num_held_out: int = 100) -> None:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder, "questions", num_questions, rng)
    write_rows(folder, "held_out", num_held_out, rng)
    torch.manual_seed(seed)
    save_model(folder / "base_model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_files(options.directory, options.seed)
