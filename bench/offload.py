"""Offloading a model and onloading it: tensors moved in place (what Hotseat does with every backend) against
DeepSpeed's own `offload_states` and `reload_states`, where those take the model.

A model of Qwen2.5-1.5B's shape without biases, with random weights. Both move weights, gradients and optimizer state
to pinned host memory and back, the same bytes; the first round takes the host memory, the best of the others counts.
What is left on the device is counted by torch. With stage 3 DeepSpeed moves optimizer state only for an optimizer of
its own, so there both move the rest.

    python bench/offload.py     needs a GPU
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from backends import LENGTH, VOCAB_SIZES, make_batch, make_model
from lib.devices import need_gpu

CASES = {f"zero{stage}-{precision}": (stage, precision) for precision in ("bf16", "bf16_master") for stage in (1, 2, 3)}
NUM_ROUNDS = 4


def measure(stage: int, precision: Any, by_deepspeed: bool) -> dict[str, Any]:
    import torch

    from hotseat.loop.workers.objectives import SftObjective
    from hotseat.train.backend import PARTS, TrainOptions, ZeroOptions
    from hotseat.train.packing import split_by_tokens
    from hotseat.train.zero import ZeroBackend

    options = TrainOptions(precision=precision, zero=ZeroOptions(stage), timeout_s=60.0)
    backend = ZeroBackend(make_model("1.5B", "cuda"), options, device="cuda")
    batch = split_by_tokens(make_batch(VOCAB_SIZES["1.5B"], 4), 4 * LENGTH)
    backend.update(batch, SftObjective().loss, 1.0)
    parts = [part for part in PARTS if stage < 3 or part != "optimizer"]
    offload: Callable[[], Any] = lambda: backend.offload(parts)  # noqa: E731
    onload: Callable[[], Any] = lambda: backend.onload(parts)  # noqa: E731
    if by_deepspeed:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        few = [State.lp_params, State.lp_grads, State.contiguous_grad_buffer]
        offload = lambda: backend._engine.offload_states(include=None if stage < 3 else few, non_blocking=True)  # noqa: E731
        onload = lambda: backend._engine.reload_states(non_blocking=True)  # noqa: E731
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    digest = backend.digest(dtype=torch.bfloat16)
    rounds = []
    for _ in range(NUM_ROUNDS):
        times = []
        for move in (offload, onload):
            torch.cuda.synchronize()
            start = time.perf_counter()
            move()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if move is offload:
                left = torch.cuda.memory_allocated()
        rounds.append(times)
    is_same = backend.digest(dtype=torch.bfloat16) == digest
    still_learns = backend.update(batch, SftObjective().loss, 1.0).loss
    backend.close()
    best = [min(each[index] for each in rounds[1:]) for index in range(2)]
    return {
        "gib": (before - left) / 2**30,
        "left_gib": left / 2**30,
        "away_s": best[0],
        "back_s": best[1],
        "rounds": rounds,
        "is_same": is_same,
        "loss": still_learns,
    }


def main() -> None:
    if len(sys.argv) > 1:
        name, way = sys.argv[1:]
        print(json.dumps(measure(*CASES[name], way == "deepspeed")))
        return
    from rich.console import Console
    from rich.table import Table

    need_gpu()
    table = Table(title="offloaded and onloaded, 1.5B")
    for column in ("case", "moved by", "GiB moved", "GiB left", "away s", "back s", "to Hotseat's"):
        table.add_column(column, justify="left" if column in ("case", "moved by") else "right")
    for name in CASES:
        ours: float | None = None
        for way in ("hotseat", "deepspeed"):
            ended = subprocess.run([sys.executable, __file__, name, way], stdout=subprocess.PIPE, text=True)
            if ended.returncode:
                table.add_row(name, way, f"exit {ended.returncode}")
                continue
            found = json.loads(ended.stdout.strip().splitlines()[-1])
            print(json.dumps({"case": name, "way": way, **found}), flush=True)
            total = found["away_s"] + found["back_s"]
            ours = total if way == "hotseat" else ours
            numbers = [found["gib"], found["left_gib"], found["away_s"], found["back_s"], total / (ours or total)]
            table.add_row(name, way, *(f"{number:.2f}" for number in numbers))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
