"""A task whose model is so small that what a run takes is the loop's: prompts are sums of the demo's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from hotseat.demo import answer, make_tokenizer, question
from lib.shapes import dimensions


def make_sums(directory: Path, num_prompts: int, max_length: int, reward: str) -> None:
    """Write a model of one layer for sequences up to a length, prompts, and the text of a reward function."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer().save_pretrained(directory / "model")
    config = LlamaConfig(
        vocab_size=16,
        **dimensions(16, 16, 1, 1, 1),
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    sums = [(index // 100 % 100, index % 100) for index in range(num_prompts)]
    rows = [{"input": question(a, b), "label": answer(a, b)} for a, b in sums]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(reward)
