"""What checkpoints and memory snapshots cost: seconds for which a step waits, and seconds to read one back.

A model of the shape of SmolLM2-135M, in fp32 with AdamW on CPUs, is trained by `task: sft`; weights and optimizer state
take 12 bytes per parameter. Each way to save is one run of a few steps, of which the first is not counted.

Seconds of a core include those of threads, and hardly depend on what else the machine does.

    python bench/memory_snapshots.py [--steps 4]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hotseat.config import loads
from hotseat.demo import make_files
from hotseat.loop.run import start
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.observe import read_lines

CONFIG = """
task: sft
name: {name}
run_dir: {directory}
cluster: {{runtime: local}}
actor: {{model: {model}}}
data: {{path: {examples}, max_length: 32, max_samples: {num_samples}}}
train: {{dtype: fp32, batch_size: 2, micro_batch_size: 2, max_epochs: 1}}
checkpoint: {checkpoint}
"""
WAYS = {
    "none": "{every_minutes: 0}",
    "disk, the step waits": "{every: 1, keep_last: 1, background: false}",
    "disk, in the background": "{every: 1, keep_last: 1, background: true}",
    "memory, the step waits": "{every: 1000, memory_every: 1, keep_last: 1, background: false}",
    "memory, in the background": "{every: 1000, memory_every: 1, keep_last: 1, background: true}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with contextlib.redirect_stdout(None):
            files = make_files(directory, 0)
        model = make_model(directory / "model", files.model)
        without_s = 0.0
        for number, (way, checkpoint) in enumerate(WAYS.items()):
            text = CONFIG.format(
                name=f"run-{number}",
                directory=directory,
                model=model,
                examples=files.examples,
                num_samples=2 * steps,
                checkpoint=checkpoint,
            )
            began_s = time.process_time()
            with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
                start(loads(text))
            cpu_s = (time.process_time() - began_s) / steps
            without_s = without_s if number else cpu_s
            lines = read_lines(directory / f"run-{number}" / "metrics.jsonl")[2:]
            save_s = statistics.median(line.get("time/save", 0.0) for line in lines)
            step_s = statistics.median(line["step_s"] for line in lines)
            print(
                f"{way:<26} a step takes {step_s:5.2f} s, and waits {save_s:5.2f} s for saving;"
                f" {cpu_s - without_s:5.2f} s of a core for each",
                flush=True,
            )
        store = CheckpointStore(directory / "run-1" / "checkpoints")
        size, started_s = store.size(store.steps()[-1]), time.monotonic()
        store.newest()
        print(f"{size / 1e9:.2f} GB are verified in {time.monotonic() - started_s:.2f} s")


def make_model(folder: Path, tokenizer: Path) -> Path:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
