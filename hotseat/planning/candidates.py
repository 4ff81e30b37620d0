"""Enumerates placements of an RL run: which devices train, which sample, with how many engines and how stale.

With simulators: which devices have them, how many each process of the role env has, and in how many stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hotseat.config import Config, loads, roles_of, to_yaml
from hotseat.config.batches import batch_algebra
from hotseat.config.presence import has_simulator
from hotseat.errors import UserError
from hotseat.placement.inventory import Inventory
from hotseat.placement.plan_types import Plan
from hotseat.planning.advisor import as_overrides, as_yaml
from hotseat.planning.config_plan import machines_of, make_plan, num_data_parallel
from hotseat.planning.search import Settings
from hotseat.words import quantity

STAGES = (1, 2, 4)  # of simulators


@dataclass(frozen=True)
class Candidate:
    """A placement that fits: the settings to paste, the config with them, and its plan."""

    settings: Settings
    config: Config
    plan: Plan

    @property
    def num_engines(self) -> int:
        return len(self.plan.role("rollout").processes)

    @property
    def num_ranks(self) -> int:
        return num_data_parallel(self.config, self.plan)

    def as_yaml(self) -> str:
        return as_yaml(self.settings)

    def __str__(self) -> str:
        placement = self.settings["cluster.component_placement"]
        shape = f"actor {placement['actor']}, rollout {placement['rollout']}"
        if has_simulator(self.config):
            shape += f", env {placement['env']} with {quantity(self.config.rollout.pipeline_stage_num, 'stage')}"
        if self.config.rollout.tensor_parallel_size > 1:
            shape += f" with tensor parallel size {self.config.rollout.tensor_parallel_size}"
        return f"{shape}, staleness {self.config.overlap.staleness}"


@dataclass(frozen=True)
class Refused:
    """A placement that is not possible, and why."""

    settings: Settings
    because: str


def refuse_fixed_roles(config: Config) -> None:
    """Raise for a config whose placement has roles that are neither measured nor moved."""
    if "inference" in roles_of(config):
        raise UserError(
            "this config has the role inference: `hotseat profile` does not measure it, and `hotseat plan --auto`"
            " does not place it; compare placements by `hotseat plan`"
        )


def candidates(
    config: Config, inventory: str | Inventory | None, sizes: Sequence[int], staleness: Sequence[int]
) -> Iterator[Candidate | Refused]:
    """Yield every placement of actor and rollout on the inventory, with these tensor-parallel sizes and staleness.

    Actor and rollout share all devices, or the rollout has the last of the actor's, or they share none. Other models
    have the actor's devices. Staleness above 0 is tried where they share none, since rollout and training take
    turns otherwise.
    """
    refuse_fixed_roles(config)
    num_devices = (machines_of(config, inventory) or make_plan(config).inventory).num_devices
    elsewhere = {role: on for role, on in config.cluster.component_placement.items() if on == "none"}
    others = [role for role in roles_of(config) if role not in ("actor", "rollout", "env", *elsewhere)]
    arrangements = (
        _with_simulators(config, inventory, num_devices, sizes)
        if has_simulator(config)
        else _without_simulators(num_devices, sizes, staleness)
    )
    for devices, settings in arrangements:
        if settings["overlap.staleness"] == 0:
            settings |= _without_overlap(config)
        placement = {role: _ranks(chosen) for role, chosen in devices.items()} | dict.fromkeys(others, "@actor")
        placed = {"cluster.component_placement": {**placement, **elsewhere}}
        num_engines = len(devices["rollout"]) // settings["rollout.tensor_parallel_size"]
        if "env" in devices and len(devices["env"]) % num_engines and num_engines % len(devices["env"]):
            because = "neither the number of env processes nor that of engines divides the other"
            yield Refused(placed | settings, because)
            continue
        changed = {key: value for key, value in settings.items() if value != attrgetter(key)(config)}
        yield _tried(config, inventory, {**placed, **changed})


_Arrangements = Iterator[tuple[dict[str, range], dict[str, Any]]]  # devices of roles, and settings


def _without_simulators(num_devices: int, sizes: Sequence[int], staleness: Sequence[int]) -> _Arrangements:
    everything, counts = range(num_devices), range(1, num_devices)
    shared = [(everything, range(num_devices - count, num_devices)) for count in (num_devices, *counts)]
    apart = [(range(count), range(count, num_devices)) for count in counts]
    for size in sizes:
        for actor, rollout in (*shared, *apart):
            if len(rollout) % size:
                continue
            for age in (0,) if actor == everything else staleness:
                settings = {"rollout.tensor_parallel_size": size, "rollout.num_engines": None, "overlap.staleness": age}
                yield {"actor": actor, "rollout": rollout}, settings


def _with_simulators(
    config: Config, inventory: str | Inventory | None, num_devices: int, sizes: Sequence[int]
) -> _Arrangements:
    """Yield arrangements of as many simulators as the config has, in any number of env processes and stages.

    They are synchronous: what staleness gains in simulators is not predicted.
    """
    num_envs = config.env.num_envs * len(make_plan(config, inventory).role("env").processes)
    for size in sizes:
        for actor, env, rollout in _splits_in_three(num_devices):
            per_process, rest = divmod(num_envs, len(env))
            if len(rollout) % size or rest:
                continue
            for stages in STAGES:
                if per_process % stages:
                    continue
                settings = {
                    "rollout.tensor_parallel_size": size,
                    "rollout.num_engines": None,
                    "rollout.pipeline_stage_num": stages,
                    "env.num_envs": per_process,
                    "overlap.staleness": 0,
                }
                yield {"actor": actor, "env": env, "rollout": rollout}, settings


def _splits_in_three(num_devices: int) -> Iterator[tuple[range, range, range]]:
    """Yield devices of actor, env and rollout, each arrangement of devices once, whatever their order.

    Either the actor has all devices that env and rollout have, which may be 1/2, 1/4, ... of all, so that it shows what
    the others bring. Or it has a part: where they have all, those of one of them, or none of theirs.
    """
    everything = range(num_devices)
    for count in (num_devices, *_halved(num_devices)):
        used = range(count)
        yield used, used, used
        for at in range(1, count):
            yield used, range(at), range(at, count)
        for part in (part for part in range(1, count) if count % part == 0):  # so that the rest is divided evenly
            yield used, range(0, count, count // part), used  # each shares the device of one of its own engines
            yield used, used, range(count - part, count)
    for trained in _halved(num_devices):
        yield range(trained), everything, everything
    for at in range(1, num_devices):
        first, rest = range(at), range(at, num_devices)
        yield first, first, rest
        yield rest, first, rest
        yield first, rest, rest
        for end in range(at + 1, num_devices):
            yield first, range(at, end), range(end, num_devices)


def _halved(count: int) -> list[int]:
    """Return a half, a quarter, ... of a number, rounded down, to 1."""
    return [] if count < 2 else [count // 2, *_halved(count // 2)]


def _tried(config: Config, inventory: str | Inventory | None, settings: Settings) -> Candidate | Refused:
    try:
        changed = loads(to_yaml(config), as_overrides(settings), forget_idle=True)
        plan = make_plan(changed, inventory)
        batch_algebra(changed, num_data_parallel(changed, plan))
    except UserError as error:
        return Refused(settings, str(error))
    if plan.verdict == "does_not_fit":
        return Refused(settings, "it does not fit into the devices' memory")
    return Candidate(settings, changed, plan)


def _ranks(devices: range) -> str:
    if devices.step > 1:
        return ",".join(map(str, devices))
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"


def _without_overlap(config: Config) -> Settings:
    """Return what is unset together with the staleness, because it has no effect without."""
    defaults = Config()
    keys = ("overlap.queue", "overlap.order", "overlap.in_flight")
    return {key: value for key in keys if (value := attrgetter(key)(defaults)) != attrgetter(key)(config)}
