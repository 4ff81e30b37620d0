"""The planner: `plan(inventory, roles, flow)` assigns devices to roles, decides residency, and checks memory.

It is pure and deterministic: equal arguments give equal plans and equal JSON. It works once per group of identical
devices (same kind, same roles), never per device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotseat.errors import PlacementError
from hotseat.placement.flow import Flow, PhaseStep, check_flow, make_steps, shared_devices
from hotseat.placement.inventory import Inventory, format_ranges, format_ranks, ranges
from hotseat.placement.locate import Located, RoleRequest, locate
from hotseat.placement.memory_settings import ForwardMemory, Layout, TrainMemory
from hotseat.placement.memory_terms import FITS_BELOW, RoleMemory, Term, process_on_host, total
from hotseat.placement.plan_types import (
    DeviceGroup,
    GroupStep,
    HostGroup,
    Label,
    Plan,
    PlannedRole,
    RoleSpec,
    Route,
    Verdict,
)
from hotseat.placement.plan_warnings import plan_warnings
from hotseat.placement.residency import (
    Holding,
    Mode,
    Stuck,
    Tenant,
    activity,
    hand_overs,
    settle,
    working_terms,
    works_here,
)
from hotseat.placement.role_names import Part
from hotseat.placement.selection import Elsewhere, Selection, parse_selection
from hotseat.registry.roles import role_entry

_ROUNDING = 1e-9  # GiB; tolerance for sums of the same numbers in another order


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Settings:
    """Inputs of a role's memory estimate, kept so that it can be repeated with another share."""

    spec: RoleSpec
    layout: Layout

    def estimate(self) -> RoleMemory | None:
        return self.spec.estimate(self.layout)

    def with_share(self, share: float) -> _Settings:
        return _Settings(self.spec, replace(self.layout, share=share))


def plan(inventory: Inventory, roles: Sequence[RoleSpec], flow: Flow) -> Plan:
    """Plan a run, or raise a PlacementError that says what to change.

    A plan whose memory does not fit is returned with that verdict; a part that must leave a device but may not is an
    error.
    """
    specs = {spec.name: spec for spec in roles}
    selections = {
        spec.name: spec.on if isinstance(spec.on, Selection) else parse_selection(spec.on, spec.name) for spec in roles
    }
    check_flow(flow, specs)
    _check_working(specs, selections, flow)
    sizes = {spec.name: spec.tensor_parallel if spec.is_engine else None for spec in roles}
    located = locate(
        inventory, [RoleRequest(spec.name, selections[spec.name], sizes[spec.name], spec.num_procs) for spec in roles]
    )
    specs = {name: _with_own_share(spec, located[name]) for name, spec in specs.items()}
    for spec in specs.values():
        _check_parallel(spec, located[spec.name])
    steps = make_steps(flow, {name: place.devices for name, place in located.items()})
    _check_overlap(flow, located)
    groups = _groups(inventory, specs, located, flow, steps)
    hosts = _hosts(inventory, specs, located, flow, steps, groups)
    planned = tuple(
        PlannedRole(
            name=spec.name,
            on=str(selections[spec.name]),
            where=located[spec.name].where,
            processes=located[spec.name].processes,
            tensor_parallel=spec.tensor_parallel,
            share=spec.share,
            is_engine=spec.is_engine,
            model_assumed=spec.model_assumed,
        )
        for spec in specs.values()
    )
    return Plan(
        inventory=inventory,
        flow=flow,
        roles=planned,
        steps=steps,
        groups=groups,
        hosts=hosts,
        routes=_routes(flow, located),
        label=label_of(located),
        verdict=_overall(groups, hosts),
        warnings=tuple(plan_warnings(inventory, specs, selections, located, groups)),
    )


def _check_working(specs: Mapping[str, RoleSpec], selections: Mapping[str, Selection], flow: Flow) -> None:
    for name in specs:
        is_elsewhere = isinstance(selections[name], Elsewhere)
        if name not in flow.roles and not is_elsewhere:
            raise PlacementError(
                f"{name} is placed and works in no phase: take it out of the placement, or put it into a phase"
            )
        if is_elsewhere and any(w.role == name and w.is_training for phase in flow.phases for w in phase.works):
            raise PlacementError(f"{name}: it is trained here, so it cannot be none: give it devices or cpu*1")


def _with_own_share(spec: RoleSpec, place: Located) -> RoleSpec:
    """Return a role whose processes on one device divide a default share of its memory."""
    if spec.share is None or not spec.is_share_default:
        return spec
    counts = Counter(device for process in place.processes for device in process.devices)
    return replace(spec, share=spec.share / max(counts.values(), default=1))


def _check_parallel(spec: RoleSpec, place: Located) -> None:
    """Check that a model's processes can be divided into tensor- and sequence-parallel groups."""
    if spec.is_engine or place.where != "devices":
        return
    sequence = spec.memory.sequence_parallel if isinstance(spec.memory, TrainMemory | ForwardMemory) else 1
    size = spec.tensor_parallel * sequence
    if len(place.processes) % size:
        sizes = {"train.deepspeed.tensor_parallel_size": spec.tensor_parallel, "train.sequence_parallel_size": sequence}
        product = " x ".join(f"{key} {value}" for key, value in sizes.items() if value > 1)
        raise PlacementError(
            f"{spec.name}: {len(place.processes)} process{'es' * (len(place.processes) > 1)} cannot be cut into groups"
            f" of {size} ({product}): choose sizes whose product divides {len(place.processes)}, or give {spec.name}"
            f" another number of devices (cluster.component_placement.{spec.name})"
        )


def _check_overlap(flow: Flow, located: Mapping[str, Located]) -> None:
    if not flow.overlap.is_on:
        return
    overlap = f"overlap (queue {flow.overlap.queue}, staleness {flow.overlap.staleness})"
    rollout, training = flow.rollout_phases, flow.training_phases
    if not rollout or not training:
        raise PlacementError(f"{overlap} has no effect: this flow has no rollout beside training; set both to 0")
    if flow.overlap.carries_over:
        return
    for (first, second), shared in shared_devices(flow, {name: at.devices for name, at in located.items()}).items():
        plural = "device" if len(shared) == 1 else "devices"
        waiting = (
            "set overlap.in_flight to recompute, with which open requests wait for their turn on shared devices, or "
        )
        changes = "" if "env" in located else waiting  # simulators do not wait
        raise PlacementError(
            f"{overlap} needs rollout and training on separate devices, and {first} and {second} share {plural}"
            f" {format_ranks(shared)}: {changes}leave overlap out, or give {first} devices of its own"
        )


def shares_devices(plan: Plan) -> bool:
    """Tell whether rollout and training take turns on some device."""
    devices = {role.name: {d for process in role.processes for d in process.devices} for role in plan.roles}
    return bool(shared_devices(plan.flow, devices))


def _modes(spec: RoleSpec, flow: Flow) -> tuple[tuple[Part, Mode], ...]:
    can: Mode = spec.offload or "as_needed"
    parts = flow.parts_of(spec.name)
    return tuple((part, can if part in spec.can_offload or can == "never" else "cannot") for part in parts)


def _groups(
    inventory: Inventory,
    specs: Mapping[str, RoleSpec],
    located: Mapping[str, Located],
    flow: Flow,
    steps: tuple[PhaseStep, ...],
) -> tuple[DeviceGroup, ...]:
    tenancy: dict[int, list[tuple[str, int]]] = {}  # device: (role, its processes there)
    for name, place in located.items():
        counts = Counter(device for process in place.processes for device in process.devices)
        for device, count in counts.items():
            tenancy.setdefault(device, []).append((name, count))
    classes: dict[tuple[Any, ...], list[int]] = {}
    for node in inventory.nodes:
        for device in inventory.devices_of(node.rank):
            if device in tenancy:
                classes.setdefault((node.device_kind, tuple(tenancy[device])), []).append(device)
    groups = []
    for (kind, tenants), devices in classes.items():
        settings = {}
        for name, count in tenants:
            spec, num_procs = specs[name], len(located[name].processes)
            layout = Layout(num_procs, spec.tensor_parallel, count, spec.share, kind.memory_gib)
            settings[name] = _Settings(spec, layout)
        spans, memory_gib = ranges(devices), kind.memory_gib
        where = f"device{'s' * (len(devices) > 1)} {format_ranges(spans)}"
        _check_shares(settings, steps, where)
        own = [Tenant(name, role.estimate(), _modes(specs[name], flow)) for name, role in settings.items()]
        holdings, stuck = settle(own, steps, memory_gib)
        if stuck is not None and memory_gib is not None:
            shares = _smaller_shares(own, settings, steps[stuck.step], holdings[stuck.step], memory_gib)
            raise PlacementError(_stuck(stuck, steps[stuck.step].name, where, memory_gib, shares))
        in_steps = tuple(
            _group_step(own, settings, step, held, memory_gib) for step, held in zip(steps, holdings, strict=True)
        )
        moves = hand_overs(own, steps, holdings)
        groups.append(DeviceGroup(spans, str(kind), memory_gib, tuple(settings), in_steps, moves))
    return tuple(groups)


def _stuck(stuck: Stuck, step: str, devices: str, capacity: float, shares: Mapping[str, float]) -> str:
    why = (
        f"{role_entry(stuck.role).section}.enable_offload is false: unset it, or set it to true"
        if stuck.mode == "never"
        else "its backend cannot offload that: use one that can"
    )
    others = "".join(f", or set {role_entry(role).section}.memory_share to {share:g}" for role, share in shares.items())
    return (
        f"{stuck.role}: its {stuck.part} ({stuck.gib:.1f} GiB) must leave {devices} in step {step}, which needs"
        f" {stuck.needed_gib:.1f} of {capacity:.1f} GiB and finds {stuck.free_gib:.1f} free, but {why}{others}, or give"
        f" {stuck.role} devices of its own"
    )


def _check_shares(settings: Mapping[str, _Settings], steps: Sequence[PhaseStep], devices: str) -> None:
    """Check that the memory shares of the processes that work at the same time do not exceed the device."""
    for step in steps:
        claims = {
            work.role: layout.share * layout.procs_per_device
            for work in works_here(step, settings)
            if (layout := settings[work.role].layout).share is not None
        }
        over = sum(claims.values()) - 1
        if over > _ROUNDING:
            largest = max(claims, key=lambda role: (claims[role], role))
            count = settings[largest].layout.procs_per_device
            rest = 1 - sum(claim for role, claim in claims.items() if role != largest)
            sums = " + ".join(
                f"{role} {n} x {settings[role].layout.share:g}"
                if (n := settings[role].layout.procs_per_device) > 1
                else f"{role} {claim:g}"
                for role, claim in claims.items()
            )
            fix = (
                f"set {role_entry(largest).section}.memory_share to at most"
                f" {int((rest / count + _ROUNDING) * 100) / 100:g}"
                if rest / count >= 0.01
                else "lower several of them"
            )
            raise PlacementError(
                f"step {step.name} on {devices}: memory shares sum to {over + 1:.2f}, over 1 ({sums}): {fix},"
                f" or use separate devices"
            )


def _group_step(
    tenants: Sequence[Tenant],
    settings: Mapping[str, _Settings],
    step: PhaseStep,
    holdings: tuple[Holding, ...],
    capacity: float | None,
) -> GroupStep:
    memories = {tenant.role: tenant.memory for tenant in tenants}
    resident = [
        term
        for holding in holdings
        if holding.is_resident and (memory := memories[holding.role]) is not None
        for term in memory.parts.get(holding.part, ())
    ]
    working = working_terms(tenants, step)
    terms = tuple(sorted((*resident, *working), key=lambda term: list(settings).index(term.role)))
    used = total(terms)
    works = works_here(step, settings)
    starts = capacity is None or _can_start(step, settings)
    if all(memory is not None for memory in memories.values()):
        verdict = _verdict(used, capacity) if starts else "does_not_fit"
    else:
        # Some memory is unknown: the only certain verdict is that the known needs of the step exceed the device.
        needed = total(working) + sum(
            memory.part_gib(h.part)
            for h in holdings
            if h.state == "needed" and (memory := memories[h.role]) is not None
        )
        is_over = capacity is not None and (needed > capacity + _ROUNDING or not starts)
        verdict = "does_not_fit" if is_over else "unknown"
    return GroupStep(step.name, tuple(work.role for work in works), holdings, terms, used, verdict)


def _verdict(used: float, capacity: float | None) -> Verdict:
    if capacity is None:
        return "unknown"
    if used > capacity + _ROUNDING:
        return "does_not_fit"
    return "fits" if used <= FITS_BELOW * capacity + _ROUNDING else "tight"


def _can_start(step: PhaseStep, settings: Mapping[str, _Settings]) -> bool:
    """Return whether every engine's memory share has room for its weights and the cache of one sequence."""
    for work in works_here(step, settings):
        memory = settings[work.role].estimate() if Part.KV_CACHE in work.parts else None
        if memory is not None and memory.min_share is not None:
            if memory.min_share > (settings[work.role].layout.share or 1.0):
                return False
    return True


def _smaller_shares(
    tenants: Sequence[Tenant],
    settings: Mapping[str, _Settings],
    step: PhaseStep,
    holdings: Sequence[Holding],
    capacity: float,
) -> dict[str, float]:
    """Return, for each engine at work, the largest memory share with which the step fits, if there is one.

    It is in hundredths, leaves room for the others, and lets the engine start.
    """

    def used(role: str, changed: _Settings | None) -> float:
        """Return the GiB in use with other settings for a role; None leaves it out."""
        memories = {t.role: t.memory for t in tenants} | {role: changed.estimate() if changed is not None else None}
        those = [replace(t, memory=memories[t.role]) for t in tenants]
        parts = sum(
            memory.part_gib(h.part) for h in holdings if h.is_resident and (memory := memories[h.role]) is not None
        )
        return total(working_terms(those, step)) + parts

    shares = {}
    for role in (work.role for work in works_here(step, settings)):
        own, layout = settings[role], settings[role].layout
        if layout.share is None or layout.device_gib is None:
            continue
        memory = own.estimate()
        least = memory.min_share if memory is not None and memory.min_share is not None else 0.0
        others = used(role, None)
        # Memory that the engine takes outside of its share, measured with a share large enough to be filled.
        enough = max(layout.share, least)
        filled = used(role, own.with_share(enough)) - others
        beside = max(0.0, filled - enough * layout.device_gib * layout.procs_per_device)
        room = (capacity - others - beside) / layout.device_gib / layout.procs_per_device
        share = math.floor(min(room, 1.0) * 100) / 100
        if not 0 < share < layout.share:
            continue
        smaller = own.with_share(share)
        if used(role, smaller) <= capacity and _can_start(step, {**settings, role: smaller}):
            shares[role] = share
    return shares


def _hosts(
    inventory: Inventory,
    specs: Mapping[str, RoleSpec],
    located: Mapping[str, Located],
    flow: Flow,
    steps: Sequence[PhaseStep],
    groups: Sequence[DeviceGroup],
) -> tuple[HostGroup, ...]:
    """Sum up the host memory of each node that has a process: of the processes, and of the parts offloaded there."""
    procs = [Counter[str]() for _ in inventory.nodes]
    for name, place in located.items():
        for process in place.processes:
            procs[process.node][name] += 1
    devices = [Counter[int]() for _ in inventory.nodes]  # node: group: number of its devices
    for index, group in enumerate(groups):
        for first, last in group.devices:
            for device in range(first, last + 1):
                devices[inventory.node_of(device)][index] += 1
    classes: dict[tuple[Any, ...], list[int]] = {}
    for node in inventory.nodes:
        if procs[node.rank]:
            key = (node.host_memory_gib, tuple(procs[node.rank].items()), tuple(devices[node.rank].items()))
            classes.setdefault(key, []).append(node.rank)
    per_process = {name: _host_terms(specs[name], place, flow, steps) for name, place in located.items()}
    hosts = []
    for (memory_gib, counts, group_counts), nodes in classes.items():
        terms = [
            Term(name, term.name, term.gib * count, f"{count} x {term.gib:.2f} GiB ({term.formula})", term.part)
            for name, count in counts
            for term in per_process[name] or (process_on_host(name),)
        ]
        terms += [term for index, count in group_counts for term in _offloaded_terms(groups[index], count)]
        is_known = all(per_process[name] is not None for name, _ in counts)
        is_known &= all(s.verdict != "unknown" for index, _ in group_counts for s in groups[index].steps)
        used = total(terms)
        verdict = _verdict(used, memory_gib)
        if not is_known and verdict != "does_not_fit":
            verdict = "unknown"
        hosts.append(HostGroup(ranges(nodes), memory_gib, tuple(terms), used, verdict))
    return tuple(hosts)


def _host_terms(spec: RoleSpec, place: Located, flow: Flow, steps: Sequence[PhaseStep]) -> tuple[Term, ...] | None:
    """Return the host memory of one process (all its memory, for a role without devices); None if it is unknown."""
    if place.where != "cpu":
        # The device's size does not matter: only the host's terms are used.
        layout = Layout(len(place.processes), spec.tensor_parallel, share=spec.share, device_gib=1.0)
        memory = spec.estimate(layout)
        return memory.host if memory is not None else None
    layout = Layout(len(place.processes), spec.tensor_parallel, has_device=False)
    memory = spec.estimate(layout)
    if memory is None:
        return None
    parts = [term for part in flow.parts_of(spec.name) for term in memory.parts.get(part, ())]
    kinds = {activity(step, work) for step in steps for work in step.works if work.role == spec.name}
    peak = max((memory.working.get(kind, ()) for kind in sorted(kinds)), key=total, default=())
    return (*memory.host, *parts, *peak)


def _offloaded_terms(group: DeviceGroup, count: int) -> list[Term]:
    """Return the host copies of parts that leave these devices in some step. Their buffers persist, so they add up."""
    copies: dict[tuple[str, Part], float] = {}
    for step in group.steps:
        for holding in step.holdings:
            if holding.state == "offloaded" and holding.gib:
                copies[holding.role, holding.part] = holding.gib
    return [
        Term(role, f"{part} offloaded (pinned)", gib * count, f"{count} devices x {gib:.2f} GiB", part)
        for (role, part), gib in copies.items()
    ]


def _routes(flow: Flow, located: Mapping[str, Located]) -> tuple[Route, ...]:
    """Choose the source of each engine's weights: an actor process on its devices, else on its node, else rank 0."""
    targets = tuple(dict.fromkeys(role for phase in flow.phases for role in phase.pushes))
    if not targets:
        return ()
    on_device: dict[int, int] = {}
    on_node: dict[int, int] = {}
    for process in located["actor"].processes:
        on_node.setdefault(process.node, process.rank)
        for device in process.devices:
            on_device.setdefault(device, process.rank)
    routes = []
    for role in targets:
        for process in located[role].processes:
            if process.devices and all(device in on_device for device in process.devices):
                sources = tuple(dict.fromkeys(on_device[device] for device in process.devices))
                routes.append(Route(role, process.rank, "same_device", sources))
            elif process.node in on_node:
                routes.append(Route(role, process.rank, "same_node", (on_node[process.node],)))
            else:
                routes.append(Route(role, process.rank, "other_node", (0,)))
    return tuple(routes)


def label_of(located: Mapping[str, Located]) -> Label:
    """Name the placement by whether roles share all, none or some devices. Roles without devices do not count."""
    sets = [frozenset(place.devices) for place in located.values() if place.devices]
    if len(set(sets)) <= 1:
        return "colocated"
    if sum(len(each) for each in sets) == len(frozenset().union(*sets)):
        return "disaggregated"
    return "hybrid"


def _overall(groups: Sequence[DeviceGroup], hosts: Sequence[HostGroup]) -> Verdict:
    verdicts = {step.verdict for group in groups for step in group.steps}
    verdicts |= {host.verdict for host in hosts if host.memory_gib is not None}
    order: tuple[Verdict, ...] = ("does_not_fit", "unknown", "tight", "fits")
    return next((verdict for verdict in order if verdict in verdicts), "unknown")
