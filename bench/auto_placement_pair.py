"""How well `hotseat plan --auto` predicts real runs: MuJoCo and a small Llama on two cores.

    RAY_worker_niceness=0 python bench/auto_placement_pair.py > bench/results/cpu_auto_placement_pair.txt

The simulators and the policy of `bench/simulator_stages.py`, in whole runs on Ray with two logical devices. Each device
is a core: the processes of a role are kept on the cores of their devices, while the driver's and Ray's own run on
either. The policy samples chunks of actions. An action has so many steps of physics that simulators take about as long
as the policy (--substeps 0: two short runs choose the number first). `hotseat profile` measures one placement
(simulators on one device, the engine on the other, one stage) at four sizes. Then every placement is predicted, and
some are run: the fastest, the slowest, and others at even distances between them. Rewards are all equal, so that
nothing is learned; updates and pushes take their time all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from auto_placement import Result, Row, _spread_out, print_rows
from simulator_stages import BINS, FAMILY, MAX_LENGTH, pin, write_policy

from hotseat.cli.profile import measure
from hotseat.config import Config, loads, to_yaml
from hotseat.loop.rl import launch
from hotseat.loop.rl.auto_placement import Measurement, Profile, measurement_of, ranked
from hotseat.loop.start import start
from hotseat.planning.candidates import Candidate, Refused, candidates
from hotseat.planning.config_plan import make_plan

INVENTORY = "1x2xA100-80G"  # as large as the runs' two logical devices; nothing is limited by its memory
GROUP = 4  # samples of a seed
SIZES = (0.125, 0.25, 0.5, 1.0)  # down to what a device has in 4 stages
FEW, MORE = 5, 20  # substeps that are measured to find the balance
ATTEMPTS = 4  # to measure a placement while the cores are as fast as at first
SLOWER = 1.2  # times as long as at first that a fixed loop takes on cores that are not


@contextlib.contextmanager
def pinned_devices(cores: tuple[int, ...]) -> Iterator[None]:
    """Keep the processes of runs that start in this context on the cores of their devices."""
    launch_groups = launch.launch_groups

    def launch_pinned(context: Any, *arguments: Any) -> launch.Groups:
        groups = launch_groups(context, *arguments)
        for role, group in groups.on_devices(context.plan).items():
            for pid, process in zip(group.pids(), context.plan.role(role).processes, strict=True):
                pin(pid, cores[process.devices[0]])
        return groups

    launch.launch_groups = launch_pinned
    try:
        yield
    finally:
        launch.launch_groups = launch_groups


def loop_ms() -> float:
    """Return the milliseconds of a fixed loop of Python: the speed of the cores, which may change with time."""
    times = []
    for _ in range(50):
        began_s = time.thread_time()
        sum(range(100_000))
        times.append(time.thread_time() - began_s)
    return sorted(times)[len(times) // 2] * 1e3


def config_of(model: Path, num_envs: int, chunk: int, num_turns: int, substeps: int) -> Config:
    return loads(
        f"""
cluster: {{component_placement: {{actor: 0-1, env: 0, rollout: 1}}}}
actor: {{model: {model}}}
env:
  path: {FAMILY}
  tasks: [push]
  kwargs: {{substeps: {substeps}}}
  num_envs: {num_envs}
  max_steps: {chunk * num_turns}
  chunk: {chunk}
  bins: {BINS}
data: {{max_length: {MAX_LENGTH}}}
rollout: {{batch_size: {num_envs // GROUP}, samples_per_prompt: {GROUP}, num_slots: {num_envs}}}
train: {{batch_size: {num_envs}, dtype: fp32}}
"""
    )


def run(config: Config) -> None:
    """Run a config without showing its progress."""
    with open("/dev/null", "w") as nowhere, contextlib.redirect_stdout(nowhere):
        start(config)


def measured(config: Config, num_steps: int, directory: Path) -> Measurement:
    """Run a config for a few steps, of which the first does not count."""
    changes = [f"env.num_seeds={num_steps * config.rollout.batch_size}", f"run_dir={directory}", "name=measured"]
    changed = loads(to_yaml(config), changes)
    run(changed)
    return measurement_of(changed, make_plan(changed), directory / "measured")


def balanced_substeps(model: Path, num_envs: int, chunk: int, num_turns: int, directory: Path) -> int:
    """Return the substeps with which simulators take as long as the policy, from two runs of two steps.

    The policy's seconds are those of whole episodes: samples of a seed differ more with every turn, and an engine reads
    what is alike once.
    """
    turns = []
    for substeps, length in ((FEW, 4), (MORE, num_turns)):
        config = config_of(model, num_envs, chunk, length, substeps)
        costs = measured(config, 2, directory / f"balance-{substeps}").turns
        assert costs is not None
        turns.append(costs)
    few, more = turns
    substep_s = (more.env_s - few.env_s) / (MORE - FEW)
    return max(1, round(MORE + (more.policy_s - more.env_s) / substep_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=8, help="actions of a turn")
    parser.add_argument("--turns", type=int, default=18, help="of an episode")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--substeps", type=int, default=10, help="steps of physics in an action; 0: chosen by two runs")
    parser.add_argument("--steps", type=int, default=3, help="of each placement; the first does not count")
    parser.add_argument("--measured", type=int, default=6, help="0: all")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= 2, "two cores are needed"
    with tempfile.TemporaryDirectory() as name, pinned_devices(tuple(cores[:2])):
        directory = Path(name)
        model = directory / "model"
        write_policy(str(model), arguments.width)
        substeps = arguments.substeps
        if not substeps:
            substeps = balanced_substeps(model, arguments.num_envs, arguments.chunk, arguments.turns, directory)
        print(f"{substeps} substeps an action, {arguments.chunk} actions a turn, {arguments.turns} turns an episode")
        usual_ms = loop_ms()
        print(f"a fixed loop takes {usual_ms:.2f} ms", flush=True)
        config = config_of(model, arguments.num_envs, arguments.chunk, arguments.turns, substeps)
        profiles: list[Profile] = []
        measure(config, run, SIZES, (1,), lambda text: print(text, flush=True), profiles.append)
        made = list(candidates(config, INVENTORY, (1,), (0,)))
        predicted = ranked([each for each in made if isinstance(each, Candidate)], profiles[-1])
        for candidate, prediction in predicted:
            print(f"predicted {prediction.step_s:.2f} s: {candidate}", flush=True)
        rows = []
        for index, (candidate, prediction) in enumerate(_spread_out(predicted, arguments.measured or len(predicted))):
            for attempt in range(ATTEMPTS):
                before_ms = loop_ms()
                took_s = measured(candidate.config, arguments.steps, directory / f"run-{index}-{attempt}").step_s
                slowest_ms = max(before_ms, loop_ms())
                print(f"measured {took_s:.2f} s: {candidate}; a fixed loop takes {slowest_ms:.2f} ms", flush=True)
                if slowest_ms <= SLOWER * usual_ms:
                    break
                then = "measured again" if attempt + 1 < ATTEMPTS else "it counts nevertheless"
                print(f"the cores were slower than at first: {then}")
            rows.append(Row(candidate, prediction, took_s))
    print_rows(Result(rows, len(made), sum(isinstance(each, Refused) for each in made)))


if __name__ == "__main__":
    main()
