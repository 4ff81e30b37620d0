"""How well `hotseat plan --auto` predicts real runs: MuJoCo and a small Llama on two cores.

    RAY_worker_niceness=0 python bench/auto_placement_pair.py --max-steps 6 > bench/results/cpu_auto_placement_pair.txt

The simulators and the policy of `bench/simulator_stages.py`, in whole runs on Ray with two logical devices. `hotseat
profile` measures one placement (simulators on one device, the engine on the other, one stage) at four sizes. Then every
placement is predicted, and every one is run: all roles on both devices, or simulators and engine on one each, in 1, 2
and 4 stages. Rewards are all equal, so that nothing is learned; updates and pushes take their time all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

from auto_placement import Result, Row, print_rows
from simulator_stages import BINS, FAMILY, MAX_LENGTH, write_policy

from hotseat.cli.profile import measure
from hotseat.config import Config, loads, to_yaml
from hotseat.loop.planning.candidates import Candidate, Refused, candidates
from hotseat.loop.planning.plan import make_plan
from hotseat.loop.rl.auto_placement import Profile, measurement_of, ranked
from hotseat.loop.start import start

INVENTORY = "1x2xA100-80G"  # as large as the runs' two logical devices; nothing is limited by its memory
SIZES = (0.125, 0.25, 0.5, 1.0)  # down to what a device has in 4 stages


def config_of(model: Path, num_envs: int, max_steps: int, substeps: int) -> Config:
    return loads(
        f"""
cluster: {{component_placement: {{actor: 0-1, env: 0, rollout: 1}}}}
actor: {{model: {model}}}
env:
  path: {FAMILY}
  tasks: [push]
  kwargs: {{substeps: {substeps}}}
  num_envs: {num_envs}
  max_steps: {max_steps}
  bins: {BINS}
data: {{max_length: {MAX_LENGTH}}}
rollout: {{batch_size: {num_envs // 8}, samples_per_prompt: 8, num_slots: {num_envs}}}
train: {{batch_size: {num_envs}, dtype: fp32}}
"""
    )


def run(config: Config) -> None:
    """Run a config without showing its progress."""
    with open("/dev/null", "w") as nowhere, contextlib.redirect_stdout(nowhere):
        start(config)


def measured_s(config: Config, num_steps: int, directory: Path) -> float:
    """Run a config for a few steps; return the mean seconds of those after the first."""
    changes = [f"env.num_seeds={num_steps * config.rollout.batch_size}", f"run_dir={directory}", "name=measured"]
    changed = loads(to_yaml(config), changes)
    run(changed)
    return measurement_of(changed, make_plan(changed), directory / "measured").step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--substeps", type=int, default=82)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_policy(str(directory / "model"), arguments.width)
        config = config_of(directory / "model", arguments.num_envs, arguments.max_steps, arguments.substeps)
        profiles: list[Profile] = []
        measure(config, run, SIZES, (1,), lambda text: print(text, flush=True), profiles.append)
        made = list(candidates(config, INVENTORY, (1,), (0,)))
        predicted = ranked([each for each in made if isinstance(each, Candidate)], profiles[-1])
        rows = []
        for index, (candidate, prediction) in enumerate(predicted):
            took_s = measured_s(candidate.config, arguments.steps, directory / f"run-{index}")
            rows.append(Row(candidate, prediction, took_s))
            print(f"measured {took_s:.2f} s: {candidate}", flush=True)
    print_rows(Result(rows, len(made), sum(isinstance(each, Refused) for each in made)))


if __name__ == "__main__":
    main()
