"""Inputs and results of the planner: roles, and a plan with its groups of devices and hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from hotseat.errors import PlacementError
from hotseat.placement.flow import Flow, PhaseStep
from hotseat.placement.inventory import Inventory
from hotseat.placement.locate import Process, Where
from hotseat.placement.memory import estimate
from hotseat.placement.memory_settings import EngineMemory, Layout, Memory
from hotseat.placement.memory_terms import RoleMemory, Term
from hotseat.placement.residency import HandOver, Holding
from hotseat.placement.role_names import Part
from hotseat.placement.selection import Selection
from hotseat.placement.shapes import ModelShape
from hotseat.registry.roles import role_entry

Offloading = Literal["always", "never"]
Verdict = Literal["fits", "tight", "does_not_fit", "unknown"]
RouteKind = Literal["same_device", "same_node", "other_node"]
Label = Literal["colocated", "disaggregated", "hybrid"]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A role as input of the planner.

    `on` is a selection, or the text of one for `parse_selection`. `num_procs` counts engines for an engine, otherwise
    processes. `share` is the fraction of a device's memory that each process claims, or if `is_share_default` that all
    of them claim together. `offload` None means as needed;
    "always" applies to all of `can_offload`, the parts that the backend can offload.
    """

    name: str
    on: Selection | str | int | Mapping[str, object]
    tensor_parallel: int = 1
    num_procs: int | None = None
    share: float | None = None
    is_share_default: bool = False
    offload: Offloading | None = None
    can_offload: frozenset[Part] = frozenset()
    memory: Memory | None = None
    model: ModelShape | None = None
    model_assumed: str | None = None  # the public model whose shape was taken from the name alone

    @property
    def is_engine(self) -> bool:
        """One process uses several devices, instead of one process per device."""
        return role_entry(self.name).kind == "engine" or isinstance(self.memory, EngineMemory)

    def estimate(self, layout: Layout) -> RoleMemory | None:
        """Estimate the role's memory on one of its devices; None if that is not known."""
        return estimate(self.name, self.memory, self.model, layout)


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """A role with its assigned processes. `on` is its selection as text."""

    name: str
    on: str
    where: Where
    processes: tuple[Process, ...]
    tensor_parallel: int = 1
    share: float | None = None
    is_engine: bool = False
    model_assumed: str | None = None

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of the role, each once, in process order."""
        return tuple(dict.fromkeys(device for process in self.processes for device in process.devices))


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A group of devices in one step. `used_gib` counts the known memory; verdict unknown: some memory is not known."""

    step: str
    roles: tuple[str, ...]  # at work in this step
    holdings: tuple[Holding, ...]
    terms: tuple[Term, ...]
    used_gib: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of the same kind with the same roles: ranges of global ids, both ends included."""

    devices: tuple[tuple[int, int], ...]
    kind: str
    memory_gib: float | None
    roles: tuple[str, ...]
    steps: tuple[GroupStep, ...]
    hand_overs: tuple[HandOver, ...]

    def __contains__(self, device: int) -> bool:
        return any(first <= device <= last for first, last in self.devices)


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Nodes whose host memory holds the same: ranges of node ranks, both ends included."""

    nodes: tuple[tuple[int, int], ...]
    memory_gib: float | None
    terms: tuple[Term, ...]
    used_gib: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Route:
    """Route of the actor's weights to one engine, and the actor ranks that they come from."""

    role: str
    rank: int
    kind: RouteKind
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's result for an inventory, roles and a flow."""

    inventory: Inventory
    flow: Flow
    roles: tuple[PlannedRole, ...]
    steps: tuple[PhaseStep, ...]
    groups: tuple[DeviceGroup, ...]
    hosts: tuple[HostGroup, ...]
    routes: tuple[Route, ...]
    label: Label
    verdict: Verdict
    warnings: tuple[str, ...]

    def role(self, name: str) -> PlannedRole:
        for role in self.roles:
            if role.name == name:
                return role
        raise PlacementError(f"{name} is not placed: placed are {', '.join(role.name for role in self.roles)}")

    def group_of(self, device: int) -> DeviceGroup | None:
        """Return the group that a device belongs to; None: no role uses it."""
        return next((group for group in self.groups if device in group), None)

    def to_json(self) -> str:
        def facts(value: Any) -> dict[str, Any]:
            return {each.name: getattr(value, each.name) for each in fields(value) if each.init}

        return json.dumps(self, default=facts, separators=(",", ":"), allow_nan=False)
