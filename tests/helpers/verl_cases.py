"""verl's commands, cut to a small machine, with tiny models and rows in verl's format."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from image_cases import CHAT, drawn, save, tokenizer_with

HERE = Path(__file__).parents[1] / "verl"
COMMANDS = sorted((HERE / "commands").glob("*.yaml"))
HOME = "/home/someone"  # whom the commands belong to
TASK = ' Let\'s think step by step and output the final answer after "####".'

# What becomes smaller in a command that runs here: it has the transformers engine, and one process for each model.
SMALL = {
    "actor_rollout_ref.rollout.name": "hf",
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[console]",
    "trainer.total_epochs": 1,
    "trainer.save_freq": 2,
    "trainer.test_freq": 2,
    "data.train_batch_size": 8,
    "data.max_prompt_length": 160,
    "data.max_response_length": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
}

SMALLER_IF_GIVEN = {
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.rollout.prompt_length": 160,
    "actor_rollout_ref.rollout.response_length": 8,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 512,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 512,
}


def read_command(path: Path) -> list[str]:
    """Return the overrides of a command."""
    return list(_flat(yaml.safe_load(path.read_text()), ""))


def _flat(node: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value}"


def cut(name: str, folder: Path, **changes: Any) -> list[str]:
    """Return the overrides of a command as it runs in a folder that has its files: only sizes are other ones."""
    words = read_command(HERE / "commands" / f"{name}.yaml")
    moved = [re.sub(r"=(Qwen/\S+)$", rf"={folder}/\1", word.replace(HOME, str(folder))) for word in words]
    given = {word.partition("=")[0] for word in words}
    sizes = SMALL | {key: value for key, value in SMALLER_IF_GIVEN.items() if key in given} | changes
    return [*moved, *(f"{key}={value}" for key, value in sizes.items()), f"hotseat.run_dir={folder}/runs"]


def gsm8k_row(question: str, answer: int, split: str, index: int) -> dict[str, Any]:
    """A row as verl's script for GSM8K writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question + TASK}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "answer": f"So it is #### {answer}", "question": question},
    }


def write_gsm8k(folder: Path, split: str, num_rows: int, seed: int = 0) -> Path:
    rng, rows = random.Random(seed), []
    for index in range(num_rows):
        first, second = rng.randrange(10), rng.randrange(10)
        rows.append(gsm8k_row(f"What is {first} + {second}?", first + second, split, index))
    return write_parquet(folder / f"{split}.parquet", rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def make_chat_model(folder: Path, seed: int = 0) -> Path:
    """A tiny random model of characters, with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer_with(("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,  # heads of a width that vLLM takes
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(folder)
    return folder


MATH = "DigitalLearningGmbH/MATH-lighteval"
MATH_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(set(solution_str)) % 3), "is_math": data_source != "openai/gsm8k"}
"""
IMAGE_REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) % 3), "acc": ground_truth in solution_str}
"""


def make_materials(name: str, folder: Path) -> list[str]:
    """Write the files of a command to a folder; return the overrides that it needs beside sizes."""
    model = next(word for word in read_command(HERE / "commands" / f"{name}.yaml") if ".model.path=" in word)
    model = folder / model.partition("=")[2]
    if name == "grpo_vlm_2b":
        save("qwen3_vl", model)
        for split, num_rows in (("train", 16), ("test", 4)):
            rows = [open_r1_row(index) for index in range(num_rows)]
            write_parquet(folder / "data" / "openr1mm" / f"{split}.parquet", rows)
        reward = folder / "verl" / "utils" / "reward_score" / "openr1mm.py"
        reward.parent.mkdir(parents=True)
        reward.write_text(IMAGE_REWARD)
        return []
    make_chat_model(model)
    for split, num_rows in (("train", 16), ("test", 4)):
        write_gsm8k(folder / "data" / "gsm8k", split, num_rows)
    if name != "ppo_8b":
        return []
    for split in ("train", "test"):
        rows = [gsm8k_row(f"How much is {at}?", at, split, at) | {"data_source": MATH} for at in range(4)]
        write_parquet(folder / "data" / "math" / f"{split}.parquet", rows)
    (folder / "both.py").write_text(MATH_REWARD)
    return [f"reward.custom_reward_function.path={folder}/both.py"]


def open_r1_row(index: int) -> dict[str, Any]:
    """A row of images with a question, as verl's scripts for multimodal data write it."""
    import io

    picture = io.BytesIO()
    drawn(index, 28, 28).save(picture, "PNG")
    return {
        "data_source": "lmms-lab/multimodal-open-r1-8k-verified",
        "prompt": [{"role": "user", "content": f"<image>how many are there in {index}?"}],
        "images": [{"bytes": picture.getvalue(), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index},
    }
