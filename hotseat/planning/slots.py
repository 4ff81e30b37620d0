"""Sequences that an engine decodes at a time, where `rollout.num_slots` is unset.

On a GPU a step of small models takes little longer for many sequences than for few. So there are as many slots as a
step has samples for an engine, up to `MAX_SLOTS`, whose KV cache takes at most `CACHE_SHARE` of the device, and with
which the plan fits without offloading more. On CPUs the number never depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hotseat.config import Config
from hotseat.config.presence import has_simulator
from hotseat.errors import PlacementError
from hotseat.placement import GIB, Plan
from hotseat.placement.memory import sequence_cache_bytes
from hotseat.placement.memory_settings import EngineMemory
from hotseat.planning.role_specs import engine_of, role_specs

MAX_SLOTS = 1024
UNPRICED_SLOTS = 256  # where the plan does not know the memory of the model or of the device
CACHE_SHARE = 0.4  # of a device's memory, for the KV cache of all slots
_UNIT = 64


def is_chosen_by_run(config: Config) -> bool:
    """Tell whether the run chooses how many sequences an engine decodes at a time."""
    can_choose = config.has_rollouts and "num_slots" in engine_of(config).options and not has_simulator(config)
    return can_choose and config.rollout.num_slots is None


def with_slots(
    config: Config, plan_with: Callable[[Config], Plan], is_anything_offloaded: Callable[[Plan], bool]
) -> Config:
    """Return the config with slots for the devices of `plan_with`, which plans a config."""
    if not is_chosen_by_run(config):
        return config
    made = plan_with(config)
    engines = made.role("rollout").processes
    memory, model = next((s.memory, s.model) for s in role_specs(config) if s.name == "rollout")
    device = made.inventory.nodes[engines[0].node].device_kind.memory_gib if engines else None
    num_samples = -(-config.rollout.batch_size * config.rollout.samples_per_prompt // max(1, len(engines)))
    most = min(MAX_SLOTS, max(_UNIT, -(-num_samples // _UNIT) * _UNIT))
    if model is None or device is None or not isinstance(memory, EngineMemory):
        return config.with_options({"rollout.num_slots": min(most, UNPRICED_SLOTS)})
    slot_gib = sequence_cache_bytes(memory, model) / GIB
    most = max(_UNIT, min(most, int(CACHE_SHARE * device / slot_gib) // _UNIT * _UNIT))
    least = config.with_options({"rollout.num_slots": _UNIT})
    has_moves = is_anything_offloaded(plan_with(least))
    for count in (most, *(fewer for fewer in (768, 512, 384, 256, 192, 128) if fewer < most)):
        chosen = config.with_options({"rollout.num_slots": count})
        with suppress(PlacementError):
            made = plan_with(chosen)
            if made.verdict == "fits" and is_anything_offloaded(made) == has_moves:
                return chosen
    return least
