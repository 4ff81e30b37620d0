"""A tiny vision-language-action model for the table-top of MuJoCo Warp, and what its script did."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

IMAGE = "<image>"
INIT = 0.1  # transformers' 0.02 is for wide models
SCRIPT_SEED = 2_000_000  # the first of seeds that no run learns from or is evaluated on


def write_policy(folder: Path, *, bins: int, pixels: int, patch: int, width: int, layers: int, seed: int = 0) -> None:
    """Write a LLaVA with random weights: `layers` in its visual encoder and its language model each."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = _tokenizer(bins)
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
    images = SiglipImageProcessorPil(do_resize=False, size={"height": pixels, "width": pixels})
    LlavaProcessor(
        images, tokenizer, patch_size=patch, vision_feature_select_strategy="full", image_token=IMAGE
    ).save_pretrained(folder)


def _tokenizer(bins: int) -> Any:
    """Return a tokenizer with a token per word of the instructions; the last ones are the bins of actions."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from hotseat.envs.families.mujoco_warp import INSTRUCTIONS

    words = ["<pad>", "<end>", "<unknown>", IMAGE, *dict.fromkeys(" ".join(INSTRUCTIONS.values()).split())]
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


def write_script_rows(
    file: Path, tasks: list[str], *, num_episodes: int, chunk: int, bins: int, pixels: int, max_steps: int
) -> tuple[int, float]:
    """Write a row for each chunk of the script; return their number, and the share of its episodes that succeed.

    The script's actions are those of the middles of bins, as the policy's are.
    """
    from hotseat.envs.families.mujoco_warp import make_worlds

    num_worlds = min(num_episodes, 256)
    worlds = make_worlds(tasks, max_steps, num_worlds, observe="image", pixels=pixels)
    rows, num_success = [], 0
    for first in range(0, num_episodes, num_worlds):
        acting = list(range(min(num_worlds, num_episodes - first)))
        seen: dict[int, Any] = dict(
            zip(
                acting,
                worlds.reset(
                    acting, [(first + at) % len(tasks) for at in acting], [SCRIPT_SEED + first + at for at in acting]
                ),
                strict=True,
            )
        )
        while acting:
            begun = {at: seen[at] for at in acting}
            taken: dict[int, list[int]] = {at: [] for at in acting}
            for _ in range(chunk):
                moving = list(acting)
                if not moving:
                    break
                indexes = np.clip(np.floor((worlds.expert(moving) + 1) / 2 * bins), 0, bins - 1).astype(int)
                for at, index in zip(moving, indexes, strict=True):
                    taken[at] += index.tolist()
                steps = worlds.step(moving, ((indexes + 0.5) / bins * 2 - 1)[:, None])
                for at, step in zip(moving, steps, strict=True):
                    if isinstance(step, Exception):
                        raise step
                    seen[at] = step.seen
                    if step.terminated or step.truncated:
                        acting.remove(at)
                        num_success += bool(step.success)
            for at, view in begun.items():
                bins_of = taken[at] + taken[at][-2:] * (chunk - len(taken[at]) // 2)  # after the end: never carried out
                words = " ".join(_bin(index) for index in bins_of)
                row = {"input": f"{IMAGE} {view.instruction}", "images": [_png(view.image)], "output": f" {words}"}
                rows.append(json.dumps(row))
    file.write_text("\n".join(rows) + "\n")
    return len(rows), num_success / num_episodes


def _png(image: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
