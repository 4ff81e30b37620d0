"""Search for engine memory shares with which a step fits.

`hotseat.planning.advisor`, which knows configs, searches for other settings that make a plan fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hotseat.placement.flow import PhaseStep
from hotseat.placement.memory import Layout, Memory, RoleMemory, estimate, total
from hotseat.placement.residency import Holding, Tenant, working_terms, works_here
from hotseat.placement.role_names import Part
from hotseat.placement.shapes import ModelShape


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Settings:
    """Inputs of a role's memory estimate, kept so that it can be repeated with changes."""

    memory: Memory | None
    model: ModelShape | None
    layout: Layout

    def estimate(self, role: str) -> RoleMemory | None:
        return estimate(role, self.memory, self.model, self.layout)

    def with_share(self, share: float) -> Settings:
        return replace(self, layout=replace(self.layout, share=share))


def can_start(step: PhaseStep, settings: Mapping[str, Settings]) -> bool:
    """Return whether every engine's memory share has room for its weights and the cache of one sequence."""
    for work in works_here(step, settings):
        memory = settings[work.role].estimate(work.role) if Part.KV_CACHE in work.parts else None
        if memory is not None and memory.min_share is not None:
            if memory.min_share > (settings[work.role].layout.share or 1.0):
                return False
    return True


def smaller_shares(
    tenants: Sequence[Tenant],
    settings: Mapping[str, Settings],
    step: PhaseStep,
    holdings: Sequence[Holding],
    capacity: float,
) -> dict[str, float]:
    """Return, for each engine at work, the largest memory share with which the step fits, if there is one.

    It is in hundredths, leaves room for the others, and lets the engine start.
    """

    def used(role: str, changed: Settings | None) -> float:
        """Return the GiB in use with other settings for a role; None leaves it out."""
        memories = {t.role: t.memory for t in tenants} | {role: changed.estimate(role) if changed is not None else None}
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
        memory = own.estimate(role)
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
        if used(role, smaller) <= capacity and can_start(step, {**settings, role: smaller}):
            shares[role] = share
    return shares
