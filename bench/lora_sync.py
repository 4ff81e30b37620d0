"""A push of trained adapters to vLLM: merged into all weights, or alone (`rollout.lora_sync`), in two GRPO runs.

Random weights, adapters of rank 16 beside every linear layer; actor and engine take turns on one device, in processes
of their own. The median of the steps after the first counts. `transfer` is from the first gathering of weights until
the engine has loaded all, `proof` the digests of both sides and their scores of the canary, `rollout` the phase that
samples: vLLM computes adapters that are not merged beside every layer, which costs time there.

    python bench/lora_sync.py [--shape 135m] [--steps 5] [--prompts 4] [--tokens 16]
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.shapes import dimensions
from lib.words import save_prompts, save_tokenizer
from rich.console import Console
from rich.table import Table

GROUP_SIZE, PROMPT_LENGTH, RANK = 4, 16, 16
SHAPES = {  # SmolLM2's and Qwen2.5's, without biases
    "135m": dimensions(576, 1536, 30, 9, 3) | {"vocab_size": 49_152},
    "1.5b": dimensions(1536, 8960, 28, 12, 2) | {"vocab_size": 151_936},
}
CONFIG = """
task: rl
name: {side}
run_dir: {directory}
cluster: {{component_placement: {{actor: 0, rollout: "@actor"}}}}
actor: {{model: {directory}/model, optimizer: {{learning_rate: 1e-5, schedule: constant}}}}
data: {{path: {directory}/prompts.jsonl, label_key: label, max_length: {max_length}}}
reward: {{function: {directory}/reward.py}}
rollout:
  {{engine: vllm, lora_sync: {side}, batch_size: {prompts}, samples_per_prompt: 4, max_new_tokens: {tokens},
   canary: {{num_tokens: 512}}}}
algorithm: {{estimator: group_norm}}
train: {{batch_size: {samples}, lora: {{rank: 16}}}}
checkpoint: {{every_minutes: 0}}
"""
REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(map(ord, query[len(prompt):])) / 1e5 for query, prompt in zip(queries, prompts)]
"""
COLUMNS = {
    "MB": ("sync/gb", 1e3),
    "transfer s": ("sync/transfer_ms", 1e-3),
    "proof s": ("sync/proof_ms", 1e-3),
    "sync s": ("time/sync", 1.0),
    "rollout s": ("time/rollout", 1.0),
}


def make_task(directory: Path, shape: str, num_rows: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = SHAPES[shape]
    num_words = size["vocab_size"]
    words = [*(f"w{index}" for index in range(num_words)), "<eos>"]
    save_tokenizer(directory / "model", words)
    torch.manual_seed(0)
    # The end token lies outside of the vocabulary: every answer has its full length.
    config = LlamaConfig(**size, tie_word_embeddings=True, bos_token_id=None, eos_token_id=num_words, pad_token_id=0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory / "model")
    rng = random.Random(0)
    prompts = [rng.choices(words[1:-1], k=PROMPT_LENGTH) for _ in range(num_rows)]
    save_prompts(directory / "prompts.jsonl", prompts, [""] * num_rows)
    (directory / "reward.py").write_text(REWARD)


def main() -> None:
    from hotseat.observe import read_lines

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    arguments = parser.parse_args()
    num_samples = arguments.prompts * GROUP_SIZE
    table = Table(
        title=f"{arguments.shape}, adapters of rank {RANK}, {num_samples} samples x {arguments.tokens} tokens,"
        f" median of {arguments.steps - 1} steps"
    )
    table.add_column("lora_sync")
    for name in (*COLUMNS, "engine gap"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_task(directory, arguments.shape, arguments.steps * arguments.prompts)
        for side in ("merged", "adapter"):
            text = CONFIG.format(
                side=side,
                directory=directory,
                prompts=arguments.prompts,
                tokens=arguments.tokens,
                samples=num_samples,
                max_length=PROMPT_LENGTH + max(arguments.tokens, 64),
            )
            (directory / f"{side}.yaml").write_text(text)
            subprocess.run([sys.executable, "-m", "hotseat", "run", str(directory / f"{side}.yaml")], check=True)
            records = read_lines(directory / side / "metrics.jsonl")[1:]
            medians = [
                f"{scale * statistics.median(record[metric] for record in records[1:]):.3g}"
                for metric, scale in COLUMNS.values()
            ]
            gap = max(record["engine_gap"] for record in records)
            table.add_row(side, *medians, f"{gap:.1g}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
