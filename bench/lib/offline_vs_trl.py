"""A task without rollouts, beside TRL's trainer for it: same rows, weights, precision and machine, in one call.

Each case runs in processes of its own, one after another. Tokens are those of the data, without padding. Hotseat runs
as `hotseat run`. Seconds to the first step are from the command to the end of that step, imports included. Hotseat's
memory beside the plan's is what its allocator had in use at the most, and 1 GiB for the device's context; cache that it
kept besides is told apart.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.devices import has_gpu
from lib.shapes import VOCAB_SIZES, make_weights, shape
from lib.trl_side import timed_steps
from lib.words import save_tokenizer

NUM_WARM_UP = 3  # steps that do not count
_FIRST_STEP = r"^(sft|dpo) +1/|^step 1: "


@dataclass(frozen=True)
class Comparison:
    """A task to compare. make_row: from a function that makes a text of so many random words.

    config: Hotseat's, where {directory}, {model} and {name} stand for what they say. make_trainer: TRL's, from model
    folder, output folder and rows per micro-batch. cases: `hotseat`, and `trl-` with rows per micro-batch.
    """

    description: str
    config: str
    rows_per_step: int
    make_row: Callable[[random.Random, Callable[[int], str]], dict[str, str]]
    count_tokens: Callable[[dict[str, str]], int]
    make_trainer: Callable[[Path, Path, int], Any]
    cases: Sequence[str]
    target: float


def make_trl_trainer(
    trainer: type, config: type, model: Path, output: Path, rows: int, rows_per_step: int, dtype: str, **options: Any
) -> Any:
    """Make one of TRL's trainers. rows: per micro-batch. dtype: of the weights. options: further ones of its config."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    return trainer(
        model=str(model),
        args=config(
            output_dir=str(output),
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            num_train_epochs=1,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=rows_per_step // rows,
            max_length=512,
            bf16=has_gpu(),
            use_cpu=not has_gpu(),
            model_init_kwargs={"dtype": dtype},
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
            **options,
        ),
        train_dataset=load_dataset("json", data_files=str(model / "rows.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def write_model(task: Comparison, directory: Path, model: str, num_steps: int) -> None:
    """Write weights, a tokenizer with one token per word, and rows for `num_steps` steps."""
    path, vocab_size = directory / model, VOCAB_SIZES[model]
    words = [*(f"w{index}" for index in range(vocab_size - 1)), "<eos>"]
    save_tokenizer(path, words)
    weights = make_weights(shape(model, eos_token_id=vocab_size - 1), "cuda" if has_gpu() else "cpu")
    (weights if has_gpu() else weights.float()).save_pretrained(path)
    rng = random.Random(0)

    def text(length: int) -> str:
        return " ".join(rng.choices(words[1:-1], k=length))

    rows = [task.make_row(rng, text) for _ in range(num_steps * task.rows_per_step)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_case(task: Comparison, directory: Path, model: str, case: str) -> dict[str, Any]:
    """Run a case in its own process, and return the seconds of its steps and its memory."""
    name = f"{case}-{int(time.time())}"
    if case == "hotseat":
        config = directory / f"{name}.yaml"
        config.write_text(task.config.format(directory=directory, model=model, name=name))
        command = [sys.executable, "-m", "hotseat", "run", str(config)]
    else:
        command = [sys.executable, sys.argv[0], "--one", case, "--model", model, "--directory", str(directory)]
    began_s, first_step_s = time.monotonic(), float("nan")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if re.search(_FIRST_STEP, line) and first_step_s != first_step_s:
                first_step_s = time.monotonic() - began_s
    if process.returncode:
        raise SystemExit(f"{case} ended with {process.returncode}")
    made = _of_run(directory / "runs" / name) if case == "hotseat" else json.loads((directory / "one.json").read_text())
    return made | {"first_step_s": first_step_s}


def _of_run(run_dir: Path) -> dict[str, Any]:
    from hotseat.observe import read_lines

    records = [record for record in read_lines(run_dir / "metrics.jsonl") if "step_s" in record]
    plan = json.loads((run_dir / "plan.json").read_text())
    return {
        "seconds": [record["step_s"] for record in records],
        "peak_gib": 1.0 + max(record["memory/update/actor"] for record in records) if has_gpu() else None,
        "cached_gib": max(record["memory/update/unused"] for record in records) if has_gpu() else None,
        "planned_gib": max(step["used_gib"] or 0.0 for step in plan["groups"][0]["steps"]),
    }


def run_trl(task: Comparison, directory: Path, model: str, case: str) -> None:
    import torch

    seconds = timed_steps(task.make_trainer(directory / model, directory / case, int(case.rpartition("-")[2])))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if has_gpu() else None
    (directory / "one.json").write_text(json.dumps({"seconds": seconds, "peak_gib": peak_gib}))


def show(task: Comparison, directory: Path, model: str) -> None:
    import trl
    from rich.console import Console
    from rich.table import Table

    rows = [json.loads(line) for line in (directory / model / "rows.jsonl").read_text().splitlines()]
    tokens_per_step = sum(map(task.count_tokens, rows)) / (len(rows) / task.rows_per_step)
    results = {path.stem: json.loads(path.read_text()) for path in sorted((directory / "results").glob("*.json"))}
    medians = {name: statistics.median(result["seconds"][NUM_WARM_UP:]) for name, result in results.items()}
    table = Table("case", "s/step", "tokens/s", "Hotseat is faster by", "s to step 1", "peak GiB", "planned", "cached")
    for name, result in results.items():
        is_peer = name != "hotseat" and "hotseat" in medians
        table.add_row(
            name,
            f"{medians[name]:.3f}",
            f"{tokens_per_step / medians[name]:,.0f}",
            f"{medians[name] / medians['hotseat']:.2f}" if is_peer else "",
            f"{result['first_step_s']:.1f}",
            *(f"{result[key]:.1f}" if result.get(key) else "" for key in ("peak_gib", "planned_gib", "cached_gib")),
        )
    console = Console(width=120)
    console.print(table)
    peers = [median for name, median in medians.items() if name != "hotseat"]
    if peers and "hotseat" in medians:
        ratio = min(peers) / medians["hotseat"]
        verdict = "met" if ratio >= task.target else "missed"
        console.print(f"TRL {trl.__version__} at its best: {ratio:.2f} times; target {task.target}: {verdict}")


def main(task: Comparison) -> None:
    parser = argparse.ArgumentParser(description=task.description.splitlines()[0])
    parser.add_argument("--model", choices=VOCAB_SIZES, default="1.5B" if has_gpu() else "tiny")
    parser.add_argument("--only", nargs="+", choices=task.cases, default=task.cases)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=Path("build/offline_vs_trl"))
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    directory, model = arguments.directory.absolute() / Path(sys.argv[0]).stem, arguments.model
    if arguments.one is not None:
        directory = arguments.directory
        if arguments.one == "model":
            write_model(task, directory, model, arguments.steps)
        else:
            run_trl(task, directory, model, arguments.one)
        return
    (directory / "results").mkdir(parents=True, exist_ok=True)
    if not (directory / model / "rows.jsonl").exists():
        given = ["--one", "model", "--model", model, "--directory", str(directory), "--steps", str(arguments.steps)]
        subprocess.run([sys.executable, sys.argv[0], *given], check=True)
    for case in arguments.only:
        (directory / "results" / f"{case}.json").write_text(json.dumps(run_case(task, directory, model, case)))
    show(task, directory, model)
