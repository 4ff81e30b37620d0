"""`hotseat demo`: teaches a small model to add. Makes its files, then trains by SFT in process and by GRPO on Ray."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

from hotseat.config import load
from hotseat.errors import UserError

SFT = """\
# SFT on worked sums, three quarters of which forget the carry.
task: sft
name: sft
run_dir: {directory}
seed: {seed}
cluster: {{runtime: local, threads_per_process: 2}}
actor:
  model: {model}
  optimizer: {{learning_rate: 1e-3, schedule: linear, warmup_ratio: 0.05, min_learning_rate_ratio: 0.05}}
data: {{path: {examples}, output_key: output, max_length: 16}}
train: {{dtype: fp32, batch_size: 64}}
log: {{every: 50}}
"""

GRPO = """\
# GRPO: eight answers to each sum, compared by their rewards. Actor and engine share one device.
task: rl
name: grpo
run_dir: {directory}
seed: {seed}
cluster:
  threads_per_process: 2
  component_placement: {{actor: 0, rollout: "@actor"}}
actor:
  model: {directory}/sft/model
  optimizer: {{learning_rate: 2e-4, schedule: linear, warmup_ratio: 0.05, min_learning_rate_ratio: 0.1}}
data: {{path: {prompts}, label_key: label, max_length: 16, max_samples: {num_prompts}}}
reward: {{function: {reward}}}
rollout: {{batch_size: 64, samples_per_prompt: 8, max_new_tokens: 5, num_slots: 256}}
algorithm: {{estimator: group_norm}}
train: {{dtype: fp32, batch_size: 512}}
eval: {{path: {held_out}, every: 20, temperature: 0.0, samples_per_prompt: 1}}
log: {{every: 10}}
"""

NUM_PROMPTS = 5_120
BAR_WIDTH = 50


def run_demo(arguments: argparse.Namespace) -> int:
    from transformers.utils import logging

    from hotseat.demo import make_files
    from hotseat.loop.start import start
    from hotseat.observe import read_lines

    logging.disable_progress_bar()
    directory, seed = Path(arguments.dir or free_directory(Path("runs"))), arguments.seed
    if _is_used(directory):
        raise UserError(f"{directory} is not empty: give another --dir, or remove it")
    started_s = time.monotonic()
    directory = directory.resolve()
    files = make_files(directory, seed)
    names = {"directory": directory, "seed": seed, "num_prompts": NUM_PROMPTS, **vars(files)}
    print(f"the task: {files.examples}, {files.prompts}, {files.reward}", flush=True)
    for name, text in (("sft", SFT), ("grpo", GRPO)):
        (directory / f"{name}.yaml").write_text(text.format(**names))
        print(f"\nhotseat run {directory / name}.yaml", flush=True)
        start(load(directory / f"{name}.yaml"))
    records = read_lines(directory / "grpo" / "metrics.jsonl")
    curve = [(int(record["step"]), record["eval/accuracy"]) for record in records if "eval/accuracy" in record]
    print("\nheld-out exact match, by step of GRPO")
    for step, accuracy in curve:
        print(f"  {step:>4}  {'█' * round(BAR_WIDTH * accuracy):{BAR_WIDTH}}  {accuracy:6.1%}")
    print(
        f"\n{curve[0][1]:.1%} after SFT, {curve[-1][1]:.1%} after GRPO"
        f" ({time.monotonic() - started_s:.0f} s)\n"
        f"report:  {directory}/grpo/report.html\n"
        f"metrics: {directory}/grpo/metrics.jsonl   curves: tensorboard --logdir {directory}\n"
        f"model:   {directory}/grpo/model"
    )
    return 0


def free_directory(parent: Path) -> Path:
    """Return `demo`, or the first of `demo-2`, `demo-3`, ... that is not in use, so that earlier demos are kept."""
    numbered = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    return next(parent / name for name in numbered if not _is_used(parent / name))


def _is_used(directory: Path) -> bool:
    return directory.exists() and any(directory.iterdir())
