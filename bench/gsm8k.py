r"""GRPO on GSM8K by a plain `hotseat run` on one GPU: seconds of phases, tokens per second, and what is learned.

128 prompts x 8 answers of at most 400 tokens a step, in one optimizer step, at temperature 1, without KL. An answer is
right if the number in its last \boxed{} is that of the data. The whole test set is evaluated greedily.

    python bench/gsm8k.py --model CHECKPOINT --data FOLDER              FOLDER has GSM8K's train.jsonl and test.jsonl
    python bench/gsm8k.py --model CHECKPOINT --data FOLDER --set rollout.engine=vllm --steps 4 --eval-every 0
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.checkpoint import existing
from lib.devices import need_gpu
from rich.console import Console
from rich.table import Table

INSTRUCTION = r"Solve it step by step, and put the final number into \boxed{}."
REWARD = r'''"""1 where the number in the last \boxed{} is the label, else 0."""

import re


def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        found = re.findall(r"boxed\{[^0-9-]*(-?[0-9.,]*[0-9])", query[len(prompt) :])
        given = found[-1].replace(",", "") if found else None
        rewards.append(1.0 if given is not None and float_of(given) == float_of(label) else 0.0)
    return rewards


def float_of(text):
    try:
        return float(text)
    except ValueError:
        return None
'''
CONFIG = """\
task: rl
actor: {{model: {model}, optimizer: {{learning_rate: 1e-6}}}}
data: {{path: train.jsonl, label_key: label, apply_chat_template: true, max_length: 1024, max_samples: {rows}}}
reward: {{function: reward.py}}
rollout: {{batch_size: 128, samples_per_prompt: 8, max_new_tokens: 400}}
train: {{batch_size: 1024, num_episodes: 1}}
algorithm: {{estimator: group_norm}}
log: {{every: 1}}
"""
PHASES = ("rollout", "prepare", "update", "sync")
NUM_WARM_UP = 2  # steps that do not count for medians


def write_data(source: Path, folder: Path) -> None:
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (source / f"{name}.jsonl").read_text().splitlines()]
        lines = [
            json.dumps(
                {
                    "input": f"{row['question']} {INSTRUCTION}",
                    "label": row["answer"].rpartition("####")[2].strip().replace(",", ""),
                }
            )
            for row in rows
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/qwen05"))
    parser.add_argument("--data", type=Path, default=Path("build/gsm8k"))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--eval-every", type=int, default=15, help="0: nothing is evaluated")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the run")
    args = parser.parse_args()
    need_gpu()
    model = existing(args.model)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_data(args.data, folder)
        (folder / "reward.py").write_text(REWARD)
        (folder / "gsm8k.yaml").write_text(CONFIG.format(model=model, rows=128 * args.steps))
        evaluation = [
            "eval.path=test.jsonl",
            f"eval.every={args.eval_every}",
            "eval.temperature=0",
            "eval.samples_per_prompt=1",
        ]
        began_s = time.time()
        command = [sys.executable, "-m", "hotseat", "run", "gsm8k.yaml", "name=gsm8k"]
        first_step_s = stream([*command, *(evaluation if args.eval_every else []), *args.set], folder)
        print_run(folder / "runs" / "gsm8k", first_step_s, time.time() - began_s)


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


def print_run(run_dir: Path, first_step_s: float, seconds: float) -> None:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    table = Table(title=f"GSM8K, {len(steps)} steps of 1,024 answers")
    for column in ("step", "seconds", *PHASES, "tokens per answer", "rollout tokens/s", "reward", "test accuracy"):
        table.add_column(column, justify="right")
    for record in records:
        tokens = record.get("sampled_tokens", float("nan"))
        phases = [record.get(f"time/{phase}") for phase in PHASES]
        table.add_row(
            str(record["step"]),
            *(_number(value) for value in (record.get("step_s"), *phases, record.get("length"))),
            _number(tokens / phases[0] if phases[0] else None, 0),
            _number(record.get("reward"), 3),
            _number(record.get("eval/accuracy"), 3),
        )
    Console(width=130).print(table)
    counted = steps[NUM_WARM_UP:] or steps
    medians = {phase: statistics.median(record[f"time/{phase}"] for record in counted) for phase in PHASES}
    print("medians after the first steps:", ", ".join(f"{phase} {value:.2f} s" for phase, value in medians.items()))
    print(f"command to the end of step 1 {first_step_s:.0f} s, whole run {seconds:.0f} s")


def _number(value: Any, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    main()
