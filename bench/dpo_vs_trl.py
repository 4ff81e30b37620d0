"""Tokens per second of DPO against TRL's DPOTrainer: same pairs, weights and precision, the reference scored live.

A model of Qwen2.5-1.5B's shape with random weights in pure bf16; pairs of a prompt of 64 tokens and two answers of 64
to 447, 32 pairs an optimizer step, no checkpointing. TRL's best number of pairs per micro-batch counts. Tokens are
those of the data: prompts and answers of both sides, without padding. Hotseat's memory beside the plan's is what its
allocator had in use at the most, and 1 GiB for the device's context; cache that it kept besides is told apart.

    python bench/dpo_vs_trl.py                      every case, one after another, each in its own process
    python bench/dpo_vs_trl.py --only hotseat trl-8 some; results stay in --directory, and all of them are printed
    python bench/dpo_vs_trl.py --model tiny         a tiny shape in fp32, the default without a GPU
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lib.devices import has_gpu
from lib.shapes import VOCAB_SIZES, make_weights, shape
from lib.trl_side import timed_steps
from lib.words import save_tokenizer

PAIRS_PER_STEP, PROMPT_LENGTH, ANSWER_LENGTHS = 32, 64, (64, 447)
NUM_WARM_UP = 3  # steps that do not count
TARGET = 1.3
CASES = ("hotseat", "trl-16", "trl-8", "trl-4")

CONFIG = """
task: dpo
name: hotseat-{number}
run_dir: {directory}/runs
cluster: {{component_placement: {{actor: 0, reference: 0}}}}
actor: {{model: {directory}/{model}, optimizer: {{learning_rate: 1e-6, schedule: constant, betas: [0.9, 0.999]}}}}
data: {{path: {directory}/{model}/pairs.jsonl, prompt_key: prompt, max_length: 512}}
algorithm: {{dpo: {{beta: 0.1}}}}
train: {{{precision}, batch_size: 32, micro_batch_size: 16}}
"""


def write_model(directory: Path, model: str, num_steps: int) -> None:
    """Weights, a tokenizer with one word per token, and pairs for `num_steps` steps."""
    path, vocab_size = directory / model, VOCAB_SIZES[model]
    words = [*(f"w{index}" for index in range(vocab_size - 1)), "<eos>"]
    save_tokenizer(path, words)
    weights = make_weights(shape(model, eos_token_id=vocab_size - 1), "cuda" if has_gpu() else "cpu")
    (weights if has_gpu() else weights.float()).save_pretrained(path)
    rng = random.Random(0)

    def text(length: int) -> str:
        return " ".join(rng.choices(words[1:-1], k=length))

    rows = [
        {
            "prompt": text(PROMPT_LENGTH),
            "chosen": " " + text(rng.randint(*ANSWER_LENGTHS)),
            "rejected": " " + text(rng.randint(*ANSWER_LENGTHS)),
        }
        for _ in range(num_steps * PAIRS_PER_STEP)
    ]
    (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_hotseat(directory: Path, model: str) -> dict[str, Any]:
    from hotseat.config import loads
    from hotseat.loop.run import start
    from hotseat.observe import read_lines

    precision = "dtype: bf16, fp32_master: false" if has_gpu() else "dtype: fp32"
    number = int(time.time())
    start(loads(CONFIG.format(directory=directory, model=model, precision=precision, number=number)))
    run_dir = directory / "runs" / f"hotseat-{number}"
    records = [record for record in read_lines(run_dir / "metrics.jsonl") if "step_s" in record]
    plan = json.loads((run_dir / "plan.json").read_text())
    return {
        "seconds": [record["step_s"] for record in records],
        "peak_gib": 1.0 + max(record["memory/update/actor"] for record in records) if has_gpu() else None,
        "cached_gib": max(record["memory/update/unused"] for record in records) if has_gpu() else None,
        "planned_gib": max(step["used_gib"] or 0.0 for step in plan["groups"][0]["steps"]),
    }


def run_trl(directory: Path, model: str, pairs: int) -> dict[str, Any]:
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    path = directory / model
    trainer = DPOTrainer(
        model=str(path),
        args=DPOConfig(
            output_dir=str(directory / f"trl-{pairs}"),
            beta=0.1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            num_train_epochs=1,
            per_device_train_batch_size=pairs,
            gradient_accumulation_steps=PAIRS_PER_STEP // pairs,
            max_length=512,
            bf16=has_gpu(),
            use_cpu=not has_gpu(),
            model_init_kwargs={"dtype": "bfloat16" if has_gpu() else "float32"},
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
        ),
        train_dataset=load_dataset("json", data_files=str(path / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    seconds = timed_steps(trainer)
    return {"seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if has_gpu() else None}


def show(directory: Path, model: str) -> None:
    import trl
    from rich.console import Console
    from rich.table import Table

    rows = [json.loads(line) for line in (directory / model / "pairs.jsonl").read_text().splitlines()]
    # every side ends with the end token
    words = sum(2 * PROMPT_LENGTH + len(row["chosen"].split()) + len(row["rejected"].split()) + 2 for row in rows)
    tokens_per_step = words / (len(rows) / PAIRS_PER_STEP)
    results = {path.stem: json.loads(path.read_text()) for path in sorted((directory / "results").glob("*.json"))}
    speeds = {
        name: tokens_per_step / statistics.median(result["seconds"][NUM_WARM_UP:]) for name, result in results.items()
    }
    peers = {name: speed for name, speed in speeds.items() if name.startswith("trl")}
    table = Table(
        "case", "s/step", "tokens/s", "Hotseat is faster by", "peak GiB", "planned GiB", "error", "cached GiB"
    )
    for name, result in results.items():
        peak, planned = result["peak_gib"], result.get("planned_gib")
        table.add_row(
            name,
            f"{statistics.median(result['seconds'][NUM_WARM_UP:]):.3f}",
            f"{speeds[name]:,.0f}",
            f"{speeds['hotseat'] / speeds[name]:.2f}" if name in peers and "hotseat" in speeds else "",
            f"{peak:.1f}" if peak else "",
            f"{planned:.1f}" if planned else "",
            f"{planned / peak - 1:+.0%}" if planned and peak else "",
            f"{result['cached_gib']:.1f}" if result.get("cached_gib") else "",
        )
    console = Console(width=120)
    console.print(table)
    if peers and "hotseat" in speeds:
        ratio = speeds["hotseat"] / max(peers.values())
        verdict = "met" if ratio >= TARGET else "missed"
        console.print(f"TRL {trl.__version__} at its best: {ratio:.2f} times; target {TARGET}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=VOCAB_SIZES, default="1.5B" if has_gpu() else "tiny")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=Path("bench-dpo"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    directory, model = arguments.directory.absolute(), arguments.model
    if arguments.one is not None:
        run_one(directory, model, arguments.one, arguments.steps)
        return
    (directory / "results").mkdir(parents=True, exist_ok=True)
    for case in ([] if (directory / model / "pairs.jsonl").exists() else ["model"]) + list(arguments.only):
        given = ["--one", case, "--model", model, "--directory", str(directory), "--steps", str(arguments.steps)]
        subprocess.run([sys.executable, __file__, *given], check=True)
    show(directory, model)


def run_one(directory: Path, model: str, case: str, num_steps: int) -> None:
    if case == "model":
        write_model(directory, model, num_steps)
        return
    result = run_hotseat(directory, model) if case == "hotseat" else run_trl(directory, model, int(case[4:]))
    (directory / "results" / f"{case}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
