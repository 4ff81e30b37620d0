"""Tokens per second of DPO against TRL's DPOTrainer: same pairs, weights and precision, the reference scored live.

A model of Qwen2.5-1.5B's shape with random weights in pure bf16; pairs of a prompt of 64 tokens and two answers of 64
to 447, 32 pairs an optimizer step, no checkpointing. TRL's best number of pairs per micro-batch counts.

    python bench/dpo_vs_trl.py                      every case, one after another, each in its own process
    python bench/dpo_vs_trl.py --only hotseat trl-8 some; results stay in --directory, and all of them are printed
    python bench/dpo_vs_trl.py --model tiny         a tiny shape in fp32, the default without a GPU
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.devices import has_gpu
from lib.offline_vs_trl import Comparison, main, make_trl_trainer

PAIRS_PER_STEP, PROMPT_LENGTH, ANSWER_LENGTHS = 32, 64, (64, 447)
PRECISION = "dtype: bf16, fp32_master: false" if has_gpu() else "dtype: fp32"
CONFIG = f"""
task: dpo
name: {{name}}
run_dir: {{directory}}/runs
cluster: {{{{component_placement: {{{{actor: 0, reference: 0}}}}}}}}
actor:
  model: {{directory}}/{{model}}
  optimizer: {{{{learning_rate: 1e-6, schedule: constant, betas: [0.9, 0.999]}}}}
data: {{{{path: {{directory}}/{{model}}/rows.jsonl, prompt_key: prompt, max_length: 512}}}}
algorithm: {{{{dpo: {{{{beta: 0.1}}}}}}}}
train: {{{{{PRECISION}, batch_size: {PAIRS_PER_STEP}, micro_batch_size: 16}}}}
log: {{{{every: 1}}}}
checkpoint: {{{{keep_final: false}}}}
"""


def make_pair(rng: random.Random, text: Callable[[int], str]) -> dict[str, str]:
    return {
        "prompt": text(PROMPT_LENGTH),
        "chosen": " " + text(rng.randint(*ANSWER_LENGTHS)),
        "rejected": " " + text(rng.randint(*ANSWER_LENGTHS)),
    }


def count_tokens(row: dict[str, str]) -> int:
    """Count a pair's tokens; every side ends with the end token."""
    return 2 * PROMPT_LENGTH + len(row["chosen"].split()) + len(row["rejected"].split()) + 2


def make_trainer(model: Path, output: Path, pairs: int) -> Any:
    from trl import DPOConfig, DPOTrainer

    dtype = "bfloat16" if has_gpu() else "float32"
    return make_trl_trainer(DPOTrainer, DPOConfig, model, output, pairs, PAIRS_PER_STEP, dtype, beta=0.1)


if __name__ == "__main__":
    cases = ("hotseat", "trl-16", "trl-8", "trl-4")
    main(Comparison(__doc__, CONFIG, PAIRS_PER_STEP, make_pair, count_tokens, make_trainer, cases, target=1.3))
