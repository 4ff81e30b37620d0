"""Advises which settings to change where a plan does not fit; the planner tries each before it is recommended.

Single settings are tried first; if none is enough, the cheapest combination of all that `_choices` and `_reliefs`
list; if none of these fits, the same on more devices. Where no setting is enough with an engine that holds a
whole model on each device, the same is tried with one that shards it. Settings that give the steps that did not fit
room to spare come first. Settings that change what is learned (adapters, precision, lengths) are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotseat.config import Config, loads, roles_of, to_yaml
from hotseat.config.batches import batch_algebra
from hotseat.config.yaml_lines import dump, nested
from hotseat.errors import BatchError, UserError
from hotseat.placement.memory_settings import Layout
from hotseat.placement.plan_types import GroupStep, Plan
from hotseat.planning.budgets import with_least_budgets, with_whole_steps
from hotseat.planning.config_plan import make_plan, num_data_parallel, on_all_devices, plan_as_is
from hotseat.planning.role_specs import engine_slots, role_specs, section_of_role
from hotseat.planning.search import Choice, Roles, Settings, Value, cheapest
from hotseat.registry.backends import BACKENDS, backend_entry
from hotseat.registry.engines import ENGINES
from hotseat.registry.lookup import names_with
from hotseat.registry.roles import role_entry

MAX_SINGLES = 3  # single settings to recommend, the cheapest first
MAX_DEVICES = 512  # of the larger inventories that are tried
MAX_SEARCHED = 1024  # devices of an inventory for which settings are searched: plans take time
_PLACEMENT = "cluster.component_placement"
_ENGINES = {"rollout": "rollout", "judge": "reward.judge.engine"}  # roles and their sections
_TRAINED: Roles = frozenset({"actor", "critic", "reference", "reward", "inference"})  # trainers' processes
_ALL_ROLES: Roles = _TRAINED | {"rollout", "judge", "env"}


@dataclass(frozen=True)
class Advice:
    """Settings with which a config's plan fits, and that plan.

    inventory: the machines that it needs, where the current ones are not enough.
    """

    settings: Settings
    plan: Plan
    inventory: str | None = None

    @property
    def used(self) -> float:
        """Return the memory in use in the fullest step, as a share of its device."""
        return max(
            step.used_gib / group.memory_gib for group in self.plan.groups for step in group.steps if group.memory_gib
        )


def as_yaml(settings: Settings) -> str:
    return dump(nested(settings))


def as_overrides(settings: Settings) -> list[str]:
    return [f"{key}={_flow(value)}" for key, value in settings.items()]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and (value.startswith("@") or "," in value):
        return f'"{value}"'  # YAML reserves the sign, and would begin another entry at the comma
    return "null" if value is None else str(value)


def advise(config: Config, inventory: str | None = None) -> list[Advice]:
    """List alternative ways to make a plan fit; empty if there is none, or the inventory is too large to search.

    A config without a placement is planned on all devices of the inventory, and the advice says so.
    """
    placed = on_all_devices(config, inventory)
    assumed = {} if placed == config else {_PLACEMENT: {"actor": "all"}}
    config, trials = placed, _Trials(placed, inventory)
    as_it_is = trials.plan({})
    if as_it_is is not None and as_it_is.inventory.num_devices > MAX_SEARCHED:
        return []
    alternatives = _enough(config, trials, as_it_is)
    sharding = names_with(ENGINES, "tensor_parallel_size")
    can_change = not alternatives and config.has_rollouts and config.rollout.engine not in sharding
    for other in sharding if can_change else ():
        settings = {"rollout.engine": other}
        try:
            sharded = loads(to_yaml(config), as_overrides(settings))
        except UserError:
            continue
        others = _Trials(sharded, inventory)
        alternatives = [{**settings, **more} for more in _enough(sharded, others, others.plan({}))]
        if alternatives:
            break
    if alternatives:
        return [trials.advice({**assumed, **settings}) for settings in alternatives]
    return _on_more_devices(config, as_it_is, assumed)


def _enough(config: Config, trials: _Trials, plan: Plan | None) -> Sequence[Settings]:
    """Return alternative settings with which the plan fits: single ones, else the cheapest combination."""
    engines = _Engines(config, plan)
    reliefs, choices = [*_reliefs(config, engines)], [*_choices(config, engines, plan)]
    for is_roomy in (True, False):
        tried = choices if is_roomy else [*choices, *_last_resorts(config)]
        knobs = [*reliefs, *map(engines.shares, engines), *(knob for choice in tried for knob in _single_knobs(choice))]
        singles = [single for knob in knobs if (single := trials.first(knob, is_roomy)) is not None]
        if singles:
            return singles[:MAX_SINGLES]
        together = _together(trials, engines, reliefs, tried, is_roomy)
        if together is not None:
            return [together]
    return []


def _single_knobs(choice: Choice) -> list[list[Settings]]:
    """Return the values of a choice that change one thing, in lists of those that change the same."""
    knobs: dict[frozenset[str], list[Settings]] = {}
    for value in choice:
        keys = frozenset(key for key in value.settings if key != "train.backend" and not key.endswith(".num_engines"))
        if len(keys) == 1:
            knobs.setdefault(keys, []).append(value.settings)
    return list(knobs.values())


class _Trials:
    """Makes plans of a config with other settings, each once."""

    def __init__(self, config: Config, inventory: str | None):
        self._inventory = inventory
        self._text = to_yaml(config)
        self._plans: dict[str, Plan | None] = {}
        self._divides = False
        as_it_is = self.plan({})
        groups = () if as_it_is is None else as_it_is.groups
        self._too_large = {step.step for group in groups for step in group.steps if step.verdict == "does_not_fit"}
        self._divides = as_it_is is not None and _divides(config, as_it_is)
        self._plans.clear()

    def plan(self, settings: Settings) -> Plan | None:
        """Return the plan with these settings; None if the config, the placement or the batch sizes are refused."""
        key = str(sorted(as_overrides(settings)))
        if key not in self._plans:
            self._plans[key] = self._plan(settings)
        return self._plans[key]

    def _plan(self, settings: Settings) -> Plan | None:
        try:
            config = loads(self._text, as_overrides(settings))
            made = plan_as_is(with_least_budgets(config), self._inventory)
            if made.verdict == "does_not_fit" and not backend_entry(config.train.backend).keeps_gradients:
                # A micro-batch for the whole optimizer step needs no unsharded gradients.
                at_once = with_least_budgets(with_whole_steps(config, num_data_parallel(config, made)))
                other = plan_as_is(at_once, self._inventory)
                made = other if other.verdict != "does_not_fit" else made
        except UserError:
            return None
        # If batch sizes did not divide before, that is no reason against a setting.
        return made if not self._divides or _divides(config, made) else None

    def advice(self, settings: Settings, inventory: str | None = None) -> Advice:
        made = make_plan(loads(self._text, as_overrides(settings)), self._inventory)
        return Advice(settings, made, inventory)

    def first(self, tried: Iterable[Settings], is_roomy: bool) -> Settings | None:
        """Return the first settings with which the plan fits; None if there are none."""
        return next((settings for settings in tried if not self.missed(settings, is_roomy)), None)

    def missed(self, settings: Settings, is_roomy: bool) -> list[Roles]:
        """List the roles at work in each step that does not fit with these settings.

        is_roomy: steps that did not fit before must have room to spare.
        """
        plan = self.plan(settings)
        if plan is None:  # refused, by whatever role
            return [_ALL_ROLES]
        missed = [
            frozenset(step.roles or group.roles)
            for group in plan.groups
            for step in group.steps
            if step.verdict == "does_not_fit" or (is_roomy and step.verdict != "fits" and self._was_too_large(step))
        ]
        if any(host.verdict == "does_not_fit" for host in plan.hosts):
            missed.append(_ALL_ROLES)
        if not missed and plan.verdict == "unknown":  # which no setting changes
            missed.append(frozenset())
        return missed

    def _was_too_large(self, step: GroupStep) -> bool:
        # An engine by itself fills its share of the device, however large that is.
        return step.step in self._too_large and step.roles != ("rollout",)


def _divides(config: Config, plan: Plan) -> bool:
    try:
        batch_algebra(config, num_data_parallel(config, plan))
    except BatchError:
        return False
    return True


class _Engines:
    """Memory shares of the engines of a config that have one, on the devices that a plan gives them."""

    def __init__(self, config: Config, plan: Plan | None):
        specs = {spec.name: spec for spec in role_specs(config)} if config.has_rollouts else {}
        self._specs = {role: specs[role] for role in _ENGINES if role in specs and specs[role].share is not None}
        groups = () if plan is None else plan.groups
        sizes = {role: {group.memory_gib for group in groups if role in group.roles} for role in self._specs}
        self._devices_gib = {role: [gib for gib in each if gib is not None] for role, each in sizes.items()}
        self._plan = plan

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def sizes(self, role: str) -> list[int]:
        """List tensor-parallel sizes of engines: powers of two that a node has devices for, and that divide heads."""
        most = 8 if self._plan is None else max(node.num_devices for node in self._plan.inventory.nodes)
        model = self._specs[role].model
        return [size for size in (1, 2, 4, 8, 16) if size <= most and (model is None or model.num_heads % size == 0)]

    def shares(self, role: str) -> Sequence[Settings]:
        """List memory shares to try, those next to the config's first."""
        own = self._specs[role].share
        assert own is not None
        grid = [step / 20 for step in range(1, 20)]
        values = [value for value in reversed(grid) if value < own] + [value for value in grid if value > own]
        return [{f"{_ENGINES[role]}.memory_share": value} for value in values]

    def with_least_shares(self, settings: Settings) -> Settings:
        """Return the settings with the smallest share for each engine that it starts with, where there is one.

        Where any share fits, this one does: the cache grows with the share.
        """
        shares = {}
        for role, spec in self._specs.items():
            size = settings.get(f"{_ENGINES[role]}.tensor_parallel_size", spec.tensor_parallel)
            priced = [spec.estimate(Layout(1, size, 1, spec.share, gib)) for gib in self._devices_gib[role]]
            least = [each.min_share for each in priced if each is not None and each.min_share is not None]
            if least and len(least) == len(priced) and (share := math.ceil(max(least) * 100) / 100) <= 1:
                shares[f"{_ENGINES[role]}.memory_share"] = share
        return {**settings, **shares}


def _together(
    trials: _Trials, engines: _Engines, reliefs: Sequence[Sequence[Settings]], choices: Sequence[Choice], is_roomy: bool
) -> Settings | None:
    """Find the cheapest combination of choices with which the plan fits, with as few reliefs as it needs.

    Reliefs cost little, so combinations are tried with all of them first. Without any, a micro-batch that is larger
    than a run would choose may save FSDP the unsharded gradients.
    """
    for relieved in (reliefs, []) if reliefs else ([],):
        base = {key: value for relief in relieved for key, value in relief[-1].items()}

        def complete(settings: Settings, base: Settings = base) -> Settings:
            return engines.with_least_shares({**base, **settings})

        settings = cheapest(choices, lambda settings: trials.missed(complete(settings), is_roomy))
        if settings is not None:
            return _simplest(trials, engines, complete(settings), relieved, is_roomy)
    return None


def _simplest(
    trials: _Trials, engines: _Engines, settings: Settings, reliefs: Sequence[Sequence[Settings]], is_roomy: bool
) -> Settings:
    """Return settings that fit without the reliefs that they can do without, and with the largest memory shares.

    A share that has to change anyway is one that leaves room to spare in the rollout, too, if there is any.
    """
    for knob in reversed(reliefs):
        without = {key: value for key, value in settings.items() if key not in knob[0]}
        simpler = trials.first([without, *({**without, **value} for value in knob)], is_roomy)
        settings = settings if simpler is None else simpler
    for knob in map(engines.shares, engines):
        without = {key: value for key, value in settings.items() if key not in knob[0]}
        if not trials.missed(without, is_roomy):
            settings = without
            continue
        shares = [each for value in knob if not trials.missed(each := {**without, **value}, is_roomy)]
        roomy = [each for each in shares if (plan := trials.plan(each)) is not None and plan.verdict == "fits"]
        settings = next(iter([*roomy, *shares]), settings)
    cheap = {key: settings[key] for knob in reliefs for key in knob[0] if key in settings}
    return {**cheap, **settings}


def _reliefs(config: Config, engines: _Engines) -> Iterator[Sequence[Settings]]:
    """Yield settings that take less memory and cost little, each with its values in the order to try them."""
    for role in ("actor", "critic", "reference", "reward", "rollout", "judge"):
        if section_of_role(config, role).enable_offload is False:
            yield [{f"{role_entry(role).section}.enable_offload": None}]
    for name in ("train", "rollout") if config.has_rollouts else ("train",):
        section = config.train if name == "train" else config.rollout
        if section.max_tokens_per_device is not None:
            yield [{f"{name}.max_tokens_per_device": None}]
        elif section.micro_batch_size != "auto":
            yield [{f"{name}.micro_batch_size": "auto"}]
    if not config.train.packing:
        yield [{"train.packing": True}]
    for role in (role for role in _ENGINES if role in roles_of(config)):
        engine = section_of_role(config, role)
        if role not in engines:
            sizes = [size for size in (32, 16, 8, 4, 2) if size < engine_slots(config, role)]
            if sizes:
                yield [{f"{_ENGINES[role]}.num_slots": size} for size in sizes]
        elif not engine.enforce_eager:
            yield [{f"{_ENGINES[role]}.enforce_eager": True}]


def _choices(config: Config, engines: _Engines, plan: Plan | None) -> Iterator[Choice]:
    """Yield settings that cost speed or devices, each with the values that may replace the config's."""
    if not config.train.gradient_checkpointing:
        yield [Value(1.0, {"train.gradient_checkpointing": True}, _TRAINED)]
    placements = _placements(config, plan)
    if placements:
        yield placements
    yield from filter(None, (_sizes(config, engines, role) for role in engines))
    yield _shardings(config)


def _sizes(config: Config, engines: _Engines, role: str) -> Choice:
    """Return other tensor-parallel sizes of engines, as many of these as there is room for."""
    name, section = _ENGINES[role], section_of_role(config, role)
    own = section.tensor_parallel_size
    count = {f"{name}.num_engines": None} if section.num_engines is not None else {}
    values = []
    for size in engines.sizes(role):
        settings = {f"{name}.tensor_parallel_size": size, **count}
        if size > own:
            values.append(Value(1 + size / 100, settings, frozenset({role})))
        elif size < own:  # processes of one device have no communicator, which is there in every step
            values.append(Value(2 + own / size / 100, settings, _ALL_ROLES))
    return sorted(values, key=lambda value: value.cost)


def _placements(config: Config, plan: Plan | None) -> Choice:
    """Return placements of the actor on all devices: with the other roles where all share their devices, else alone."""
    if plan is None or not 0 < len(plan.role("actor").devices) < plan.inventory.num_devices:
        return []
    placement = dict(config.cluster.component_placement)
    count = {"rollout.num_engines": None} if config.rollout.num_engines else {}
    everywhere = {_PLACEMENT: _everywhere(placement), **count}
    if plan.label == "colocated":
        return [Value(1.0, everywhere, _ALL_ROLES)]
    own = next((key for key, on in placement.items() if _names(key) == ["actor"] and _names_devices(on)), None)
    alone = [] if own is None else [Value(1.5, {_PLACEMENT: {**placement, own: "all"}}, _ALL_ROLES)]
    return [*alone, Value(2.5, everywhere, _ALL_ROLES)]


def _everywhere(placement: Mapping[str, Any]) -> dict[str, Any]:
    """Return a placement on all devices of every role that has some. Its keys stay, so that it can be pasted."""
    made = {key: "all" if _names_devices(on) else on for key, on in placement.items()}
    return made if any("actor" in _names(key) for key in made) else {"actor": "all", **made}


def _names(key: str) -> list[str]:
    return [name.strip() for name in key.split(",")]


def _names_devices(on: object) -> bool:
    """Tell whether a placement names devices itself, instead of another role, a pool, the host or a server."""
    text = str(on)
    return isinstance(on, str | int) and not text.startswith(("@", "cpu")) and text != "none" and "/" not in text


def _shardings(config: Config) -> Choice:
    """Return other ZeRO stages, with and without the optimizer on the host, of another backend if this one has none."""
    zero, has_stages = config.train.deepspeed, backend_entry(config.train.backend).has_zero_options
    other = next(name for name, entry in BACKENDS.items() if entry.has_zero_options)
    values = []
    for stage in (1, 2, 3):
        for is_offloaded in (False, True):
            cost, settings = 0.0, {}
            if not has_stages:
                # Stage 3 shards as FSDP does; stage 1 would keep whole gradients for ever.
                cost, settings = 1.5 - stage / 10, {"train.backend": other, "train.deepspeed.zero_stage": stage}
            elif stage != zero.zero_stage:
                cost = 1 + (stage - zero.zero_stage) / 10 if stage > zero.zero_stage else 2.0
                settings = {"train.deepspeed.zero_stage": stage}
            if is_offloaded != (has_stages and zero.adam_offload):
                cost += 1.5
                settings["train.deepspeed.adam_offload"] = is_offloaded
            is_more = stage >= (zero.zero_stage if has_stages else 3)
            if settings and (stage > 1 or is_more):
                # Whole models of roles that score are in no group of processes, and have no communicator in any step.
                values.append(Value(cost, settings, _TRAINED if is_more else _ALL_ROLES))
    return sorted(values, key=lambda value: value.cost)


def _last_resorts(config: Config) -> Iterator[Choice]:
    """Yield settings to try where others are not enough: sequence-parallel ranks communicate in every layer."""
    if config.train.num_model_parallel > 1:
        return
    heads = [spec.model.num_heads for spec in role_specs(config) if spec.model is not None and not spec.is_engine]
    sizes = [size for size in (2, 4, 8) if all(count % size == 0 for count in heads)]
    if sizes:
        yield [Value(3 + size / 100, {"train.sequence_parallel_size": size}, _TRAINED) for size in sizes]


def _on_more_devices(config: Config, plan: Plan | None, assumed: Settings) -> list[Advice]:
    """Find the smallest inventory of more nodes of the same kind on which settings make a colocated plan fit."""
    if plan is None or plan.label != "colocated":
        return []
    machines = plan.inventory
    kinds = {(node.num_devices, node.device_kind, node.host_memory_gib) for node in machines.nodes}
    if len(kinds) != 1 or machines.pools:
        return []
    [(num_devices, kind, host_gib)] = kinds
    everywhere = _everywhere(config.cluster.component_placement)
    base: dict[str, Any] = {} if config.cluster.component_placement == everywhere else {_PLACEMENT: everywhere}
    counts = {"cluster.num_nodes": config.cluster.num_nodes, "rollout.num_engines": config.rollout.num_engines}
    base |= {key: None for key, count in counts.items() if count is not None}
    placed = loads(to_yaml(config), as_overrides(base))

    def settings_on(inventory: str) -> Settings | None:
        trials = _Trials(placed, inventory)
        made = trials.plan({})
        engines = _Engines(placed, made)
        choices = [*_choices(placed, engines, made), *_last_resorts(placed)]
        return _together(trials, engines, [*_reliefs(placed, engines)], choices, False)

    host = "" if host_gib is None else f"+{host_gib:g}G"
    larger, num_nodes = [], 2 * machines.num_nodes
    while num_nodes * num_devices <= MAX_DEVICES:
        larger.append(f"{num_nodes}x{num_devices}x{kind.name}{host}")
        num_nodes *= 2
    if not larger or settings_on(larger[-1]) is None:
        return []
    for inventory in larger:
        settings = settings_on(inventory)
        if settings is not None:
            return [_Trials(config, inventory).advice({**assumed, **base, **settings}, inventory)]
    return []
