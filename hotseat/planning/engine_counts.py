"""Engines on each device, where `rollout.num_engines` is unset.

vLLM works in Python for every sequence of every step, and a small model leaves its device idle meanwhile. So a run on
GPUs starts several engines on each, as `PER_DEVICE` says, if the plan fits with them without offloading more. Their
default memory share is divided among them. On CPUs the number never depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hotseat.config import Config
from hotseat.errors import PlacementError
from hotseat.placement import Plan
from hotseat.planning.role_specs import engine_of, shape_of_role

# Parameters below which a device is shared by so many engines, as measured on an H200.
PER_DEVICE = ((5e8, 3), (3e9, 2))
MIN_SEQUENCES = 64  # of a step for each engine


def most_engines(config: Config) -> int:
    """Return how many engines a device is worth to this config's model."""
    shape, _ = shape_of_role(config, "actor")
    if not config.has_rollouts or shape is None or not engine_of(config).is_busy_per_sequence:
        return 1
    return next((count for limit, count in PER_DEVICE if shape.num_parameters < limit), 1)


def is_number_chosen_by_run(config: Config) -> bool:
    """Tell whether the run chooses how many engines it has."""
    rollout = config.rollout
    is_set = rollout.num_engines is not None or rollout.memory_share is not None or rollout.tensor_parallel_size > 1
    return not is_set and most_engines(config) > 1


def with_engines(
    config: Config, plan_with: Callable[[Config], Plan], is_anything_offloaded: Callable[[Plan], bool]
) -> Config:
    """Return the config with engines for the devices of `plan_with`, which plans a config."""
    if not is_number_chosen_by_run(config):
        return config
    made = plan_with(config)
    engines = made.role("rollout").processes
    is_shared = any(process.fraction < 1 for process in engines)  # the placement says how many there are
    if not engines or is_shared or not all(process.devices for process in engines):
        return config
    num_sequences = config.rollout.batch_size * config.rollout.samples_per_prompt // len(engines)
    for count in range(min(most_engines(config), num_sequences // MIN_SEQUENCES), 1, -1):
        chosen = config.with_options({"rollout.num_engines": count * len(engines)})
        with suppress(PlacementError):
            several = plan_with(chosen)
            if several.verdict == "fits" and is_anything_offloaded(several) == is_anything_offloaded(made):
                return chosen
    return config
