"""Seconds per GRPO step against TRL's GRPOTrainer: same model, prompts, lengths, reward and machine, in one run.

Both take every step as 32 prompts x 8 samples x 24 new tokens, learn from them in one optimizer step without a
reference model, in fp32 on two cores. Every answer has its full length: the end token lies outside of the model's
vocabulary. TRL samples with `model.generate`, in one process with two threads. Hotseat runs as `hotseat run` does, on
Ray, with actor, engine and agents in processes of their own and the weights pushed and checked after each step: on one
device with two threads, or on two devices with one thread each.

Two rewards. "dense": the answers to a prompt are worth different amounts. "sparse": 1 if a certain text occurs; then
the answers to many prompts are all worth the same, their advantages are zero, and Hotseat leaves them out of the
update.

The sides are run one after the other, each in a fresh process, and the median step counts.

    python bench/step_vs_trl.py [--steps 12]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.shapes import dimensions
from lib.trl_side import time_grpo
from lib.words import save_prompts, save_tokenizer

NUM_PROMPTS, GROUP_SIZE, NUM_NEW_TOKENS = 32, 8, 24
NUM_WARM_UP = 3  # steps that do not count
TARGET = 1.5
NUM_WORDS = 256

CONFIG = """
task: rl
name: {side}-{kind}
run_dir: {directory}
cluster: {{threads_per_process: {threads}, component_placement: {{actor: "{devices}", rollout: "{devices}"}}}}
actor: {{model: {directory}/model, optimizer: {{learning_rate: 1e-6, schedule: constant, betas: [0.9, 0.999]}}}}
data: {{path: {directory}/prompts.jsonl, label_key: label, max_length: 40, max_samples: {num_rows}}}
reward: {{function: {directory}/{kind}.py}}
rollout: {{batch_size: 32, samples_per_prompt: 8, max_new_tokens: 24, num_slots: 256}}
algorithm: {{estimator: group_norm}}
train: {{dtype: fp32, batch_size: 256, micro_batch_size: {micro_batch_size}}}
log: {{every: 1000}}
"""

REWARDS = {"dense": "sum(map(ord, answer)) / 1e4", "sparse": "float(label in answer)"}
REWARD_FILE = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return [{formula} for answer, label in zip(answers, labels)]
"""

# threads, devices and samples per micro-batch
SIDES = {"one": (2, "0", 256), "two": (1, "0-1", 128)}
NAMES = {"trl": "TRL", "one": "Hotseat, one device", "two": "Hotseat, two devices"}


def make_task(directory: Path, num_rows: int) -> None:
    """A Llama of 0.8M parameters over 256 words, and prompts of eight of them."""
    import random

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["<pad>", *(f"w{index}" for index in range(NUM_WORDS - 1)), "<eos>"]
    save_tokenizer(directory / "model", words)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        **dimensions(128, 384, 4, 4, 4),
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=NUM_WORDS,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    rng = random.Random(0)
    prompts = [rng.choices(words[1:-1], k=8) for _ in range(num_rows)]
    labels = [f"w{rng.randrange(NUM_WORDS - 1)}" for _ in range(num_rows)]
    save_prompts(directory / "prompts.jsonl", prompts, labels)
    for kind, formula in REWARDS.items():
        (directory / f"{kind}.py").write_text(REWARD_FILE.format(formula=formula))


def time_trl(directory: Path, num_steps: int, kind: str) -> list[float]:
    import torch

    torch.set_num_threads(2)

    def reward(completions: list[str], label: list[str], **kwargs: Any) -> list[float]:
        return [
            float(word in text) if kind == "sparse" else sum(map(ord, text)) / 1e4
            for text, word in zip(completions, label, strict=True)
        ]

    return time_grpo(
        directory / "model",
        directory / "prompts.jsonl",
        directory / "trl",
        reward,
        max_steps=num_steps,
        per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=NUM_NEW_TOKENS,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )


def time_hotseat(directory: Path, num_steps: int, kind: str, side: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and the median of each phase."""
    from hotseat.config import loads
    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    threads, devices, micro_batch_size = SIDES[side]
    text = CONFIG.format(
        directory=directory,
        side=side,
        kind=kind,
        threads=threads,
        devices=devices,
        micro_batch_size=micro_batch_size,
        num_rows=num_steps * NUM_PROMPTS,
    )
    start(loads(text))
    records = [record for record in read_lines(directory / f"{side}-{kind}" / "metrics.jsonl") if "step_s" in record]
    assert all(record["length"] == NUM_NEW_TOKENS for record in records)
    medians = {
        name: statistics.median(record[name] for record in records[NUM_WARM_UP:])
        for name in ("time/rollout", "time/prepare", "time/update", "time/sync", "groups_alike")
    }
    return [record["step_s"] for record in records], medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--side", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=REWARDS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        run_side(arguments.directory, arguments.steps, arguments.kind, arguments.side)
        return
    results = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_task(directory, arguments.steps * NUM_PROMPTS)
        for kind, side in itertools.product(REWARDS, NAMES):
            given = ["--steps", str(arguments.steps), "--kind", kind, "--side", side, "--directory", name]
            subprocess.run([sys.executable, __file__, *given], check=True, stdout=sys.stderr)
            results[kind, side] = json.loads((directory / f"{side}-{kind}.json").read_text())
    show(results)


def run_side(directory: Path, num_steps: int, kind: str, side: str) -> None:
    medians: dict[str, float] = {}
    if side == "trl":
        seconds = time_trl(directory, num_steps, kind)
    else:
        seconds, medians = time_hotseat(directory, num_steps, kind, side)
    found = {"seconds": statistics.median(seconds[NUM_WARM_UP:]), "medians": medians}
    (directory / f"{side}-{kind}.json").write_text(json.dumps(found))


def show(results: dict[tuple[str, str], Any]) -> None:
    import trl
    from rich.console import Console
    from rich.table import Table

    table = Table("reward", "", "s/step", "times as fast", "where the time goes")
    ratios = {}
    for (kind, side), result in results.items():
        ratios[kind, side] = results[kind, "trl"]["seconds"] / result["seconds"]
        medians = dict(result["medians"])
        alike = medians.pop("groups_alike", None)
        phases = ", ".join(f"{name.removeprefix('time/')} {seconds:.2f}" for name, seconds in medians.items())
        label = kind if alike is None else f"{kind}, {alike:.0%} of groups alike"
        table.add_row(label, NAMES[side], f"{result['seconds']:.2f}", f"{ratios[kind, side]:.2f}", phases)
    console = Console(width=130)
    console.print(table)
    sizes = f"{NUM_PROMPTS} prompts x {GROUP_SIZE} samples x {NUM_NEW_TOKENS} tokens, 2 cores, TRL {trl.__version__}"
    for kind in REWARDS:
        best = max(ratios[kind, side] for side in SIDES)
        verdict = "met" if best >= TARGET else "missed"
        console.print(f"{sizes}, {kind} reward; target {TARGET} times as fast: {verdict} ({best:.2f})")


if __name__ == "__main__":
    main()
