"""Runs the suite's scenarios in a group of processes on loopback, within a deadline.

python -m PACKAGE.run_ranks FACTORY DIRECTORY SUITE SCENARIOS   (one rank; RANK etc. are in the environment)
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import preloaded
import torch
import torch.distributed as dist
from rank_cases import meeting

from hotseat.errors import DeadlineError
from hotseat.train.ranks import Ranks

SUITE = f"{__package__}.conformance"
TIMEOUT_S = 900  # of a group on a busy machine; one that hangs does so in a collective, for two minutes


def run_ranks(
    num_ranks: int,
    factory: str,
    directory: Path,
    *,
    timeout_s: float = TIMEOUT_S,
    suite: str = SUITE,
    scenarios: str = "SCENARIOS",
) -> list[dict[str, Any]]:
    """Every rank's results by scenario. A scenario that failed has its traceback there instead."""
    directory.mkdir(parents=True, exist_ok=True)
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", __name__, factory, str(directory), suite, scenarios]
    processes = []
    with meeting(num_ranks) as environments:
        try:
            for rank, own in enumerate(environments):
                with open(directory / f"log-{rank}.txt", "w") as log:
                    processes.append(
                        preloaded.popen(command, env={**common, **own}, stdout=log, stderr=preloaded.STDOUT)
                    )
            deadline = time.monotonic() + timeout_s
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    logs = "\n".join((directory / f"log-{rank}.txt").read_text()[-4000:] for rank in range(num_ranks))
    assert all(process.returncode == 0 for process in processes), logs
    return [torch.load(directory / f"results-{rank}.pt", weights_only=True) for rank in range(num_ranks)]


ABSENT = "waits_for_an_absent_rank"


def wait_for_an_absent_rank(rank: int) -> str:
    """The first rank waits, the others have gone elsewhere: what it is told."""
    ranks = Ranks(torch.device("cpu"), 2.0)
    dist.barrier()  # to meet in the group they have no more than two seconds either
    ranks.facts = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2))
    if rank > 0:
        time.sleep(4)
        return ""
    try:
        ranks.max(1, "agree on the number of micro-batches")
    except DeadlineError as error:
        return str(error)
    return "nothing"


def _meet(make: Callable[..., Any]) -> None:
    """Once each has loaded all that a backend needs, which takes one rank much longer than another on a busy machine.

    From then on they wait for each other for two minutes.
    """
    common = importlib.import_module(SUITE)
    make(common.tiny_model(), replace(common.OPTIONS, timeout_s=TIMEOUT_S)).close()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=120), dist.group.WORLD)


def main(factory: str, directory: Path, suite: str, scenarios: str) -> None:
    made_by = importlib.import_module(factory)
    # A backend may have more to show.
    has_more = suite == SUITE and hasattr(made_by, scenarios)
    chosen = getattr(made_by if has_more else importlib.import_module(suite), scenarios)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Started here, so that it outlives the backends of each scenario.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    _meet(made_by.make)
    results: dict[str, Any] = {}
    for name, scenario in chosen.items():
        print(f"{name} ...", flush=True)
        try:
            results[name] = scenario(made_by.make, rank, num_ranks, directory)
        except Exception:
            # The others may be waiting for this rank: report, and let their own deadline end them.
            results[name] = traceback.format_exc()
            print(f"{name}:\n{results[name]}", flush=True)
    if scenarios == "SCENARIOS":  # the same for every suite
        results[ABSENT] = wait_for_an_absent_rank(rank)
    torch.save(results, directory / f"results-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])
