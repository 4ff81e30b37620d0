"""What to change where a step does not fit: settings that are tried out, not guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotseat.placement.flow import Step
from hotseat.placement.memory import (
    EngineMemory,
    ForwardMemory,
    Layout,
    Memory,
    RoleMemory,
    TrainMemory,
    estimate,
    savings,
    total,
)
from hotseat.placement.residency import Holding, Tenant, working_terms, works_here
from hotseat.placement.roles import Part
from hotseat.placement.shapes import ModelShape

Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with which a step would take `gib_after`. Changes marked `together` only help all at once."""

    role: str
    setting: str
    value: Value
    gib_after: float
    together: bool = False

    def __str__(self) -> str:
        value = ("off", "on")[self.value] if isinstance(self.value, bool) else str(self.value)
        setting = "memory_share" if self.setting == "share" else self.setting
        return f"set {self.role}.{setting} to {value} (then {self.gib_after:.1f} GiB)"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Settings:
    """What a role's memory was estimated from, so that it can be estimated with something else."""

    memory: Memory | None
    model: ModelShape | None
    layout: Layout

    def estimate(self, role: str) -> RoleMemory | None:
        return estimate(role, self.memory, self.model, self.layout)

    def with_memory(self, **changes: Any) -> Settings:
        assert self.memory is not None
        return replace(self, memory=replace(self.memory, **changes))

    def with_layout(self, **changes: Any) -> Settings:
        return replace(self, layout=replace(self.layout, **changes))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Step:
    """A step on a device, to be recomputed with other settings."""

    tenants: Sequence[Tenant]
    settings: Mapping[str, Settings]
    step: Step
    holdings: Sequence[Holding]
    capacity: float

    def used(self, changed: Mapping[str, Settings | None]) -> float:
        """GiB with other settings for some roles; None: without the role."""
        memories = {t.role: t.memory for t in self.tenants}
        for role, own in changed.items():
            memories[role] = own.estimate(role) if own is not None else None
        those = [replace(t, memory=memories[t.role]) for t in self.tenants]
        parts = sum(
            memory.part_gib(h.part) for h in self.holdings if h.is_resident and (memory := memories[h.role]) is not None
        )
        return total(working_terms(those, self.step)) + parts

    def fits(self, changed: Mapping[str, Settings]) -> bool:
        return self.used(changed) <= self.capacity and can_start(self.step, {**self.settings, **changed})


def can_start(step: Step, settings: Mapping[str, Settings]) -> bool:
    """Whether the share of every engine that generates here has room for its weights and the cache of one sequence."""
    for work in works_here(step, settings):
        memory = settings[work.role].estimate(work.role) if Part.KV_CACHE in work.parts else None
        if memory is not None and memory.min_share is not None:
            if memory.min_share > (settings[work.role].layout.share or 1.0):
                return False
    return True


def advise(
    tenants: Sequence[Tenant],
    settings: Mapping[str, Settings],
    step: Step,
    holdings: Sequence[Holding],
    capacity: float,
) -> tuple[Change, ...]:
    """Single changes that make the step fit; if there is none, changes that do together; if none, more devices."""
    here = _Step(tenants, dict(settings), step, holdings, capacity)
    works = sorted(works_here(step, settings), key=lambda w: not isinstance(settings[w.role].memory, EngineMemory))
    singles: list[Change] = []
    for work in works:
        own = settings[work.role]
        share = _share_that_fits(here, work.role)
        if share is not None:
            after = here.used({work.role: own.with_layout(share=share)})
            singles.append(Change(work.role, "share", share, after))
        if own.memory is None:
            continue
        for setting, values in savings(own.memory, work.is_training):
            change = _first_that_fits(here, work.role, setting, values)
            singles += [change] if change is not None else []
    if singles:
        return tuple(singles)
    return tuple(_together(here, {work.role: work.is_training for work in works}) or _more_devices(here))


def _first_that_fits(here: _Step, role: str, setting: str, values: Sequence[bool | int]) -> Change | None:
    """Each value takes less memory than the one before, so all after the first that fits do too: bisect."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if here.fits({role: here.settings[role].with_memory(**{setting: values[middle]})}):
            high = middle
        else:
            low = middle + 1
    if low == len(values):
        return None
    after = here.used({role: here.settings[role].with_memory(**{setting: values[low]})})
    return Change(role, setting, values[low], after)


def _share_that_fits(here: _Step, role: str) -> float | None:
    """The largest memory share, in hundredths, that leaves room for the others and lets the engine start."""
    own = here.settings[role]
    layout = own.layout
    if layout.share is None or layout.device_gib is None:
        return None
    memory = own.estimate(role)
    least = memory.min_share if memory is not None and memory.min_share is not None else 0.0
    others = here.used({role: None})
    # What an engine keeps beside its share, seen where the share is large enough to be filled.
    enough = max(layout.share, least)
    filled = here.used({role: own.with_layout(share=enough)}) - others
    beside = max(0.0, filled - enough * layout.device_gib * layout.procs_per_device)
    room = (here.capacity - others - beside) / layout.device_gib / layout.procs_per_device
    share = math.floor(min(room, 1.0) * 100) / 100
    if least > layout.share:  # it needs more, not less: the least that lets it start
        share = min(share, math.ceil(least * 100) / 100)
    elif share >= layout.share:
        return None
    return share if share > 0 and here.fits({role: own.with_layout(share=share)}) else None


def _together(here: _Step, works: Mapping[str, bool]) -> list[Change]:
    """Every setting at its smallest memory, one after another, until the step fits."""
    stack: list[Change] = []
    changed: dict[str, Settings] = {}
    for role, is_training in works.items():
        own = here.settings[role]
        if own.memory is None:
            continue
        for setting, values in savings(own.memory, is_training):
            before = here.used(changed)
            changed[role] = changed.get(role, own).with_memory(**{setting: values[-1]})
            after = here.used(changed)
            if after < before:
                stack.append(Change(role, setting, values[-1], after, together=True))
            if here.fits(changed):
                return stack
    return []


def _more_devices(here: _Step) -> list[Change]:
    """Sharded roles over 2, 4, 8, ... times the devices; engines cut into more."""
    for factor in (2, 4, 8, 16, 32, 64):
        changed: dict[str, Settings] = {}
        values: dict[str, tuple[str, int]] = {}
        for work in works_here(here.step, here.settings):
            own = here.settings[work.role]
            if isinstance(own.memory, TrainMemory | ForwardMemory):
                cut = {"zero_stage": 3} if isinstance(own.memory, TrainMemory) else {"is_sharded": True}
                count = own.layout.num_procs * factor
                changed[work.role] = own.with_memory(**cut).with_layout(num_procs=count)
                values[work.role] = ("num_devices", count)
            elif isinstance(own.memory, EngineMemory):
                size = own.layout.tensor_parallel * factor
                changed[work.role] = own.with_layout(tensor_parallel=size)
                values[work.role] = ("tensor_parallel_size", size)
        if changed and here.fits(changed):
            after = here.used(changed)
            return [Change(role, *values[role], after, together=len(values) > 1) for role in changed]
    return []
