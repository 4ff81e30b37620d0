"""LoRA beside a base in NF4 (`train.load_in_4bit`) and beside one in bf16, on one GPU: memory, tokens per second.

    sft     updates of a trainer alone, of a model of random weights made in host memory: its peak memory
    make    writes a checkpoint of random weights, and prompts, for `grpo`
    grpo    a GRPO run with vLLM on a checkpoint: bytes pushed, gaps, and the peak of the device in each phase

`--cap` bounds the GiB of the trainer, as a smaller card would; in `grpo` vLLM gets a share of so many, and everything
is offloaded between phases.

    python bench/qlora.py sft [--shape 8B] [--bases nf4 bf16] [--cap 24]
    python bench/qlora.py make FOLDER [--shape 8B]
    python bench/qlora.py grpo FOLDER [--bases nf4 bf16] [--cap 24] [--steps 3] [--eager]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lib.shapes import VOCAB_SIZES, make_weights, shape
from lib.words import save_prompts, save_tokenizer
from rich.console import Console
from rich.table import Table

RANK, GIB = 16, 2**30
CONFIG = """
task: rl
name: {base}
run_dir: {runs}
cluster: {{component_placement: {{actor: 0, rollout: "@actor"}}}}
actor: {{model: {model}, enable_offload: {offload}, optimizer: {{learning_rate: 1e-4, schedule: constant}}}}
data: {{path: {runs}/prompts.jsonl, label_key: label, max_length: 256}}
reward: {{function: {runs}/reward.py}}
rollout: {{engine: vllm, lora_sync: adapter, enable_offload: {offload}, batch_size: {prompts}, samples_per_prompt: 4,
  max_new_tokens: 64, enforce_eager: {eager}, canary: {{num_tokens: 512}}{share}}}
algorithm: {{estimator: group_norm}}
train: {{dtype: {dtype}, batch_size: {samples}, micro_batch_size: 4, gradient_checkpointing: true, compile: false,
  load_in_4bit: {nf4}, lora: {{rank: 16}}}}
checkpoint: {{every_minutes: 0}}
"""
REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(map(ord, query[len(prompt):])) % 97 / 97 for query, prompt in zip(queries, prompts)]
"""
NUM_PROMPTS, NUM_WORDS = 8, 24
SHOWN = (
    "engine_gap",
    "engine_gap_max",
    "canary_gap",
    "sync/gb",
    "tokens_per_s",
    "time/rollout",
    "time/update",
    "time/sync",
)


def model_of(name: str, device: str) -> Any:
    """Return a model of random weights in host memory, drawn on the device."""
    return make_weights(shape(name, eos_token_id=VOCAB_SIZES[name]), device).to("cpu")


# --- a trainer alone --------------------------------------------------------------------------------------------------


def updates(arguments: argparse.Namespace, base: str, device: str) -> list[str]:
    """Make a trainer and update it; return a row of the table."""
    from hotseat.placement.role_names import Part
    from hotseat.train.backend import AdamW, LoraOptions, TrainOptions
    from hotseat.train.fsdp import FSDPBackend
    from hotseat.train.schedule import Schedule
    from hotseat.types import MicroBatch

    def loss(outputs: Any, batch: Any) -> Any:
        return -(batch.weights * outputs.log_probs).sum(), {}

    on_gpu, length = device == "cuda", arguments.tokens
    model = model_of(arguments.shape, device)
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if arguments.cap:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.cap * GIB / total))
    started = time.perf_counter()
    options = TrainOptions(
        precision="bf16_master",
        optimizer=AdamW(),
        schedule=Schedule(peak=1e-3),
        lora=LoraOptions(RANK),
        has_nf4=base == "nf4",
        gradient_checkpointing=True,
        compile=None if arguments.compile else False,
    )
    trainer = FSDPBackend(model, options, device=device)
    start_s = time.perf_counter() - started
    weights = sum(tensor.nbytes for tensor in trainer._tensors(Part.WEIGHTS))
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB_SIZES[arguments.shape], (arguments.batches, length), generator=drawn)
    mask = torch.ones(length, dtype=torch.bool)
    mask[0] = False
    whole = [MicroBatch.from_segments([row], [mask], [str(index)]) for index, row in enumerate(tokens)]
    batches = [replace(batch, weights=batch.mask / (arguments.batches * length)) for batch in whole]
    seconds, losses = [], []
    for _ in range(arguments.steps + 1):
        started = time.perf_counter()
        losses.append(trainer.update(batches, loss, 1.0).loss)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    speed = arguments.batches * length / statistics.median(seconds[1:])
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
    trainer.close()
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return [
        base,
        f"{weights / GIB:.2f}",
        *(f"{peak / GIB:.2f}" for peak in peaks),
        f"{speed:,.0f}",
        f"{start_s:.1f}",
        f"{losses[0]:.4g} {losses[-1]:.4g}",
    ]


def sft(arguments: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table(title=f"{arguments.shape}, rank {RANK}, {arguments.batches} x {arguments.tokens} tokens, {device}")
    for name in ("base", "weights GiB", "peak GiB", "peak reserved", "tokens/s", "load s", "loss, first and last"):
        table.add_column(name, justify="right")
    for base in arguments.bases:
        table.add_row(*updates(arguments, base, device))
    Console(width=140).print(table)


# --- a run ------------------------------------------------------------------------------------------------------------


def make(arguments: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model_of(arguments.shape, device).save_pretrained(arguments.folder)
    # The end token lies outside of the vocabulary: every answer has its full length.
    words = [*(f"w{index}" for index in range(VOCAB_SIZES[arguments.shape])), "<eos>"]
    save_tokenizer(arguments.folder, words)
    print(arguments.folder, sum(path.stat().st_size for path in arguments.folder.iterdir()) / GIB, "GiB")


def grpo(arguments: argparse.Namespace) -> None:
    from hotseat.observe import read_lines

    runs = arguments.out.absolute()
    runs.mkdir(parents=True, exist_ok=True)
    (runs / "reward.py").write_text(REWARD)
    draw = random.Random(0)
    prompts = [[f"w{draw.randrange(3, 5000)}" for _ in range(NUM_WORDS)] for _ in range(NUM_PROMPTS * arguments.steps)]
    save_prompts(runs / "prompts.jsonl", prompts, [""] * len(prompts))
    on_gpu = torch.cuda.is_available()
    share = ""
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        share = f", memory_share: {0.7 * (arguments.cap or total) / total:.3f}"
    for base in arguments.bases:
        text = CONFIG.format(
            base=base,
            runs=runs,
            model=arguments.folder.absolute(),
            offload=str(bool(arguments.cap) and on_gpu).lower(),
            eager=str(arguments.eager).lower(),
            prompts=NUM_PROMPTS,
            samples=4 * NUM_PROMPTS,
            share=share,
            dtype="bf16" if on_gpu else "fp32",
            nf4=str(base == "nf4").lower(),
        )
        (runs / f"{base}.yaml").write_text(text)
        subprocess.run([sys.executable, "-m", "hotseat", "run", str(runs / f"{base}.yaml")], check=True)
        records = read_lines(runs / base / "metrics.jsonl")[1:]
        for record in records:
            print(base, {name: record.get(name) for name in SHOWN})
        peaks: dict[str, float] = {}
        for record in records:
            for name, value in record.items():
                if name.startswith("memory/"):
                    peaks[name] = max(value, peaks.get(name, 0.0))
        print(base, "peak GiB", json.dumps({name: round(peak, 2) for name, peak in peaks.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (sft, make, grpo):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        if function is not sft:
            command.add_argument("folder", type=Path)
        if function is not grpo:
            command.add_argument("--shape", choices=VOCAB_SIZES, default="8B")
        if function is not make:
            command.add_argument("--bases", nargs="+", choices=("nf4", "bf16"), default=["nf4", "bf16"])
            command.add_argument("--steps", type=int, default=3)
            command.add_argument("--cap", type=float, default=0.0)
    of_sft, of_grpo = commands.choices["sft"], commands.choices["grpo"]
    of_sft.add_argument("--tokens", type=int, default=2048)
    of_sft.add_argument("--batches", type=int, default=4)
    of_sft.add_argument("--compile", action="store_true")
    of_grpo.add_argument("--eager", action="store_true")
    of_grpo.add_argument("--out", type=Path, default=Path("build/qlora"))
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
