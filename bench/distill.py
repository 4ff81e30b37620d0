r"""Distillation beside GRPO on GSM8K: accuracy on the test set over minutes, from one student on one GPU.

Three plain `hotseat run`s from the same weights on the same prompts: GRPO with the reward of bench/real_tasks.py, the
divergence from a teacher alone on one answer to each prompt, and both together. Minutes are those of the start and of
the steps; evaluations, which are greedy and of the whole test set, are not counted.

    python bench/distill.py --student CHECKPOINT --teacher CHECKPOINT --data FOLDER     with train.jsonl and test.jsonl
    python bench/distill.py ... --dry-run --steps 1 --questions 4      on CPUs, with small models: it prints no numbers
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.checkpoint import existing
from lib.devices import need_gpu
from lib.tasks import GSM8K, GSM8K_REWARD, write_data
from rich.console import Console
from rich.table import Table

CONFIG = """\
task: rl
actor: {{model: {student}, optimizer: {{learning_rate: 1e-6}}}}
data: {{path: train.jsonl, input_key: prompt, apply_chat_template: true, max_length: {length}, max_samples: {rows}}}
rollout: {{batch_size: {questions}, max_new_tokens: {answer}}}
train: {{num_episodes: 1}}
eval: {{path: test.jsonl, every: {every}, temperature: 0, samples_per_prompt: 1, reward: {reward}}}
log: {{every: 1}}
"""
SAMPLES = 8
GRPO = [f"reward.function={GSM8K_REWARD}", f"rollout.samples_per_prompt={SAMPLES}", "algorithm.estimator=group_norm"]
TEACHER = ["algorithm.distill.coef=1", "algorithm.distill.top_k=64"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, default=Path("build/qwen05"))
    parser.add_argument("--teacher", type=Path, default=Path("build/qwen15"))
    parser.add_argument("--data", type=Path, default=Path("build/gsm8k"))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--questions", type=int, default=128, help="of a step")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--only", choices=("grpo", "distill", "both"), nargs="*", default=["grpo", "distill", "both"])
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: whether everything runs")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of every run")
    args = parser.parse_args()
    if not args.dry_run:
        need_gpu()
    student, teacher = existing(args.student), existing(args.teacher)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_data(GSM8K, args.data, folder)
        length, answer = (256, 8) if args.dry_run else (1024, 400)
        sizes = {"questions": args.questions, "rows": args.questions * args.steps, "every": args.eval_every}
        text = CONFIG.format(student=student, reward=GSM8K_REWARD, length=length, answer=answer, **sizes)
        (folder / "distill.yaml").write_text(text)
        curves = {name: run(name, args, teacher, folder) for name in args.only}
    if args.dry_run:
        print("dry run: every command ran to its end, and nothing was measured")
    else:
        print_curves(curves)


def run(name: str, args: argparse.Namespace, teacher: Path, folder: Path) -> list[tuple[float, dict[str, Any]]]:
    """Return the minutes that had passed at each record of a run's metrics, and the record."""
    of_teacher = [*TEACHER, f"reference.model={teacher}"]
    options = {"grpo": GRPO, "distill": ["rollout.samples_per_prompt=1", *of_teacher], "both": [*GRPO, *of_teacher]}
    batch = args.questions * (1 if name == "distill" else SAMPLES)
    command = ["-m", "hotseat", "run", "distill.yaml", f"name={name}", f"train.batch_size={batch}"]
    first_step_s = stream([sys.executable, *command, *options[name], *args.set], folder)
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    steps = {record["step"]: record["step_s"] for record in records if "step_s" in record}
    start_s = first_step_s - steps[1]
    return [
        ((start_s + sum(seconds for step, seconds in steps.items() if step <= record["step"])) / 60, record)
        for record in records
    ]


def stream(command: Sequence[str], folder: Path) -> float:
    """Run a command and print its output with seconds before each line; return those to the end of step 1."""
    began_s, first_step_s = time.monotonic(), float("nan")
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seconds = time.monotonic() - began_s
            print(f"{seconds:6.1f}  {line}", end="", flush=True)
            if line.startswith(("rl  1/", "rl 1/")):
                first_step_s = seconds
    if process.returncode:
        raise SystemExit(process.returncode)
    return first_step_s


def print_curves(curves: dict[str, list[tuple[float, dict[str, Any]]]]) -> None:
    table = Table(title="GSM8K: accuracy on the test set over minutes")
    for column in ("run", "step", "minutes", "accuracy", "divergence", "reward"):
        table.add_column(column, justify="right")
    for name, curve in curves.items():
        for minutes, record in curve:
            if "eval/accuracy" in record:
                values = [record.get(key) for key in ("eval/accuracy", "divergence", "reward")]
                shown = ["" if value is None else f"{value:.3f}" for value in values]
                table.add_row(name, str(record["step"]), f"{minutes:.1f}", *shown)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
