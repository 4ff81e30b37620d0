"""The demo's task, sums of two numbers, for examples and first tries.

make_files        writes a model, SFT examples, prompts, held-out prompts and a reward file into a folder
make_model        writes an untrained model and its tokenizer
question, answer  a sum as a prompt, and its right answer; `careless` forgets the carries

The task is two-digit sums. Three quarters of the examples forget the carry; the reward compares with the right answer.
So the model after SFT has the format and a systematic error, which RL then removes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat.observe.noise import without_deepspeeds_greeting

__all__ = ["answer", "careless", "make_files", "make_model", "question"]

CARELESS = 0.75  # share of examples that forget the carry
NUM_EVAL = 200
NUM_EXAMPLES = 25_600

REWARD = '''\
"""1 for the right sum, 0 for anything else."""


def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):].removesuffix("<eos>") for query, prompt in zip(queries, prompts)]
    return [1.0 if answer == label else 0.0 for answer, label in zip(answers, labels)]
'''


@dataclass(frozen=True)
class DemoFiles:
    """Paths of the demo's files."""

    model: Path
    examples: Path
    prompts: Path
    held_out: Path
    reward: Path


def make_files(directory: Path, seed: int, *, num_layers: int = 2, width: int = 192) -> DemoFiles:
    """Write the task, and a model of some shape. The same seed writes the same bytes."""
    files = DemoFiles(
        model=directory / "base_model",
        examples=directory / "examples.jsonl",
        prompts=directory / "prompts.jsonl",
        held_out=directory / "held_out.jsonl",
        reward=directory / "reward.py",
    )
    directory.mkdir(parents=True, exist_ok=True)
    make_model(files.model, seed, num_layers=num_layers, width=width)
    rng = random.Random(seed)
    sums = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(sums)
    held_out, rest = sums[:NUM_EVAL], sums[NUM_EVAL:]
    _write(files.prompts, ({"input": question(a, b), "label": answer(a, b)} for a, b in rest))
    _write(files.held_out, ({"input": question(a, b), "label": answer(a, b)} for a, b in held_out))
    chosen = (rng.choice(rest) for _ in range(NUM_EXAMPLES))
    _write(
        files.examples,
        (
            {"input": question(a, b), "output": careless(a, b) if rng.random() < CARELESS else answer(a, b)}
            for a, b in chosen
        ),
    )
    files.reward.write_text(REWARD)
    return files


def question(a: int, b: int) -> str:
    """Return a sum as a prompt: `07+35=`."""
    return f"{a:02d}+{b:02d}="


def answer(a: int, b: int) -> str:
    """Return the right answer, in three digits."""
    return f"{a + b:03d}"


def careless(a: int, b: int) -> str:
    """Add each column by itself, without any carry."""
    return f"0{(a // 10 + b // 10) % 10}{(a + b) % 10}"


def make_tokenizer() -> Any:
    """Make a tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(path: Path, seed: int, *, num_layers: int = 2, width: int = 192) -> None:
    """Write an untrained Llama and its tokenizer into a folder. The same seed writes the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            initializer_range=0.06,  # the usual 0.02 is for wide models: narrow ones learn late with it
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with without_deepspeeds_greeting():
        model.save_pretrained(path)


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
