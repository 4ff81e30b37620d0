"""Tokens per second of SFT against TRL's SFTTrainer: same examples, weights and precision, fp32 master weights.

A model of Qwen2.5-1.5B's shape with random weights, computed in bf16; prompts of 64 tokens and answers of 64 to 447,
64 examples an optimizer step, no checkpointing, the loss over answers alone. TRL's best number of examples per
micro-batch counts; it pads, since its packing and padding-free batches want flash-attn.

    python bench/sft_vs_trl.py                       every case, one after another, each in its own process
    python bench/sft_vs_trl.py --only hotseat trl-16 some; results stay in --directory, and all of them are printed
    python bench/sft_vs_trl.py --model tiny          a tiny shape in fp32, the default without a GPU
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.devices import has_gpu
from lib.offline_vs_trl import Comparison, main, make_trl_trainer

ROWS_PER_STEP, PROMPT_LENGTH, ANSWER_LENGTHS = 64, 64, (64, 447)
CONFIG = f"""
task: sft
name: {{name}}
run_dir: {{directory}}/runs
actor:
  model: {{directory}}/{{model}}
  optimizer: {{{{learning_rate: 1e-6, schedule: constant, betas: [0.9, 0.999]}}}}
data: {{{{path: {{directory}}/{{model}}/rows.jsonl, input_key: prompt, output_key: completion, max_length: 512}}}}
train: {{{{batch_size: {ROWS_PER_STEP}, dtype: {"bf16" if has_gpu() else "fp32"}}}}}
log: {{{{every: 1}}}}
checkpoint: {{{{keep_final: false}}}}
"""


def make_example(rng: random.Random, text: Callable[[int], str]) -> dict[str, str]:
    return {"prompt": text(PROMPT_LENGTH), "completion": " " + text(rng.randint(*ANSWER_LENGTHS))}


def count_tokens(row: dict[str, str]) -> int:
    return PROMPT_LENGTH + len(row["completion"].split()) + 1


def make_trainer(model: Path, output: Path, rows: int) -> Any:
    from trl import SFTConfig, SFTTrainer

    return make_trl_trainer(SFTTrainer, SFTConfig, model, output, rows, ROWS_PER_STEP, "float32")


if __name__ == "__main__":
    cases = ("hotseat", "trl-64", "trl-32", "trl-16")
    main(Comparison(__doc__, CONFIG, ROWS_PER_STEP, make_example, count_tokens, make_trainer, cases, target=1.5))
