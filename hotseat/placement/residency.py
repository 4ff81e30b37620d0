"""Residency: the parts that are on a device in each step, and those that move between steps.

A part that a step needs is on the device. Any other part stays if everything fits. It is offloaded if its mode is
always, or if the memory is needed: first the parts that can be dropped without a copy, then those whose next use is
furthest away, then the largest. An eviction that later ones make unnecessary is undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hotseat.placement.flow import PhaseStep, RoleWork
from hotseat.placement.memory_terms import FITS_BELOW, Activity, RoleMemory, Term, total
from hotseat.placement.role_names import Part

State = Literal["needed", "kept", "offloaded", "dropped"]
Mode = Literal["always", "as_needed", "never", "cannot"]
How = Literal["copied", "dropped", "restored", "allocated", "pushed"]

_WORTHLESS_WHEN_IDLE = (Part.KV_CACHE, Part.GRADIENTS)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tenant:
    """A role on one device: its memory there (None: unknown), and whether each of its parts may be offloaded."""

    role: str
    memory: RoleMemory | None
    modes: tuple[tuple[Part, Mode], ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """State of a role's part in a step: needed or merely kept on the device, offloaded to the host, or dropped."""

    role: str
    part: Part
    state: State
    gib: float | None = None

    @property
    def is_resident(self) -> bool:
        return self.state in ("needed", "kept")


@dataclass(frozen=True, slots=True)
class Move:
    """A part that leaves a device (copied to the host, dropped) or comes (restored, allocated, pushed by the actor)."""

    role: str
    part: Part
    how: How
    gib: float | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Passing of a device's lease from the roles of one step to those of the next step that uses the device."""

    from_step: str
    to_step: str
    from_roles: tuple[str, ...]
    to_roles: tuple[str, ...]
    leaves: tuple[Move, ...] = ()
    comes: tuple[Move, ...] = ()
    is_next_iteration: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Item:
    """A part of a tenant over the steps of an iteration."""

    role: str
    part: Part
    mode: Mode
    gib: float  # 0 where unknown
    needs: tuple[bool, ...]
    dropped: tuple[bool, ...]  # when absent in this step, no copy is kept, because the values are not read again

    def distance(self, step: int) -> int:
        return (_next_use(self.needs, step) - step) % len(self.needs) or len(self.needs)


def works_here(step: PhaseStep, roles: Iterable[str]) -> tuple[RoleWork, ...]:
    """Return the work of these roles in a step, including the rollout that overlaps it."""
    names = set(roles)
    return tuple(work for work in (*step.works, *step.beside) if work.role in names)


def activity(step: PhaseStep, work: RoleWork) -> Activity:
    """Classify a role's work by the working memory that it needs."""
    if work.role in step.pushes:
        return "receive"
    if step.pushes and work.role == "actor":
        return "push"
    if work.is_training:
        return "train"
    if Part.KV_CACHE in work.parts:
        return "generate"
    return "simulate" if Part.SIMULATOR in work.parts else "forward"


def working_terms(tenants: Sequence[Tenant], step: PhaseStep) -> tuple[Term, ...]:
    """Return a step's memory besides parts: fixed memory of every tenant, and working memory of those at work."""
    memories = {tenant.role: tenant.memory for tenant in tenants if tenant.memory is not None}
    terms = [term for memory in memories.values() for term in memory.fixed]
    for work in works_here(step, memories):
        terms += memories[work.role].working.get(activity(step, work), ())
    return tuple(terms)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Stuck:
    """A part that would have to leave a device in a step, but may not (mode never) or cannot."""

    step: int
    role: str
    part: Part
    mode: Mode
    gib: float
    needed_gib: float  # memory that the step needs
    free_gib: float  # memory that the step can get, with everything offloaded that can be


def settle(
    tenants: Sequence[Tenant], steps: Sequence[PhaseStep], capacity_gib: float | None
) -> tuple[tuple[tuple[Holding, ...], ...], Stuck | None]:
    """Decide every part's state in every step. Returns also the first part that would have to leave but cannot."""
    items = _items(tenants, steps)
    absent = [[item.mode == "always" and not need for need in item.needs] for item in items]
    known = capacity_gib is not None and all(tenant.memory is not None for tenant in tenants)
    stuck = None
    if known and capacity_gib is not None:
        rooms = [_room(tenants, items, absent, step, index, capacity_gib) for index, step in enumerate(steps)]
        bases, limits, all_stuck = zip(*rooms, strict=True)
        stuck = next((each for each in all_stuck if each is not None), None)
        _evict(items, absent, bases, limits)

    def holding(item: _Item, step: int, is_away: bool) -> Holding:
        state: State = "needed" if item.needs[step] else "kept"
        if is_away and not item.needs[step]:
            state = "dropped" if item.dropped[step] else "offloaded"
        return Holding(item.role, item.part, state, item.gib if known else None)

    holdings = tuple(
        tuple(holding(item, index, absent[row][index]) for row, item in enumerate(items)) for index in range(len(steps))
    )
    return holdings, stuck


def _items(tenants: Sequence[Tenant], steps: Sequence[PhaseStep]) -> list[_Item]:
    items = []
    for tenant in tenants:
        for part, mode in tenant.modes:
            needs = tuple(any(part in work.parts for work in works_here(step, [tenant.role])) for step in steps)
            gib = tenant.memory.part_gib(part) if tenant.memory is not None else 0.0
            dropped = [part in _WORTHLESS_WHEN_IDLE] * len(steps)
            if part is Part.WEIGHTS:  # overwritten by the actor's before their next use
                dropped = [tenant.role in steps[_next_use(needs, index)].pushes for index in range(len(steps))]
            items.append(_Item(tenant.role, part, mode, gib, needs, tuple(dropped)))
    return items


def _next_use(needs: Sequence[bool], step: int) -> int:
    """Return the next step that needs a part, which may be the same one of the next iteration."""
    count = len(needs)
    return next((step + d) % count for d in range(1, count + 1) if needs[(step + d) % count])


def _evict(items: Sequence[_Item], absent: list[list[bool]], base: Sequence[float], limits: Sequence[float]) -> None:
    """Mark in `absent` the parts that must leave so that every step has room."""
    count = len(base)
    used = [base[s] + sum(i.gib for i, a in zip(items, absent, strict=True) if not a[s]) for s in range(count)]
    evicted: list[tuple[int, list[int]]] = []  # (item, the steps it is absent for)
    for s in range(count):
        while used[s] > limits[s]:
            rows = [r for r, item in enumerate(items) if _may_leave(item, s) and not absent[r][s]]
            if not rows:
                break
            row = max(rows, key=lambda r: (items[r].dropped[s], items[r].distance(s), items[r].gib, -r))
            gone = [(s + d) % count for d in range(items[row].distance(s))]
            gone = [t for t in gone if not absent[row][t]]
            for t in gone:
                absent[row][t] = True
                used[t] -= items[row].gib
            evicted.append((row, gone))
    _give_back(items, absent, used, limits, evicted)


def _give_back(
    items: Sequence[_Item],
    absent: list[list[bool]],
    used: list[float],
    limits: Sequence[float],
    evicted: list[tuple[int, list[int]]],
) -> None:
    """Undo evictions whose room a later one has made unnecessary, copies before drops, the largest first.

    A part that has left comes back only at its next use, so an eviction can be undone only from its beginning on.
    """
    count = len(used)
    waiting = sorted(evicted, key=lambda e: (items[e[0]].dropped[e[1][0]], -items[e[0]].gib, e[0], e[1]))

    def stays(row: int, step: int) -> bool:
        is_here_before = not absent[row][(step - 1) % count]
        if not is_here_before or used[step] + items[row].gib > limits[step]:
            return False
        absent[row][step] = False
        used[step] += items[row].gib
        return True

    changed = True
    while changed:
        changed = False
        for entry in list(waiting):
            row, gone = entry
            if all(used[t] + items[row].gib <= limits[t] for t in gone) and stays(row, gone[0]):
                for t in gone[1:]:
                    stays(row, t)
                waiting.remove(entry)
                changed = True
    # The remaining parts do have to leave: let each leave as late as possible.
    for row, gone in waiting:
        for t in gone:
            if not stays(row, t):
                break


def _may_leave(item: _Item, step: int) -> bool:
    return item.mode == "as_needed" and item.gib > 0 and not item.needs[step]


def _room(
    tenants: Sequence[Tenant],
    items: Sequence[_Item],
    absent: Sequence[Sequence[bool]],
    step: PhaseStep,
    index: int,
    capacity: float,
) -> tuple[float, float, Stuck | None]:
    """Return the GiB that a step takes besides parts, its limit, and the part in the way if that cannot be kept.

    The limit is comfortably below the device's memory where possible, else the device's memory.
    """
    base = total(working_terms(tenants, step))
    kinds = {activity(step, work) for work in works_here(step, (tenant.role for tenant in tenants))}
    if not kinds or (len(tenants) == 1 and kinds <= {"generate", "receive", "simulate"}):
        return base, capacity, None  # idle parts do not grow, nor does an engine within its memory share
    resident = [item for item, a in zip(items, absent, strict=True) if not a[index]]
    fixed = [item for item in resident if not item.needs[index] and not _may_leave(item, index)]
    needed = base + sum(item.gib for item in resident if item.needs[index])
    least = needed + sum(item.gib for item in fixed)
    if least <= FITS_BELOW * capacity:
        return base, FITS_BELOW * capacity, None
    if least <= capacity or needed > capacity:
        return base, capacity, None
    worst = max(fixed, key=lambda item: (item.gib, item.role, item.part))
    free = capacity - (least - needed)
    return base, capacity, Stuck(index, worst.role, worst.part, worst.mode, worst.gib, needed, free)


def hand_overs(
    tenants: Sequence[Tenant], steps: Sequence[PhaseStep], holdings: Sequence[Sequence[Holding]]
) -> tuple[HandOver, ...]:
    """List each passing of the device from one step that uses it to the next, up to the next iteration's first."""
    roles = [tuple(w.role for w in works_here(step, (t.role for t in tenants))) for step in steps]
    busy = [index for index, names in enumerate(roles) if names]
    passes = []
    for position, first in enumerate(busy):
        last = busy[(position + 1) % len(busy)]
        length = (last - first) % len(steps) or len(steps)
        between = [(first + d) % len(steps) for d in range(length + 1)]
        leaves, comes = _moves(holdings, between, steps)
        if leaves or comes or set(roles[first]) != set(roles[last]):
            passes.append(
                HandOver(steps[first].name, steps[last].name, roles[first], roles[last], leaves, comes, last <= first)
            )
    return tuple(passes)


def _moves(
    holdings: Sequence[Sequence[Holding]], between: Sequence[int], steps: Sequence[PhaseStep]
) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    leaves, comes = [], []
    first, last = between[0], between[-1]
    how: How
    for row, start in enumerate(holdings[first]):
        absent = [s for s in between if not holdings[s][row].is_resident]
        end = holdings[last][row]
        if start.is_resident and absent:
            how = "copied" if holdings[absent[0]][row].state == "offloaded" else "dropped"
            leaves.append(Move(start.role, start.part, how, start.gib))
        if end.is_resident and absent:
            is_pushed = end.part is Part.WEIGHTS and end.role in steps[last].pushes
            how = "allocated" if end.part in _WORTHLESS_WHEN_IDLE else "pushed" if is_pushed else "restored"
            comes.append(Move(end.role, end.part, how, end.gib))
    return tuple(leaves), tuple(comes)
