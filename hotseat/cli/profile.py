"""`hotseat profile CONFIG`: measures the phases of an RL run at a few sizes, for `hotseat plan --auto`."""

from __future__ import annotations

import argparse
import math
import platform
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from hotseat.checks.named_files import num_rows_of
from hotseat.config import Config, load, loads, to_yaml
from hotseat.config.presence import has_simulator
from hotseat.errors import UserError
from hotseat.loop.rl.auto_placement import Measurement, Profile, measurement_of, steps_beside_answers
from hotseat.planning.candidates import refuse_fixed_roles
from hotseat.planning.config_plan import make_plan

NUM_STEPS = 4  # of each short run; the first does not count
MAX_FACTOR = 4  # a larger batch than this many steps is not measured
RUN_NAME = "measured"


def run_profile(arguments: argparse.Namespace) -> int:
    """Make a short run at each size, and write what was measured so far after each of them."""
    factors = None if arguments.sizes is None else numbers(arguments.sizes)
    sizes = None if arguments.tensor_parallel is None else whole_numbers(arguments.tensor_parallel)
    path, output = arguments.config, Path(arguments.output)
    config = load(path, arguments.overrides)
    if not config.has_rollouts:
        raise UserError(f"task is {config.task}: `hotseat profile` measures the phases of task rl")
    refuse_fixed_roles(config)
    from hotseat.loop.start import start

    def keep(profile: Profile) -> None:
        output.write_text(profile.to_json())

    measure(config, start, factors, sizes or (config.rollout.tensor_parallel_size,), print, keep)
    print(f"{output}: for `hotseat plan {path} --auto {output}`")
    return 0


def measure(
    config: Config,
    start: Callable[[Config], object],
    factors: Sequence[float] | None,
    sizes: Sequence[int],
    show: Callable[[str], object],
    keep: Callable[[Profile], object],
) -> None:
    """Run a config at several batch sizes and tensor-parallel sizes, each for a few steps, in a temporary directory.

    keep: called after each run with the profile of all runs so far.
    """
    factors = factors or default_factors(config)
    if has_simulator(config) and steps_beside_answers(make_plan(config)):
        show(
            "Simulators step on devices where an engine answers others meanwhile, so the seconds measured for either"
            " include waiting for the other: placements without that may be faster than predicted. To measure them"
            " apart, give env and rollout devices of their own."
        )
    about = {
        "model": str(config.actor.model),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "hotseat": version("hotseat"),
    }
    measurements: list[Measurement] = []
    for size in sizes:
        for factor in factors:
            with tempfile.TemporaryDirectory(prefix="hotseat-profile-") as directory:
                short = _short(config, factor, size, directory)
                start(short)
                measured = measurement_of(short, make_plan(short), Path(directory) / RUN_NAME)
            show(
                f"{measured.samples_per_engine:.0f} samples per engine, {measured.samples_per_rank:.0f} per rank:"
                + "".join(f" {phase} {seconds:.2f} s" for phase, seconds in measured.phases.items())
            )
            if measured.turns is not None:
                turns = measured.turns
                show(
                    f"{turns.envs_per_call:.0f} simulators step in {turns.env_s:.3g} s; the policy answers"
                    f" {turns.requests_per_engine:.0f} requests per engine in {turns.policy_s:.3g} s"
                )
            measurements.append(measured)
            keep(Profile(tuple(measurements), about))


def default_factors(config: Config) -> list[float]:
    """Return the batch sizes to measure, as multiples of the config's.

    They reach from what an engine would have if every device had one to what it has if few do.
    """
    if has_simulator(config):
        return [0.25, 0.5, 1.0, 2.0]  # from a stage of four, or four env processes for one, to one for two
    plan = make_plan(config)
    share = len(plan.role("rollout").processes) / max(1, plan.inventory.num_devices)
    factors: list[float] = []
    factor = 1.0
    while factor / 2 >= share and len(factors) < 3:
        factor /= 2
        factors.append(factor)
    return [*reversed(factors), 1.0, *([2.0, float(MAX_FACTOR)] if len(factors) < 2 else [])]


def _short(config: Config, factor: float, size: int, directory: str) -> Config:
    """Return the config with a scaled batch, for a few synchronous steps that leave nothing behind."""
    groups, samples = factor * config.rollout.batch_size, factor * config.train.batch_size
    if groups != int(groups) or samples != int(samples) or not groups:
        raise UserError(
            f"a batch {factor:g} times as large is no whole number: rollout.batch_size is"
            f" {config.rollout.batch_size}, train.batch_size {config.train.batch_size}; choose others by --sizes"
        )
    changes = [
        f"rollout.batch_size={int(groups)}",
        f"train.batch_size={int(samples)}",
        *(_of_simulators if has_simulator(config) else _of_data)(config, factor, int(groups)),
        "overlap={}",
        "checkpoint={every_minutes: 0}",
        "eval={}",
        "log={}",
        f"run_dir={directory}",
        f"name={RUN_NAME}",
    ]
    if size != config.rollout.tensor_parallel_size:
        changes.append(f"rollout.tensor_parallel_size={size}")
    return loads(to_yaml(config), changes, forget_idle=True)


def _of_data(config: Config, factor: float, num_groups: int) -> list[str]:
    """Return the settings with which the data last for `NUM_STEPS` steps."""
    num_rows = min(num_groups, num_rows_of(config) or num_groups)
    return [f"data.max_samples={num_rows}", f"train.num_episodes={math.ceil(NUM_STEPS * num_groups / num_rows)}"]


def _of_simulators(config: Config, factor: float, num_groups: int) -> list[str]:
    """Return the same for simulators, of which there are as many more or fewer as samples, in one stage.

    Stages are not measured but predicted: from what fewer simulators, and fewer requests, take at a time.
    """
    num_tasks = max(1, len(config.env.tasks))
    num_seeds = math.ceil(num_groups / num_tasks)
    return [
        f"env.num_envs={max(1, round(factor * config.env.num_envs))}",
        f"env.num_seeds={num_seeds}",
        "env.eval_seeds=0",
        "rollout.pipeline_stage_num=1",
        f"train.num_episodes={math.ceil(NUM_STEPS * num_groups / (num_tasks * num_seeds))}",
    ]


def whole_numbers(text: str) -> list[int]:
    values = numbers(text)
    if any(each != int(each) for each in values):
        raise UserError(f"{text!r}: all numbers have to be whole: write them as 1,2,4")
    return [int(each) for each in values]


def numbers(text: str) -> list[float]:
    try:
        values = [float(each) for each in text.split(",")]
    except ValueError:
        raise UserError(f"{text!r} is no list of numbers: write them as 1,2,4") from None
    if not all(each > 0 for each in values):
        raise UserError(f"{text!r}: all numbers have to be above 0")
    return values
