"""Advises which settings to change where a plan does not fit; the planner tries each before it is recommended.

Single settings are tried first; if none is enough, as few as possible together; if not even all of them are, the same
on more devices. Where no setting is enough with the transformers engine, which holds a whole model on each device, the
same is tried with vLLM. Settings that give the steps that did not fit room to spare come first. Settings that change
what is learned (adapters, precision, lengths) are not tried.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotseat.config import Config, loads, to_yaml
from hotseat.config.batches import batch_algebra
from hotseat.config.roles import has_judge_engine
from hotseat.config.schema import JudgeEngineConfig, RolloutConfig
from hotseat.config.yaml_lines import dump
from hotseat.errors import BatchError, UserError
from hotseat.loop.planning.budgets import with_least_budgets, with_whole_steps
from hotseat.loop.planning.plan import (
    DEFAULT_ENGINE_SHARE,
    make_plan,
    num_data_parallel,
    on_all_devices,
    plan_as_is,
    role_specs,
)
from hotseat.placement import Plan

Settings = Mapping[str, Any]  # values by dotted keys of the config

MAX_SINGLES = 3  # single settings to recommend, the cheapest first
MAX_DEVICES = 512  # of the larger inventories that are tried
MAX_SEARCHED = 1024  # devices of an inventory for which settings are searched: plans take time
_PLACEMENT = "cluster.component_placement"
_VLLM: Settings = {"rollout.engine": "vllm"}


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

    def as_yaml(self) -> str:
        """Return the settings as YAML of a config file."""
        return as_yaml(self.settings)

    def as_arguments(self) -> str:
        """Return the settings as arguments of a command, quoted for a shell."""
        return shlex.join(as_overrides(self.settings))


def as_yaml(settings: Settings) -> str:
    """Return settings as YAML of a config file."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return dump(tree)


def as_overrides(settings: Settings) -> list[str]:
    """Return settings as overrides of a config."""
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
    if not alternatives and (sampled_by_vllm := _with_vllm(config)) is not None:
        by_vllm = _Trials(sampled_by_vllm, inventory)
        alternatives = [{**_VLLM, **settings} for settings in _enough(sampled_by_vllm, by_vllm, by_vllm.plan({}))]
    if alternatives:
        return [trials.advice({**assumed, **settings}) for settings in alternatives]
    return _on_more_devices(config, as_it_is, assumed)


def _enough(config: Config, trials: _Trials, plan: Plan | None) -> Sequence[Settings]:
    """Return alternative settings with which the plan fits: single ones, else one set of as few as possible."""
    knobs = list(_knobs(config, plan))
    more_knobs = [*knobs, *_last_resorts(config)]
    for is_goal, tried in ((trials.has_room, knobs), (_fits, more_knobs)):
        singles = [single for knob in tried if (single := trials.first({}, knob, is_goal)) is not None]
        if singles:
            return singles[:MAX_SINGLES]
        together = _together(trials, tried, is_goal)
        if together is not None:
            return [together]
    return []


def _with_vllm(config: Config) -> Config | None:
    """Return the config with vLLM as engine, which can shard a model; None if it has it already, or cannot."""
    if config.task != "rl" or config.rollout.engine == "vllm":
        return None
    try:
        return loads(to_yaml(config), as_overrides(_VLLM))
    except UserError:
        return None


Goal = Callable[[Plan | None], bool]


class _Trials:
    """Makes plans of a config with other settings, each once."""

    def __init__(self, config: Config, inventory: str | None):
        self._inventory = inventory
        self._text = to_yaml(config)
        self._plans: dict[str, Plan | None] = {}
        self._divides = False
        as_it_is = self.plan({})
        self._too_large = set() if as_it_is is None else _too_large(as_it_is)
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
            if made.verdict == "does_not_fit" and config.train.backend == "fsdp":
                # A micro-batch for the whole optimizer step needs no unsharded gradients.
                at_once = with_least_budgets(with_whole_steps(config, num_data_parallel(config, made)))
                other = plan_as_is(at_once, self._inventory)
                made = other if other.verdict == "fits" else made
        except UserError:
            return None
        # If batch sizes did not divide before, that is no reason against a setting.
        return made if not self._divides or _divides(config, made) else None

    def advice(self, settings: Settings, inventory: str | None = None) -> Advice:
        made = make_plan(loads(self._text, as_overrides(settings)), self._inventory)
        return Advice(settings, made, inventory)

    def first(self, settings: Settings, knob: Sequence[Settings], is_goal: Goal) -> Settings | None:
        """Return the settings with the first value of a knob that reaches the goal; None if no value does."""
        tried = ({**settings, **value} for value in knob)
        return next((each for each in tried if is_goal(self.plan(each))), None)

    def has_room(self, plan: Plan | None) -> bool:
        """Tell whether a plan fits, with room to spare in the steps that did not fit before."""
        if plan is None or not _fits(plan):
            return False
        steps = [step for group in plan.groups for step in group.steps]
        # An engine by itself fills its share of the device, however large that is.
        crowded = [step for step in steps if step.step in self._too_large and step.roles != ("rollout",)]
        return all(step.verdict == "fits" for step in crowded)


def _too_large(plan: Plan) -> set[str]:
    return {step.step for group in plan.groups for step in group.steps if step.verdict == "does_not_fit"}


def _divides(config: Config, plan: Plan) -> bool:
    try:
        batch_algebra(config, num_data_parallel(config, plan))
    except BatchError:
        return False
    return True


def _fits(plan: Plan | None) -> bool:
    return plan is not None and plan.verdict in ("fits", "tight")


def _excess(plan: Plan | None) -> tuple[float, int]:
    """Return the GiB by which steps exceed the memory of their devices and hosts, and how many of them do."""
    if plan is None:
        return float("inf"), 0
    over = [
        max(0.0, step.used_gib - group.memory_gib)
        for group in plan.groups
        for step in group.steps
        if group.memory_gib is not None and step.verdict == "does_not_fit"
    ]
    over += [host.used_gib - (host.memory_gib or 0.0) for host in plan.hosts if host.verdict == "does_not_fit"]
    return sum(over), len(over)


def _together(trials: _Trials, knobs: Sequence[Sequence[Settings]], is_goal: Goal) -> Settings | None:
    """Find the smallest set of settings, and the cheapest of that size, with which the plan reaches the goal."""
    chosen: Settings = {}
    turned: list[Settings] = []
    for knob in knobs:
        enough = trials.first(chosen, knob, is_goal)
        best = enough or min(({**chosen, **value} for value in knob), key=lambda each: _excess(trials.plan(each)))
        if enough is not None or _excess(trials.plan(best)) < _excess(trials.plan(chosen)):
            turned.append({key: value for key, value in best.items() if key not in chosen or chosen[key] != value})
            chosen = best
        if enough is not None:
            break
    else:
        return None
    for settings in reversed(turned[:-1]):
        without = {key: value for key, value in chosen.items() if key not in settings}
        if is_goal(trials.plan(without)):
            chosen = without
    return chosen


def _knobs(config: Config, plan: Plan | None) -> Iterator[Sequence[Settings]]:
    """Yield settings that take less memory, cheap ones first, each with its values in the order to try them."""
    train, is_rl = config.train, config.task == "rl"
    for role in ("actor", "critic", "reference", "reward", "rollout"):
        if getattr(config, role).enable_offload is False:
            yield [{f"{role}.enable_offload": None}]
    if config.reward.judge.engine.enable_offload is False:
        yield [{"reward.judge.engine.enable_offload": None}]
    for name in ("train", "rollout") if is_rl else ("train",):
        section = getattr(config, name)
        if section.max_tokens_per_device is not None:
            yield [{f"{name}.max_tokens_per_device": None}]
        elif section.micro_batch_size != "auto":
            yield [{f"{name}.micro_batch_size": "auto"}]
    if is_rl:
        yield from _engine_knobs("rollout", config.rollout.engine, config.rollout)
    if has_judge_engine(config):
        yield from _engine_knobs("reward.judge.engine", config.reward.judge.engine.kind, config.reward.judge.engine)
    if not train.packing:
        yield [{"train.packing": True}]
    if not train.gradient_checkpointing:
        yield [{"train.gradient_checkpointing": True}]
    if plan is not None and plan.label == "colocated" and _uses_some(plan):
        yield [{_PLACEMENT: {"actor": "all"}} | ({"rollout.num_engines": None} if config.rollout.num_engines else {})]
    if is_rl and config.rollout.engine == "vllm" and config.rollout.tensor_parallel_size < 8:
        yield [_engines_of(config, size) for size in (2, 4, 8) if size > config.rollout.tensor_parallel_size]
    sharded = {"train.deepspeed.zero_stage": 3}
    offloaded = {"train.deepspeed.adam_offload": True}
    if train.backend == "deepspeed":
        if train.deepspeed.zero_stage < 3:
            yield [sharded]
        if not train.deepspeed.adam_offload:
            yield [offloaded]
    else:
        backend = {"train.backend": "deepspeed", **sharded}
        yield [backend, {**backend, **offloaded}]


def _last_resorts(config: Config) -> Iterator[Sequence[Settings]]:
    """Yield settings to try where others are not enough: sequence-parallel ranks communicate in every layer."""
    sizes = _sequence_parallel_sizes(config) if config.train.num_model_parallel == 1 else []
    if sizes:
        yield [{"train.sequence_parallel_size": size} for size in sizes]


def _engine_knobs(name: str, kind: str, section: RolloutConfig | JudgeEngineConfig) -> Iterator[Sequence[Settings]]:
    """Yield settings of engines. name: of their section."""
    if kind == "vllm":
        share = section.memory_share or DEFAULT_ENGINE_SHARE
        grid = [step / 20 for step in range(1, 20)]
        values = [value for value in reversed(grid) if value < share] + [value for value in grid if value > share]
        yield [{f"{name}.memory_share": value} for value in values]
        if not section.enforce_eager:
            yield [{f"{name}.enforce_eager": True}]
    else:
        sizes = [size for size in (32, 16, 8, 4, 2) if size < section.num_slots]
        if sizes:
            yield [{f"{name}.num_slots": size} for size in sizes]


def _engines_of(config: Config, size: int) -> Settings:
    """Return the settings for engines of `size` devices each, as many as there is room for."""
    count = {"rollout.num_engines": None} if config.rollout.num_engines is not None else {}
    return {"rollout.tensor_parallel_size": size, **count}


def _sequence_parallel_sizes(config: Config) -> list[int]:
    """Return possible sequence-parallel sizes: they divide the heads of every model whose shape is known."""
    heads = [spec.model.num_heads for spec in role_specs(config) if spec.model is not None and not spec.is_engine]
    return [size for size in (2, 4, 8) if all(count % size == 0 for count in heads)]


def _uses_some(plan: Plan) -> bool:
    used = {device for role in plan.roles for device in role.devices}
    return 0 < len(used) < plan.inventory.num_devices


def _on_more_devices(config: Config, plan: Plan | None, assumed: Settings) -> list[Advice]:
    """Find the smallest inventory of more nodes of the same kind on which settings make a colocated plan fit."""
    if plan is None or plan.label != "colocated":
        return []
    machines = plan.inventory
    kinds = {(node.num_devices, node.device_kind) for node in machines.nodes}
    if len(kinds) != 1 or machines.pools:
        return []
    [(num_devices, kind)] = kinds
    base: dict[str, Any] = {}
    if config.cluster.component_placement != {"actor": "all"}:
        base[_PLACEMENT] = {"actor": "all"}
    for key, value in (
        ("cluster.num_nodes", config.cluster.num_nodes),
        ("rollout.num_engines", config.rollout.num_engines),
    ):
        if value is not None:
            base[key] = None
    num_nodes = 2 * machines.num_nodes
    while num_nodes * num_devices <= MAX_DEVICES:
        larger = f"{num_nodes}x{num_devices}x{kind.name}"
        trials = _Trials(loads(to_yaml(config), as_overrides(base)), larger)
        knobs = [*_knobs(config, None), *_last_resorts(config)]
        settings = {} if _fits(trials.plan({})) else _together(trials, knobs, _fits)
        if settings is not None:
            return [_Trials(config, larger).advice({**assumed, **base, **settings}, larger)]
        num_nodes *= 2
    return []
