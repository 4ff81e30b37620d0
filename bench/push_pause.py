"""How long sampling stands still while an engine with many open requests is given new weights.

Trainer and engine are the loop's own workers, in processes of their own side by side on one device; digests and a
canary of 512 tokens prove each push, as in a run. `stands still` is the longest time without a new token around the
push. With `in_flight: recompute` the keys and values of every open request are computed again afterwards: what that
costs is stated apart, as the time in which the tokens lost after the standstill would have been sampled.

    python bench/push_pause.py                                 Qwen2.5-1.5B's shape, vLLM, 256 requests
    python bench/push_pause.py --model tiny --requests 16      the default without a GPU: transformers engine
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lib.devices import has_gpu
from lib.shapes import VOCAB_SIZES, make_weights, shape
from lib.words import save_tokenizer
from rich.console import Console
from rich.table import Table

from hotseat.cluster import Cluster, Process
from hotseat.loop.rl.sync import push_weights
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.loop.workers.weight_check import Canary
from hotseat.model_source import ModelSource
from hotseat.rollout.kinds import EngineOptions, EngineSettings
from hotseat.train.backend import TrainOptions
from hotseat.types import Request, Sampling
from hotseat.weights.transports import choose_transports

TARGET_S = 0.5
PROMPT_LENGTH, MAX_LENGTH = 23, 4096
SETTLED_S = 2.0  # of sampling before and after each push
Point = tuple[float, int]  # a time and the tokens sampled until then


class WatchedEngine(EngineWorker):
    """An engine that records when its number of sampled tokens grew."""

    def __init__(self, settings: EngineSettings):
        super().__init__(settings)
        self._points: list[Point] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        last = -1
        while True:
            num_sampled = self._engine.health().num_sampled
            if num_sampled != last:
                self._points.append((time.monotonic(), num_sampled))
                last = num_sampled
            time.sleep(0.001)

    def points(self) -> list[Point]:
        points, self._points = self._points, []
        return points


@dataclass(frozen=True)
class Pause:
    """Costs of one push."""

    pace: float  # tokens/s before
    push_s: float
    stands_still_s: float
    recompute_s: float


def measure(points: list[Point], begun_s: float, push_s: float) -> Pause:
    """Read a push from the points around it: the longest gap that touches it, and what is missing afterwards."""
    before = [point for point in points if point[0] < begun_s]
    pace = (before[-1][1] - before[0][1]) / (before[-1][0] - before[0][0])
    around = [
        (later[0] - earlier[0], later)
        for earlier, later in itertools.pairwise(points)
        if later[0] > begun_s and earlier[0] < begun_s + push_s
    ]
    stands_still_s, (resumed_s, num_resumed) = max(around)
    last_s, num_last = points[-1]
    missing = pace * (last_s - resumed_s) - (num_last - num_resumed)
    return Pause(pace, push_s, stands_still_s, max(0.0, missing / pace))


def run(directory: Path, model: str, num_requests: int, num_pushes: int, keeps_cache: bool) -> list[Pause]:
    dtype = "bfloat16" if has_gpu() else "float32"
    engine = "vllm" if has_gpu() else "transformers"
    options = EngineOptions(1, 0.4, True, False, str(directory / "logs"))
    settings = EngineSettings(
        ModelSource(str(directory / model)),
        MAX_LENGTH,
        num_requests,
        (),
        dtype,
        1,
        keeps_cache=keeps_cache,
        engine=engine,
        options=options,
    )
    rng = random.Random(0)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB_SIZES[model]) for _ in range(count))

    requests = [
        Request(f"request {number}", words(PROMPT_LENGTH), Sampling(max_new_tokens=MAX_LENGTH - PROMPT_LENGTH), number)
        for number in range(num_requests)
    ]
    canary = Canary(tuple(words(PROMPT_LENGTH + 128) for _ in range(4)), (PROMPT_LENGTH,) * 4, 1.0)
    pauses = []
    with Cluster(num_devices=None if has_gpu() else 1) as cluster:
        place = [Process(0, devices=(0,))]
        engine = cluster.launch("rollout", WatchedEngine, args=(settings,), processes=place)
        options = TrainOptions(precision="bf16" if has_gpu() else "fp32")
        actor = cluster.launch("actor", ActorWorker, args=(str(directory / model), options, dtype), processes=place)
        transports = choose_transports([[0]], [[0]], is_cuda=has_gpu())
        push_weights(actor, engine, 0, canary, transports)  # the first one allocates, and compiles what is compiled
        engine.call(EngineWorker.submit, "bench", requests)
        for version in range(1, num_pushes + 1):
            engine.call(WatchedEngine.points)
            time.sleep(SETTLED_S)
            begun_s = time.monotonic()
            push_weights(actor, engine, version, canary, transports)
            push_s = time.monotonic() - begun_s
            time.sleep(SETTLED_S)
            [points] = engine.call(WatchedEngine.points)
            [health] = engine.call(EngineWorker.health)
            if health.num_running != num_requests:
                raise SystemExit(f"{health.num_running} of {num_requests} requests are open after push {version}")
            pauses.append(measure(points, begun_s, push_s))
    return pauses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=VOCAB_SIZES, default="1.5B" if has_gpu() else "tiny")
    parser.add_argument("--requests", type=int, default=256 if has_gpu() else 16)
    parser.add_argument("--pushes", type=int, default=4)
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.requests} open requests, {arguments.model}, medians of {arguments.pushes} pushes")
    for column in ("in_flight", "tokens/s before", "push s", "stands still s", "longest", "target", "recomputation s"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        vocab_size = VOCAB_SIZES[arguments.model]
        save_tokenizer(directory / arguments.model, [*(f"w{index}" for index in range(vocab_size)), "<eos>"])
        weights = make_weights(shape(arguments.model, eos_token_id=vocab_size), "cuda" if has_gpu() else "cpu")
        (weights if has_gpu() else weights.float()).save_pretrained(directory / arguments.model)
        del weights
        for in_flight in ("keep", "recompute"):
            pauses = run(directory, arguments.model, arguments.requests, arguments.pushes, in_flight == "keep")
            table.add_row(
                in_flight,
                f"{statistics.median(pause.pace for pause in pauses):,.0f}",
                f"{statistics.median(pause.push_s for pause in pauses):.2f}",
                f"{statistics.median(pause.stands_still_s for pause in pauses):.2f}",
                f"{max(pause.stands_still_s for pause in pauses):.2f}",
                f"{TARGET_S}",
                f"{statistics.median(pause.recompute_s for pause in pauses):.2f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
