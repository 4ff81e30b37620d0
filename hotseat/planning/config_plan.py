"""Turns a config into inventory, roles and flow, and has the planner plan them. Needs no device and no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hotseat.config import Config, roles_of
from hotseat.config.precision import with_dtype
from hotseat.config.presence import has_simulator
from hotseat.config.resolved import overlap_queue
from hotseat.config.schema.cluster_options import NodePoolConfig
from hotseat.errors import PlacementError, TooFewDevicesError
from hotseat.machine import has_gpu
from hotseat.placement.flow import Flow, Overlap, check_runs, default_flow, parse_flow
from hotseat.placement.inventory import UNKNOWN_KIND, DeviceKind, Inventory, Node, NodePool, parse_node_ranks
from hotseat.placement.memory import token_activation_bytes, useful_cache_gib
from hotseat.placement.memory_settings import EngineMemory, Layout, TrainMemory
from hotseat.placement.memory_terms import GIB, SNAPSHOTS
from hotseat.placement.plan import plan
from hotseat.placement.plan_types import Plan, RoleSpec
from hotseat.placement.role_names import Part
from hotseat.planning.budgets import ChosenBudgets, choose, choose_on_cpu, is_chosen, with_least_budgets
from hotseat.planning.engine_counts import MIN_SEQUENCES, PER_DEVICE, most_engines, with_engines
from hotseat.planning.role_specs import (
    backend_of,
    engine_of,
    engine_slots,
    not_described,
    role_specs,
    section_of_role,
    simulator_memory,
    with_custom_names,
)
from hotseat.planning.slots import with_slots
from hotseat.registry.engines import DEFAULT_ENGINE
from hotseat.registry.roles import TRAINED_PARTS, role_entry
from hotseat.words import quantity

DEVICES_PER_NODE = 8  # of the nodes assumed where neither config nor command line names an inventory
MAX_ASSUMED_NODES = 4096
UNMEASURED_GIB = 4.0  # of a process of the role env, for the size of micro-batches, until a run has measured it

_WITHOUT_DEVICES = frozenset({"babyai", "gym"})  # families whose simulators compute on the host


def make_plan(config: Config, inventory: str | Inventory | None = None, *, are_devices_logical: bool = False) -> Plan:
    """Plan a run on an inventory: the argument, the config's, or as many nodes of eight devices as needed.

    are_devices_logical: everything runs on CPUs, and a device is only a place in the plan.
    """
    if not are_devices_logical:
        config = with_engines_on(config, inventory)
    chosen = with_budgets(config, inventory, are_devices_logical=are_devices_logical).config
    made = plan_as_is(chosen, inventory, are_devices_logical=are_devices_logical)
    return made if are_devices_logical else _with_scoring_together(chosen, made)


def with_engines_on(config: Config, inventory: str | Inventory | None = None) -> Config:
    """Return the config with the number of engines and of their slots, where it leaves them to the run."""

    def plan_with(made: Config) -> Plan:
        return plan_as_is(with_least_budgets(made), inventory)

    return with_slots(with_engines(config, plan_with, is_anything_offloaded), plan_with, is_anything_offloaded)


def with_budgets(
    config: Config, inventory: str | Inventory | None = None, *, are_devices_logical: bool = False
) -> ChosenBudgets:
    """Return the config with a token budget for micro-batches wherever it leaves their size to the run.

    Budgets that were chosen before stay, such as those of a run that resumes.
    """
    if is_chosen(config):
        return ChosenBudgets(config)
    if are_devices_logical:
        return choose_on_cpu(config, _activation_bytes(with_dtype(config, has_gpus=False)))
    num_ranks = num_data_parallel(config, plan_as_is(config, inventory))
    trained = [spec.model for spec in role_specs(config) if isinstance(spec.memory, TrainMemory) and spec.model]
    model = max(trained, key=lambda shape: shape.num_layers, default=None)

    def plan_with(made: Config) -> Plan:
        return plan_as_is(made, inventory)

    if has_simulator(config) and simulator_memory(config) is None:
        # A constant would be far too small for most policies; what turns out not to fit is cut smaller in the run.
        gib = 0.0 if config.env.path in _WITHOUT_DEVICES else UNMEASURED_GIB
        note = f", if each process of simulators takes {gib:g} GiB, which env.memory_gib does not say"
        with suppress(PlacementError):  # so much would have to leave a device, and something may not be offloaded
            assumed = choose(config.with_options({"env.memory_gib": gib}), num_ranks, plan_with, model, note)
            if assumed.is_priced and plan_with(assumed.config).verdict != "does_not_fit":
                return replace(assumed, config=assumed.config.with_options({"env.memory_gib": None}))
    return choose(config, num_ranks, plan_with, model)


def on_all_devices(config: Config, inventory: str | Inventory | None = None) -> Config:
    """Return the config with the actor, and so every role, on all devices of the inventory, if it places no role."""
    machines = machines_of(config, inventory)
    if machines is None or config.cluster.component_placement or machines.num_devices < 2:
        return config
    return config.with_options({"cluster.component_placement": {"actor": "all"}})


def machines_of(config: Config, inventory: str | Inventory | None) -> Inventory | None:
    """Return the machines to plan for: the inventory that is passed, else the config's; None: neither names any."""
    machines = inventory if inventory is not None else config.cluster.inventory
    return Inventory.parse(machines) if isinstance(machines, str) else machines


def _with_dtype(config: Config, inventory: str | Inventory | None, are_devices_logical: bool) -> Config:
    """Return the config with the dtype that a run on these machines computes in; assumed nodes have GPUs."""
    machines = machines_of(config, inventory)
    if are_devices_logical or machines is None:
        return with_dtype(config, not are_devices_logical)
    return with_dtype(config, machines.num_devices > 0)


def _activation_bytes(config: Config) -> float | None:
    """Count the activation bytes of one token in an update, of the model that takes most; None if one is unknown."""
    token_bytes = []
    for spec in role_specs(config):
        if not isinstance(spec.memory, TrainMemory):
            continue
        if spec.model is None:
            return None
        token_bytes.append(token_activation_bytes(spec.memory, spec.model))
    return max(token_bytes)


def plan_as_is(config: Config, inventory: str | Inventory | None = None, *, are_devices_logical: bool = False) -> Plan:
    """Plan a config with all budgets chosen; see `make_plan`."""
    roles = role_specs(_with_dtype(config, inventory, are_devices_logical))
    if are_devices_logical:
        stay = _engines_that_stay(config)
        roles = [replace(spec, can_offload=frozenset(), offload=None) if spec.name in stay else spec for spec in roles]
    machines = machines_of(config, inventory)
    with with_custom_names(config):
        flow = make_flow(config, tuple(spec.name for spec in roles))
        if machines is not None:
            made = plan(_with_pools(machines, config), roles, flow)
            _check_second_copies(config, made)
        else:
            made = _on_assumed_nodes(config, roles, flow)
    notes = not_described(config)
    if config.train.lora.rank and config.train.lora.target_modules != "all-linear":
        notes.append("train.lora.target_modules: the figures are for adapters beside every linear layer")
    if are_devices_logical:
        notes += without_effect_on_cpus(config)
    return replace(made, warnings=(*made.warnings, *notes))


def _with_scoring_together(config: Config, made: Plan) -> Plan:
    """Return the plan with roles that score at the same time instead of in turn, if all of them fit beside everything.

    On a small model each is kept waiting by its own process rather than by the device.
    """
    if config.flow is not None or made.verdict != "fits" or is_anything_offloaded(made):
        return made
    phases = [replace(phase, order="together") if phase.name == "prepare" else phase for phase in made.flow.phases]
    specs = role_specs(_with_dtype(config, made.inventory, False))
    together = plan(made.inventory, specs, replace(made.flow, phases=tuple(phases)))
    if together.verdict != "fits" or is_anything_offloaded(together):
        return made
    return replace(together, warnings=made.warnings)


def _check_second_copies(config: Config, made: Plan) -> None:
    """Raise unless ZeRO++'s groups with a second copy of the weights divide the ranks of every model."""
    zero = config.train.deepspeed
    size = zero.zpg if backend_of(config).has_zero_options and zero.zero_stage == 3 else 1
    for role in made.roles:
        num_ranks = len(role.processes)
        if role_entry(role.name).kind == "model" and num_ranks % size:
            raise PlacementError(
                f"train.deepspeed.zpg is {size}, and the {quantity(num_ranks, 'rank')} of {role.name} cannot be"
                " divided into groups of that size: set it to a number that divides the ranks of every model"
            )


def plan_on(config: Config, cluster: Any) -> Plan:
    return make_plan(config, inventory_of(cluster), are_devices_logical=are_devices_logical(cluster))


def budgets_on(config: Config, cluster: Any) -> ChosenBudgets:
    return with_budgets(config, inventory_of(cluster), are_devices_logical=are_devices_logical(cluster))


def are_devices_logical(cluster: Any) -> bool:
    """Tell whether the cluster's devices exist only in the plan, and its processes share CPUs.

    Devices of other nodes are taken for real, since nothing is known of them here.
    """
    is_here = not any(node.num_devices for node in cluster.nodes[1:])
    return is_here and all(node.device_bytes is None for node in cluster.nodes) and not has_gpu()


def plan_notes(config: Config, cluster: Any, made: Plan) -> list[str]:
    """Return notes on a run's plan: on CPUs, options without effect; on devices, unknown memory and idle time."""
    if are_devices_logical(cluster):
        return without_effect_on_cpus(config)
    return [*not_described(config), *more_engines(config, made)]


def more_engines(config: Config, made: Plan) -> list[str]:
    """Recommend another engine, or several, where a small model would leave its device idle between steps.

    On an H200 the transformers engine sampled 5.5 times as fast as vLLM from 0.5B parameters.
    """
    rollout = config.rollout
    count = most_engines(config)
    if count == 1:
        return []
    is_alone = all(process.fraction == 1 and len(process.devices) == 1 for process in made.role("rollout").processes)
    if not is_alone or rollout.batch_size * rollout.samples_per_prompt < count * MIN_SEQUENCES:
        return []
    keys = [f"rollout.{key}" for key in ("num_engines", "memory_share") if getattr(rollout, key) is not None]
    own = f", or unset {' and '.join(keys)}, and the run starts {count} engines on a device" if keys else ""
    return [
        f"rollout.engine: a model of fewer than {PER_DEVICE[-1][0] / 1e9:g}B parameters leaves a device idle while"
        f" {engine_of(config).title} prepares its next step; if step times matter, set it to {DEFAULT_ENGINE} for a"
        f" Llama, Mistral, Qwen2 or Qwen3{own}"
    ]


def without_effect_on_cpus(config: Config) -> list[str]:
    """List options that are set and have no effect without accelerators, with why."""
    notes = []
    for role in _engines_that_stay(config):
        title, key, section = engine_of(config, role).title, role_entry(role).section, section_of_role(config, role)
        if section.enable_offload:
            why = f"on a CPU {title} cannot offload its weights and its cache"
            notes.append(f"{key}.enable_offload: no effect here: {why}")
        if section.memory_share is not None:
            why = f"on a CPU {title}'s cache has the size that its sequences need"
            notes.append(f"{key}.memory_share: no effect here: {why}")
    return notes


def _engines_that_stay(config: Config) -> list[str]:
    engines = [role for role in roles_of(config) if role_entry(role).kind == "engine"]
    return [role for role in engines if not engine_of(config, role).offloads_on_cpu]


def inventory_of(cluster: Any) -> Inventory:
    """Return the nodes of a running cluster in order, each with its devices."""
    nodes = []
    for rank, node in enumerate(cluster.nodes):
        kind = DeviceKind("GPU", node.device_bytes / GIB) if node.device_bytes else UNKNOWN_KIND
        nodes.append(Node(rank, num_devices=node.num_devices, device_kind=kind))
    return Inventory(tuple(nodes))


def host_needs(config: Config, made: Plan) -> dict[str, float]:
    """Return the GiB of weights, gradients, optimizer state and their snapshots that each role holds on the host.

    Roles whose models are not described count nothing.
    """
    specs = {spec.name: spec for spec in role_specs(config)}
    needs = {}
    for role in made.roles:
        spec, num_processes = specs[role.name], len(role.processes)
        layout = Layout(num_processes, role.tensor_parallel, has_device=False)
        memory = spec.estimate(layout)
        terms = (
            () if memory is None else (*memory.host, *chain(*memory.parts.values()), *memory.working.get("train", ()))
        )
        # FSDP's gradients are no part: they exist only during an update, when all the rest is there as well.
        held = [
            term
            for term in terms
            if term.part in TRAINED_PARTS or term.name == SNAPSHOTS or term.name.partition(",")[0] == "gradients"
        ]
        needs[role.name] = num_processes * sum(term.gib for term in held)
    return needs


def num_data_parallel(config: Config, made: Plan) -> int:
    """Return the number of data-parallel ranks. The planner has checked that ranks divide into replicas."""
    return len(made.role("actor").processes) // config.train.num_model_parallel


def stage_slots(config: Config, plan: Plan) -> int:
    """Return how many sequences one engine decodes at a time for simulators: its part of one stage of all env ranks.

    With room for more, it would begin a stage beside the one that it samples for; both would come back together, and
    step without a third to be sampled for meanwhile.
    """
    num_envs = config.env.num_envs * len(plan.role("env").processes)
    num_engines = len(plan.role("rollout").processes)
    return min(engine_slots(config), -(-num_envs // (config.rollout.pipeline_stage_num * num_engines)))


def episodes_per_engine(config: Config) -> int:
    """Return how many episodes are open for each engine.

    Unless that is set, one half is sampled while agents and rewards handle the other.
    """
    return config.agent.max_concurrent or 2 * engine_slots(config)


def is_offloaded(made: Plan, role: str) -> bool:
    """Tell whether a role's weights are off its devices in some step of the plan."""
    return Part.WEIGHTS in offloaded_parts(made, role)


def offloaded_parts(made: Plan, role: str) -> list[Part]:
    """Return the parts of a role that are off its devices in some step of the plan."""
    steps = [step for group in made.groups for step in group.steps]
    absent = {hold.part for step in steps for hold in step.holdings if hold.role == role and not hold.is_resident}
    return sorted(absent)


def make_flow(config: Config, roles: tuple[str, ...]) -> Flow:
    overlap = Overlap(overlap_queue(config), config.overlap.staleness, config.overlap.in_flight == "recompute")
    components = tuple(config.components)
    if config.flow is not None:
        phases = [phase.model_dump(exclude_defaults=True) for phase in config.flow]
        return parse_flow(phases, roles, overlap, components)
    return default_flow(config.task, roles, overlap, components)


def flow_problem(config: Config) -> str | None:
    """Return why a run cannot follow the flow of its config; None if it can, or has none of its own."""
    if config.flow is None:
        return None
    roles = roles_of(config)
    try:
        with with_custom_names(config):
            check_runs(make_flow(config, roles), config.task, roles, tuple(config.components))
    except PlacementError as error:
        return str(error).removeprefix("flow: ")
    return None


@dataclass(frozen=True)
class EngineRoom:
    """Memory that an engine takes. cache_gib: of its cache, where that is less than the share allows."""

    share: float  # of the device's memory
    cache_gib: float | None = None


def engine_room(config: Config, made: Plan, role: str = "rollout") -> EngineRoom | None:
    """Return the memory that each engine of a role takes; None if engines of its kind take what their slots need.

    A cache is limited to what the engine's sequences can use.
    """
    spec, share = next(spec for spec in role_specs(config) if spec.name == role), made.role(role).share
    if share is None:
        return None
    sizes = [group.memory_gib for group in made.groups if role in group.roles]
    is_sized = bool(sizes) and None not in sizes  # processes on the CPU have no device
    if spec.model is None or not isinstance(spec.memory, EngineMemory) or not is_sized:
        return EngineRoom(share)
    device_gib = min(size for size in sizes if size is not None)
    priced = spec.estimate(Layout(1, spec.tensor_parallel, 1, share, device_gib))
    assert priced is not None
    assert priced.min_share is not None  # weights, buffers, workspace and one sequence
    gib = priced.part_gib(Part.KV_CACHE)
    if gib < useful_cache_gib(spec.memory, spec.model, spec.tensor_parallel):
        return EngineRoom(share)
    return EngineRoom(min(share, priced.min_share + gib / device_gib), gib)


def is_anything_offloaded(made: Plan) -> bool:
    """Tell whether any part of a role leaves its device between two steps."""
    return any(hand_over.leaves for group in made.groups for hand_over in group.hand_overs)


def _with_pools(inventory: Inventory, config: Config) -> Inventory:
    return with_node_groups(inventory, config.cluster.num_nodes, config.cluster.node_groups)


def with_node_groups(inventory: Inventory, num_nodes: int | None, groups: Sequence[NodePoolConfig]) -> Inventory:
    """Return the first `num_nodes` nodes of an inventory, by default all, assigned to their groups."""
    if num_nodes is not None and num_nodes > inventory.num_nodes:
        raise PlacementError(
            f"cluster.num_nodes is {num_nodes}, the inventory has {quantity(inventory.num_nodes, 'node')}"
        )
    if num_nodes is not None and num_nodes < inventory.num_nodes:
        inventory = Inventory(inventory.nodes[:num_nodes])
    pools = []
    for group in groups:
        nodes = parse_node_ranks(group.node_ranks, inventory.num_nodes)
        env: dict[int, dict[str, str]] = {}
        for settings in group.env_configs:
            for rank in parse_node_ranks(settings.node_ranks, inventory.num_nodes):
                for variables in settings.env_vars:
                    env.setdefault(rank, {}).update(variables)
        pools.append(NodePool(group.label, nodes, env=env, ignore_devices=group.ignore_hardware))
    return inventory.with_pools(pools) if pools else inventory


def _on_assumed_nodes(config: Config, roles: list[RoleSpec], flow: Flow) -> Plan:
    """Plan on the smallest number of assumed nodes that have enough devices for the placement."""
    count = config.cluster.num_nodes or 1
    while True:
        try:
            return plan(_with_pools(Inventory.parse(f"{count}x{DEVICES_PER_NODE}"), config), roles, flow)
        except TooFewDevicesError:
            if config.cluster.num_nodes is not None or count >= MAX_ASSUMED_NODES:
                raise
            count += 1
