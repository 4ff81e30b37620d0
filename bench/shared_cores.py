"""What the way in which OpenMP threads wait costs: supervised training alone, and beside one other busy process.

Trains the demo's model for some steps in a process of its own, with as many threads as there are cores, again and
again: with the policy of OpenMP's runtime (threads spin while they wait) and with OMP_WAIT_POLICY=PASSIVE (they sleep),
alone and while another process keeps one core busy. The four cases take turns, so that what else the machine does
meets all of them; medians are compared.

    python bench/shared_cores.py [--rounds 5] [--steps 60] [--threads N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

POLICY = "OMP_WAIT_POLICY"
BATCH_SIZE, LENGTH = 128, 16
NUM_WARM_UP = 3  # steps that do not count


def train(model_path: str, num_steps: int, num_threads: int) -> float:
    """Return the seconds that some optimizer steps on random tokens take."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, model.config.vocab_size, (BATCH_SIZE, LENGTH))
    started_s = 0.0
    for step in range(NUM_WARM_UP + num_steps):
        if step == NUM_WARM_UP:
            started_s = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return time.perf_counter() - started_s


def measure(arguments: argparse.Namespace, model: Path, policy: str | None, is_shared: bool) -> float:
    """Return the seconds of one training in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != POLICY}
    environment |= {} if policy is None else {POLICY: policy}
    options = ["--steps", str(arguments.steps), "--threads", str(arguments.threads), "--train", str(model)]
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if is_shared else None
    try:
        command = [sys.executable, __file__, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--train", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(train(arguments.train, arguments.steps, arguments.threads))
        return
    from hotseat.demo import make_model

    cases = [(policy, is_shared) for is_shared in (False, True) for policy in (None, "PASSIVE")]
    seconds: dict[tuple[str | None, bool], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_model(model, 0)
        for _ in range(arguments.rounds):
            for case in cases:
                seconds[case].append(measure(arguments, model, *case))
                print(f"{case}: {seconds[case][-1]:.2f} s", file=sys.stderr, flush=True)
    title = (
        f"{arguments.steps} steps, {arguments.threads} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("beside", POLICY, "seconds, median (all)", "times as long as alone and spinning"):
        table.add_column(column)
    base = statistics.median(seconds[cases[0]])
    for (policy, is_shared), found in seconds.items():
        middle = statistics.median(found)
        every = " ".join(f"{each:.1f}" for each in sorted(found))
        beside = "one busy process" if is_shared else "nothing"
        table.add_row(beside, policy or "unset: spins", f"{middle:.2f} ({every})", f"{middle / base:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
