"""How well `hotseat plan --auto` predicts steps in simulators, and chooses devices and stages, on eight that sleep.

    python bench/auto_placement_simulators.py [--steps 4] [--measured 6] [--virtual]

A stand-in for a run takes a config and its plan, and sleeps as long as simulators, engines and trainers would work.
Simulators of a stage step together once all have their actions, stages of a process one after another; engines answer
what waits, as many requests at a time as they have slots; episodes differ in length, steps in duration, and what is on
the same device takes turns. The stand-in is profiled on RLinf's hybrid placement with one stage; then every placement
is predicted, some are measured, evenly spread over the predictions, and both are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from auto_placement import SLEEPER, Result, Row, _spread_out, print_result, run_in

from hotseat.config import Config, loads, to_yaml
from hotseat.loop.rl.auto_placement import Profile, measurement_of, ranked
from hotseat.loop.state.run_dir import ARRIVALS
from hotseat.loop.workers.engine_client import engines_of_host
from hotseat.observe import METRICS
from hotseat.placement import Plan, shares_devices
from hotseat.planning.candidates import Candidate, Refused, candidates
from hotseat.planning.config_plan import make_plan, num_data_parallel, stage_slots

CONFIG = """
cluster: {inventory: 1x8xA100-80G, component_placement: {actor: 0-7, env: 0-3, rollout: 4-7}}
actor: {model: Qwen/Qwen2.5-1.5B}
env: {path: gym, tasks: [CartPole-v1], num_envs: 16, memory_gib: 2}
data: {max_length: 64}
rollout: {batch_size: 16, samples_per_prompt: 8}
train: {batch_size: 128, dtype: bf16}
"""
FACTORS = (0.25, 0.5, 1, 2)


@dataclass(frozen=True)
class Truth:
    """Seconds that the devices sleep."""

    step_s: float = 0.010  # of simulators that step together, whatever their number
    simulator_s: float = 0.0040
    answer_s: float = 0.012
    request_s: float = 0.0032
    update_s: float = 0.10
    update_sample_s: float = 0.010
    exchange_s: float = 0.010  # of gradients, for each doubling of the ranks
    sync_s: float = 0.08
    sync_engine_s: float = 0.004
    moves_s: float = 0.25


@dataclass
class Engine:
    """Answers requests, at most `num_slots` at a time, while it has its device."""

    truth: Truth
    num_slots: int
    device: asyncio.Lock
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None

    async def answer(self, num_requests: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((num_requests, done))
        if self.task is None or self.task.done():
            self.task = asyncio.ensure_future(self._serve())
        await done

    async def _serve(self) -> None:
        while self.waiting:
            async with self.device:
                taken = [self.waiting.popleft()]
                while self.waiting and sum(n for n, _ in taken) + self.waiting[0][0] <= self.num_slots:
                    taken.append(self.waiting.popleft())
                await SLEEPER.sleep(self.truth.answer_s + self.truth.request_s * sum(n for n, _ in taken))
            for _, done in taken:
                done.set_result(None)


class StandIn:
    """A run in simulators whose devices sleep."""

    def __init__(self, config: Config, plan: Plan, truth: Truth, seed: int = 0):
        self._config, self._plan, self._truth = config, plan, truth
        self._random = random.Random(seed)
        self._turns: list[tuple[float, float]] = []  # seconds of each sample, and those for which it waited for answers
        self._num_turns = 0

    async def run(self, num_steps: int, run_dir: Path) -> float:
        """Make the steps, record them, and return the mean seconds of those after the first."""
        config, truth, clock = self._config, self._truth, asyncio.get_running_loop().time
        num_ranks = num_data_parallel(config, self._plan)
        per_rank = math.ceil(config.rollout.batch_size / num_ranks) * config.rollout.samples_per_prompt
        num_engines = len(self._plan.role("rollout").processes)
        work = {
            "update": truth.update_s + truth.update_sample_s * per_rank + truth.exchange_s * math.log2(num_ranks),
            "offload": truth.moves_s if shares_devices(self._plan) else 0.0,
            "sync": truth.sync_s + truth.sync_engine_s * num_engines,
        }
        ends = [clock()]
        run_dir.mkdir(parents=True)
        with (run_dir / METRICS).open("w") as metrics, (run_dir / ARRIVALS).open("w") as arrivals:
            for step in range(1, num_steps + 1):
                self._turns, self._num_turns = [], 0
                await self._rollout()
                times = {"time/rollout": clock() - ends[-1]}
                for phase, seconds in work.items():
                    started = clock()
                    await SLEEPER.sleep(seconds)
                    times[f"time/{phase}"] = clock() - started
                ends.append(clock())
                seconds_of = [[took_s, 0.0] for took_s, _ in self._turns]
                line = {"event": "taken", "step": step, "groups": [], "seconds": seconds_of}
                line |= {"num_turns": self._num_turns, "policy_s": sum(policy_s for _, policy_s in self._turns)}
                arrivals.write(json.dumps(line) + "\n")
                metrics.write(json.dumps({"step": step, "step_s": ends[-1] - ends[-2], **times}) + "\n")
        return (ends[-1] - ends[1]) / (num_steps - 1)

    async def _rollout(self) -> None:
        config, plan = self._config, self._plan
        locks = {device: asyncio.Lock() for device in range(plan.inventory.num_devices)}
        slots = stage_slots(config, plan)
        engines = [Engine(self._truth, slots, locks[each.devices[0]]) for each in plan.role("rollout").processes]
        num_samples = config.rollout.batch_size * config.rollout.samples_per_prompt
        lengths = [self._random.randint(8, 16) for _ in range(num_samples)]
        ranks = plan.role("env").processes
        stages = config.rollout.pipeline_stage_num
        size = config.env.num_envs // stages
        work = []
        for at, rank in enumerate(ranks):
            episodes = deque(lengths[at :: len(ranks)])
            preferred = engines_of_host(at, len(ranks), len(engines)) or range(len(engines))
            mine = [engines[index] for index in preferred]
            work += [self._stage(size, episodes, locks[rank.devices[0]], mine) for _ in range(stages)]
        await asyncio.gather(*work)

    async def _stage(self, size: int, episodes: deque[int], device: asyncio.Lock, engines: Sequence[Engine]) -> None:
        """Play episodes that no other stage of the process has taken."""
        clock = asyncio.get_running_loop().time
        left: list[int] = []
        seconds: list[list[float]] = []
        while True:
            while len(left) < size and episodes:
                left.append(episodes.popleft())
                seconds.append([clock(), 0.0])
            if not left:
                return
            asked = clock()
            shares = [len(left[at :: len(engines)]) for at in range(len(engines))]
            await asyncio.gather(*(each.answer(n) for each, n in zip(engines, shares, strict=True) if n))
            answered = clock()
            async with device:
                factor = self._random.uniform(0.9, 1.1)
                await SLEEPER.sleep(factor * (self._truth.step_s + self._truth.simulator_s * len(left)))
            self._num_turns += len(left)
            for at in reversed(range(len(left))):
                left[at] -= 1
                seconds[at][1] += answered - asked
                if left[at] == 0:
                    began, policy_s = seconds.pop(at)
                    left.pop(at)
                    self._turns.append((clock() - began, policy_s))


def profiled(config: Config, truth: Truth, directory: Path, num_steps: int, is_virtual: bool) -> Profile:
    """Profile the stand-in on the config's own placement, at a few sizes, as `hotseat profile` does."""
    measurements = []
    for factor in FACTORS:
        changes = [
            f"rollout.batch_size={round(factor * config.rollout.batch_size)}",
            f"train.batch_size={round(factor * config.train.batch_size)}",
            f"env.num_envs={round(factor * config.env.num_envs)}",
        ]
        changed = loads(to_yaml(config), changes)
        plan, run_dir = make_plan(changed), directory / f"profile-{factor}"
        run_in(is_virtual, StandIn(changed, plan, truth).run(num_steps, run_dir))
        measurements.append(measurement_of(changed, plan, run_dir))
    return Profile(tuple(measurements), {"device": "sleeping"})


def compare(num_steps: int, num_measured: int, is_virtual: bool, *, text: str = CONFIG) -> Result:
    """Profile a config, predict all its placements, and measure some of them."""
    truth, config = Truth(), loads(text)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        profile = profiled(config, truth, directory, num_steps, is_virtual)
        made = list(candidates(config, None, (1,), (0,)))
        predicted = ranked([each for each in made if isinstance(each, Candidate)], profile)
        rows = []
        for index, (candidate, prediction) in enumerate(_spread_out(predicted, num_measured or len(predicted))):
            run = StandIn(candidate.config, candidate.plan, truth, seed=1)
            measured_s = run_in(is_virtual, run.run(num_steps, directory / f"measured-{index}"))
            rows.append(Row(candidate, prediction, measured_s))
    return Result(rows, len(made), sum(isinstance(each, Refused) for each in made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--measured", type=int, default=6, help="0: all")
    parser.add_argument("--virtual", action="store_true")
    arguments = parser.parse_args()
    print_result(compare(arguments.steps, arguments.measured, arguments.virtual))


if __name__ == "__main__":
    main()
