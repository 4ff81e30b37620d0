"""How well `hotseat plan --auto` predicts steps and chooses a placement, on eight devices that sleep.

    python bench/auto_placement.py [--steps 12] [--measured 6] [--scale 1] [--virtual]

A stand-in for a run takes a config and its plan, sleeps as long as engines and trainers of its devices would work, and
records what a run records. Engines decode step by step with as many sequences as are open, whose lengths differ;
updates exchange gradients, longer with more ranks; a push takes longer with more engines: what the prediction does not
model is there. The stand-in is profiled on one placement (all roles on all devices). Then every placement is predicted,
some are measured, evenly spread over the predictions, and both are compared. --virtual: by a clock that does not wait.
--scale: all sleeps are so many times as long, so that a busy machine matters less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import selectors
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from hotseat.config import Config, loads, to_yaml
from hotseat.config.resolved import overlap_queue
from hotseat.loop.rl.auto_placement import Prediction, Profile, measurement_of, ranked
from hotseat.loop.rl.pacer import Awaited, Pace, Pacer
from hotseat.loop.state.run_dir import ARRIVALS
from hotseat.observe import METRICS
from hotseat.placement import Plan, shares_devices
from hotseat.planning.candidates import Candidate, Refused, candidates
from hotseat.planning.config_plan import make_plan, num_data_parallel
from hotseat.planning.role_specs import engine_slots

T = TypeVar("T")

CONFIG = """
cluster: {inventory: 1x8xA100-80G, component_placement: {actor: all, rollout: all}}
actor: {model: Qwen/Qwen2.5-1.5B}
reward: {function: reward.py}
data: {path: prompts.jsonl}
rollout: {engine: vllm, batch_size: 64, samples_per_prompt: 4, memory_share: 0.4}
train: {batch_size: 256, dtype: bf16}
"""
FACTORS = (1, 2, 4)  # sizes of the profile: batches of one, two and four steps
SIZES = (1, 2)  # tensor-parallel sizes
STALENESS = (0, 1, 2)
QUANTUM = 32  # tokens that an engine decodes between two looks at its requests


@dataclass(frozen=True)
class Truth:
    """Seconds that the devices sleep."""

    decode_s: float = 0.0030  # of a decoding step, whatever its number of sequences
    sequence_s: float = 0.00006  # of a decoding step, for each of its sequences
    prepare_s: float = 0.05
    prepare_sample_s: float = 0.004
    update_s: float = 0.10
    update_sample_s: float = 0.012
    exchange_s: float = 0.010  # of gradients, for each doubling of the ranks
    sync_s: float = 0.08
    sync_engine_s: float = 0.004
    moves_s: float = 0.25
    mean_tokens: float = 160.0

    def scaled(self, factor: float) -> Truth:
        """Return the same with all seconds times a factor."""
        return Truth(**{name: value * (1 if name == "mean_tokens" else factor) for name, value in vars(self).items()})

    def decode(self, num_sequences: int, size: int) -> float:
        """Return the seconds of a decoding step of an engine; tensor parallelism saves less than its size."""
        return self.decode_s / size**0.6 + self.sequence_s * num_sequences / size**0.85


@dataclass
class Sleeper:
    """Sleeps, and counts by how much sleeps were too long: a busy machine wakes its processes late."""

    asked_s: float = 0.0
    slept_s: float = 0.0

    async def sleep(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        await asyncio.sleep(seconds)
        self.asked_s += seconds
        self.slept_s += clock() - started

    @property
    def lateness(self) -> float:
        return self.slept_s / self.asked_s - 1


SLEEPER = Sleeper()


@dataclass
class Engine:
    """Decodes the requests that it has, at most `num_slots` at a time, and sleeps meanwhile."""

    truth: Truth
    size: int
    num_slots: int
    open: list[list[Any]] = field(default_factory=list)  # tokens left, future
    queued: list[list[Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return len(self.open) + len(self.queued)

    async def generate(self, num_tokens: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queued.append([num_tokens, done])
        if self.task is None or self.task.done():
            self.task = asyncio.ensure_future(self._decode())
        await done

    async def _decode(self) -> None:
        while self.load:
            room = self.num_slots - len(self.open)
            self.open += self.queued[:room]
            del self.queued[:room]
            await SLEEPER.sleep(QUANTUM * self.truth.decode(len(self.open), self.size))
            for request in self.open:
                request[0] -= QUANTUM
                if request[0] <= 0:
                    request[1].set_result(None)
            self.open = [request for request in self.open if request[0] > 0]


class StandIn:
    """A run whose devices sleep: the steps of a config under its plan."""

    def __init__(self, config: Config, plan: Plan, truth: Truth, seed: int = 0):
        self._config, self._truth = config, truth
        self._is_shared = shares_devices(plan)
        self._num_ranks = num_data_parallel(config, plan)
        size, slots = config.rollout.tensor_parallel_size, engine_slots(config)
        self._engines = [Engine(truth, size, slots) for _ in plan.role("rollout").processes]
        self._random = random.Random(seed)
        self._seconds: dict[int, list[float]] = {}  # of each ticket's episodes

    async def run(self, num_steps: int, run_dir: Path) -> float:
        """Make the steps, record them, and return the mean seconds of those after the first two."""
        config, truth, clock = self._config, self._truth, asyncio.get_running_loop().time
        per_step, overlap = config.rollout.batch_size, config.overlap
        num_groups = per_step * (num_steps + 1 + overlap.staleness)  # the last measured step is like the others
        pacer = Pacer(Pace(per_step, overlap.staleness, overlap_queue(config), overlap.order, num_groups))
        arrived, tasks, ends = asyncio.Event(), set[asyncio.Task[None]](), [clock()]

        async def collect(ticket: int) -> None:
            await self._group(ticket)
            pacer.arrive(ticket)
            arrived.set()

        def begin() -> None:
            for ticket in pacer.admit():
                task = asyncio.ensure_future(collect(ticket))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        run_dir.mkdir(parents=True)
        with (run_dir / METRICS).open("w") as metrics, (run_dir / ARRIVALS).open("w") as arrivals:
            for step in range(1, num_steps + 1):
                begin()
                while isinstance(chosen := pacer.batch(), Awaited):
                    arrived.clear()
                    await arrived.wait()
                pacer.take(chosen)
                times = {"time/rollout": clock() - ends[-1]}
                if overlap.staleness:
                    begin()
                per_rank = math.ceil(per_step / self._num_ranks) * config.rollout.samples_per_prompt
                work = {
                    "prepare": truth.prepare_s + truth.prepare_sample_s * per_rank,
                    "update": truth.update_s
                    + truth.update_sample_s * per_rank
                    + truth.exchange_s * math.log2(self._num_ranks),
                    "offload": truth.moves_s if self._is_shared else 0.0,
                    "sync": truth.sync_s + truth.sync_engine_s * len(self._engines),
                }
                for phase, seconds in work.items():
                    if phase == "sync" and overlap.in_flight == "wait" and tasks:
                        await asyncio.wait(tasks)
                    started = clock()
                    await SLEEPER.sleep(seconds)
                    times[f"time/{phase}"] = clock() - started
                pacer.trained()
                ends.append(clock())
                seconds_of = [[*self._seconds.pop(ticket), 0.0] for ticket in chosen]
                arrivals.write(
                    json.dumps({"event": "taken", "step": step, "groups": list(chosen), "seconds": seconds_of}) + "\n"
                )
                metrics.write(json.dumps({"step": step, "step_s": ends[-1] - ends[-2], **times}) + "\n")
        return (ends[-1] - ends[2]) / (num_steps - 2)

    async def _group(self, ticket: int) -> None:
        started = asyncio.get_running_loop().time()

        async def episode() -> float:
            tokens = min(
                4 * self._truth.mean_tokens, self._random.lognormvariate(math.log(self._truth.mean_tokens), 0.4)
            )
            await min(self._engines, key=lambda engine: engine.load).generate(round(tokens))
            return asyncio.get_running_loop().time() - started

        samples = [episode() for _ in range(self._config.rollout.samples_per_prompt)]
        self._seconds[ticket] = list(await asyncio.gather(*samples))


class _NoWait(selectors.DefaultSelector):
    """A selector that does not wait: it moves the clock of its loop instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once."""

    def __init__(self) -> None:
        self._virtual = _NoWait()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in(is_virtual: bool, work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop if is_virtual else None) as runner:
        return runner.run(work)


@dataclass(frozen=True)
class Row:
    """One placement: predicted and measured."""

    candidate: Candidate
    predicted: Prediction
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.measured_s - 1


@dataclass(frozen=True)
class Result:
    rows: list[Row]
    num_enumerated: int
    num_refused: int

    @property
    def spread(self) -> float:
        measured = [row.measured_s for row in self.rows]
        return max(measured) / min(measured)

    @property
    def loss_of_choice(self) -> float:
        """Return by how much the chosen placement, which is the first row, is slower than the best one measured."""
        return self.rows[0].measured_s / min(row.measured_s for row in self.rows) - 1


def profiled(
    config: Config, truth: Truth, directory: Path, num_steps: int, is_virtual: bool, sizes: Sequence[int]
) -> Profile:
    """Profile the stand-in on the config's own placement, at a few sizes."""
    measurements = []
    for size in sizes:
        for factor in FACTORS:
            changes = [
                f"rollout.batch_size={factor * config.rollout.batch_size}",
                f"train.batch_size={factor * config.train.batch_size}",
            ]
            if size != config.rollout.tensor_parallel_size:
                changes.append(f"rollout.tensor_parallel_size={size}")
            changed = loads(to_yaml(config), changes)
            plan, run_dir = make_plan(changed), directory / f"profile-{size}-{factor}"
            run_in(is_virtual, StandIn(changed, plan, truth).run(num_steps, run_dir))
            measurements.append(measurement_of(changed, plan, run_dir))
    return Profile(tuple(measurements), {"device": "sleeping"})


def compare(
    num_steps: int,
    num_measured: int,
    is_virtual: bool,
    *,
    text: str = CONFIG,
    sizes: Sequence[int] = SIZES,
    staleness: Sequence[int] = STALENESS,
    scale: float = 1.0,
) -> Result:
    """Profile a config, predict all its placements, and measure some of them."""
    truth, config = Truth().scaled(scale), loads(text)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        profile = profiled(config, truth, directory, num_steps, is_virtual, sizes)
        made = list(candidates(config, None, sizes, staleness))
        possible = [each for each in made if isinstance(each, Candidate)]
        predicted = ranked(possible, profile)
        chosen = _spread_out(predicted, num_measured)
        rows = []
        for index, (candidate, prediction) in enumerate(chosen):
            run = StandIn(candidate.config, candidate.plan, truth, seed=1)  # other answers than in the profile
            measured_s = run_in(is_virtual, run.run(num_steps, directory / f"measured-{index}"))
            rows.append(Row(candidate, prediction, measured_s))
    return Result(rows, len(made), sum(isinstance(each, Refused) for each in made))


def _spread_out(predicted: Sequence[T], count: int) -> list[T]:
    """Take the first, the last, and others at even distances."""
    last = len(predicted) - 1
    return [predicted[round(index * last / max(1, count - 1))] for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--measured", type=int, default=6)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--virtual", action="store_true")
    arguments = parser.parse_args()
    print_result(compare(arguments.steps, arguments.measured, arguments.virtual, scale=arguments.scale))


def print_result(result: Result) -> None:
    print_rows(result)
    print(f"sleeps took {SLEEPER.lateness:+.1%} of what was asked for")


def print_rows(result: Result) -> None:
    print(f"{result.num_enumerated} placements, of which {result.num_refused} are refused; {len(result.rows)} measured")
    for row in result.rows:
        numbers = f"predicted {row.predicted.step_s:6.2f} s  measured {row.measured_s:6.2f} s  {row.error:+6.1%}"
        print(f"{numbers}  {row.candidate}")
    errors = [abs(row.error) for row in result.rows]
    print(f"spread {result.spread:.2f}; error mean {fmean(errors):.1%}, largest {max(errors):.1%};", end=" ")
    print(f"the choice is {result.loss_of_choice:.1%} slower than the best that was measured")


if __name__ == "__main__":
    main()
