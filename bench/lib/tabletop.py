"""A tiny vision-language-action model for the table-top of MuJoCo Warp, and what its script did."""

from __future__ import annotations

import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

IMAGE = "<image>"
WORDS = "reach the red puck blue push onto green disc"  # of the instructions
INIT = 0.1  # transformers' 0.02 is for wide models
NUM_ROWS = 3  # of each view of the script's episodes
SCRIPT_SEED = 2_000_000  # the first of seeds that no run learns from or is evaluated on


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


def write_script_rows(
    file: Path,
    tasks: list[str],
    *,
    num_rows: int,
    chunk: int,
    bins: int,
    pixels: int,
    max_steps: int,
    shares: dict[str, float],
    seed: int = 0,
) -> float:
    """Write decisions to imitate, three for each view; return how many views were made in a second.

    shares: of each kind of task, how many of the decisions are the script's; the others are random. A policy that
    imitates all of them has learned to see, but seldom succeeds. Episodes leave the script's path: every third decision
    is carried out at random. The script's actions are those of the middles of bins, as the policy's are.
    """
    from hotseat.envs.families.mujoco_warp import make_worlds

    num_worlds = min(num_rows // NUM_ROWS, 256)
    worlds = make_worlds(tasks, max_steps, num_worlds, observe="image", pixels=pixels)
    random = np.random.default_rng(SCRIPT_SEED + seed)
    rows: list[str] = []
    next_seed = SCRIPT_SEED + 1_000_000 * seed
    everywhere = list(range(num_worlds))
    kinds = [tasks[at % len(tasks)].split("-")[0] for at in everywhere]
    began_s = time.perf_counter()
    while len(rows) < num_rows:
        seeds = [next_seed + at for at in everywhere]
        next_seed += num_worlds
        seen = list(worlds.reset(everywhere, [at % len(tasks) for at in everywhere], seeds))
        acting = everywhere
        while acting and len(rows) < num_rows:
            begun = {at: seen[at] for at in acting}
            is_script = dict(zip(acting, random.random(len(acting)) < 2 / 3, strict=True))
            taken: dict[int, list[int]] = {at: [] for at in acting}
            for _ in range(chunk):
                if not acting:
                    break
                advice = np.clip(np.floor((worlds.expert(acting) + 1) / 2 * bins), 0, bins - 1)
                chosen = np.array([is_script[at] for at in acting])[:, None]
                indexes = np.where(chosen, advice, random.integers(bins, size=advice.shape)).astype(int)
                for at, index in zip(acting, indexes, strict=True):
                    taken[at] += index.tolist()
                steps = worlds.step(acting, ((indexes + 0.5) / bins * 2 - 1)[:, None])
                going = []
                for at, step in zip(acting, steps, strict=True):
                    if isinstance(step, Exception):
                        raise step
                    seen[at] = step.seen
                    if not (step.terminated or step.truncated):
                        going.append(at)
                acting = going
            for at, view in begun.items():
                if not is_script[at]:
                    continue
                missing = 2 * chunk - len(taken[at])  # after the end: never carried out
                advised = taken[at] + taken[at][-2:] * (missing // 2)
                image = _png(view.image)
                for share in random.random(NUM_ROWS):
                    decision = advised if share < shares[kinds[at]] else random.integers(bins, size=2 * chunk).tolist()
                    words = " ".join(_bin(index) for index in decision)
                    row = {"input": f"{IMAGE} {view.instruction}", "images": [image], "output": f" {words}"}
                    rows.append(json.dumps(row))
    worlds.close()
    random.shuffle(rows)
    file.write_text("\n".join(rows) + "\n")
    return len(rows) / NUM_ROWS / (time.perf_counter() - began_s)


def _png(image: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
