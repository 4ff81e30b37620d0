"""Which parts are on a device in which step, and what moves between steps.

A part that a step needs is on the device. Any other part stays if all fits; leaves if it is always offloaded, or if the
memory is needed: first what can be dropped without a copy, then what is used again furthest from now, then the largest.
What turns out to have left for nothing stays after all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hotseat.placement.flow import Step, Work
from hotseat.placement.memory import FITS_BELOW, Activity, RoleMemory, Term, total
from hotseat.placement.roles import Part

State = Literal["needed", "kept", "offloaded", "dropped"]
Mode = Literal["always", "as_needed", "never", "cannot"]
How = Literal["copied", "dropped", "restored", "allocated", "pushed"]

_WORTHLESS_WHEN_IDLE = (Part.KV_CACHE, Part.GRADIENTS)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tenant:
    """A role on one device: what it takes there (None: unknown) and what may become of each of its parts."""

    role: str
    memory: RoleMemory | None
    modes: tuple[tuple[Part, Mode], ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """A part of a role in a step: needed or merely kept on the device; offloaded to the host, or dropped."""

    role: str
    part: Part
    state: State
    gib: float | None = None

    @property
    def is_resident(self) -> bool:
        return self.state in ("needed", "kept")


@dataclass(frozen=True, slots=True)
class Move:
    """A part that leaves (copied to the host, dropped) or comes (restored, allocated anew, pushed by the actor)."""

    role: str
    part: Part
    how: How
    gib: float | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """The lease of a device passes from the roles of one step to those of the next step that uses the device."""

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
    dropped: tuple[bool, ...]  # if it is away in this step: without a copy, because nobody will read it again

    def distance(self, step: int) -> int:
        """Steps from here to its next use."""
        count = len(self.needs)
        return next(d for d in range(1, count + 1) if self.needs[(step + d) % count])


def works_here(step: Step, roles: Iterable[str]) -> tuple[Work, ...]:
    """The works of a step, and those that go on beside it, by roles of a device."""
    names = set(roles)
    return tuple(work for work in (*step.works, *step.beside) if work.role in names)


def activity(step: Step, work: Work) -> Activity:
    """What kind of work this is, as far as memory is concerned."""
    if work.role in step.pushes:
        return "receive"
    if step.pushes and work.role == "actor":
        return "push"
    if work.is_training:
        return "train"
    if Part.KV_CACHE in work.parts:
        return "generate"
    return "simulate" if Part.SIMULATOR in work.parts else "forward"


def working_terms(tenants: Sequence[Tenant], step: Step) -> tuple[Term, ...]:
    """Memory that is there in this step whatever is offloaded: fixed for everybody, working memory for who works."""
    memories = {tenant.role: tenant.memory for tenant in tenants if tenant.memory is not None}
    terms = [term for memory in memories.values() for term in memory.fixed]
    for work in works_here(step, memories):
        terms += memories[work.role].working.get(activity(step, work), ())
    return tuple(terms)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Stuck:
    """A part that would have to leave in a step and may not (mode never) or cannot."""

    step: int
    role: str
    part: Part
    mode: Mode
    gib: float
    needed_gib: float  # by the step
    free_gib: float  # for the step, with everything gone that can go


def settle(
    tenants: Sequence[Tenant], steps: Sequence[Step], capacity_gib: float | None
) -> tuple[tuple[tuple[Holding, ...], ...], Stuck | None]:
    """Every part's state in every step, and the first part that is in the way and cannot leave."""
    items = _items(tenants, steps)
    away = [[item.mode == "always" and not need for need in item.needs] for item in items]
    known = capacity_gib is not None and all(tenant.memory is not None for tenant in tenants)
    stuck = None
    if known and capacity_gib is not None:
        rooms = [_room(tenants, items, away, step, index, capacity_gib) for index, step in enumerate(steps)]
        stuck = next((room.stuck for room in rooms if room.stuck is not None), None)
        _evict(items, away, [room.base for room in rooms], [room.limit for room in rooms])
    holdings = tuple(
        tuple(_holding(item, index, away[row][index], known) for row, item in enumerate(items))
        for index in range(len(steps))
    )
    return holdings, stuck


def _items(tenants: Sequence[Tenant], steps: Sequence[Step]) -> list[_Item]:
    items = []
    for tenant in tenants:
        for part, mode in tenant.modes:
            needs = tuple(any(part in work.parts for work in works_here(step, [tenant.role])) for step in steps)
            gib = tenant.memory.part_gib(part) if tenant.memory is not None else 0.0
            dropped = tuple(
                part in _WORTHLESS_WHEN_IDLE or _is_pushed_next(tenant.role, part, needs, steps, index)
                for index in range(len(steps))
            )
            items.append(_Item(tenant.role, part, mode, gib, needs, dropped))
    return items


def _is_pushed_next(role: str, part: Part, needs: tuple[bool, ...], steps: Sequence[Step], index: int) -> bool:
    """Whether the next use of these weights is to be overwritten by the actor's."""
    if part is not Part.WEIGHTS:
        return False
    count = len(steps)
    following = next((index + d) % count for d in range(1, count + 1) if needs[(index + d) % count])
    return role in steps[following].pushes


def _holding(item: _Item, step: int, is_away: bool, known: bool) -> Holding:
    if item.needs[step]:
        state: State = "needed"
    elif not is_away:
        state = "kept"
    else:
        state = "dropped" if item.dropped[step] else "offloaded"
    return Holding(item.role, item.part, state, item.gib if known else None)


def _evict(items: Sequence[_Item], away: list[list[bool]], base: Sequence[float], limits: Sequence[float]) -> None:
    """Mark as away, in place, what must leave so that every step has room."""
    count = len(base)
    used = [base[s] + sum(i.gib for i, a in zip(items, away, strict=True) if not a[s]) for s in range(count)]
    evicted: list[tuple[int, list[int]]] = []  # (item, the steps it is away for)
    for s in range(count):
        while used[s] > limits[s]:
            rows = [r for r, item in enumerate(items) if _may_leave(item, s) and not away[r][s]]
            if not rows:
                break
            row = max(rows, key=lambda r: (items[r].dropped[s], items[r].distance(s), items[r].gib, -r))
            gone = [(s + d) % count for d in range(items[row].distance(s))]
            gone = [t for t in gone if not away[row][t]]
            for t in gone:
                away[row][t] = True
                used[t] -= items[row].gib
            evicted.append((row, gone))
    _give_back(items, away, used, limits, evicted)


def _give_back(
    items: Sequence[_Item],
    away: list[list[bool]],
    used: list[float],
    limits: Sequence[float],
    evicted: list[tuple[int, list[int]]],
) -> None:
    """Undo evictions whose room a later one has made unnecessary, copies before drops, the largest first.

    A part that has left comes back at its next use, not before: what is given back must follow a step it is there in.
    """
    count = len(used)
    waiting = sorted(evicted, key=lambda e: (items[e[0]].dropped[e[1][0]], -items[e[0]].gib, e[0], e[1]))

    def stays(row: int, step: int) -> bool:
        is_here_before = not away[row][(step - 1) % count]
        if not is_here_before or used[step] + items[row].gib > limits[step]:
            return False
        away[row][step] = False
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
    # What does have to leave leaves no earlier than it must.
    for row, gone in waiting:
        for t in gone:
            if not stays(row, t):
                break


def _may_leave(item: _Item, step: int) -> bool:
    return item.mode == "as_needed" and item.gib > 0 and not item.needs[step]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Room:
    """Of a step: what it takes besides parts, what it should stay under, and what is in the way if that cannot be."""

    base: float
    limit: float
    stuck: Stuck | None = None


def _room(
    tenants: Sequence[Tenant],
    items: Sequence[_Item],
    away: Sequence[Sequence[bool]],
    step: Step,
    index: int,
    capacity: float,
) -> _Room:
    """A step should stay comfortably below the device's memory where that can be had, and below it in any case."""
    base = total(working_terms(tenants, step))
    kinds = {activity(step, work) for work in works_here(step, (tenant.role for tenant in tenants))}
    if not kinds or (len(tenants) == 1 and kinds <= {"generate", "receive", "simulate"}):
        return _Room(base, capacity)  # what merely lies there does not grow, nor does an engine within its own share
    resident = [item for item, a in zip(items, away, strict=True) if not a[index]]
    fixed = [item for item in resident if not item.needs[index] and not _may_leave(item, index)]
    needed = base + sum(item.gib for item in resident if item.needs[index])
    least = needed + sum(item.gib for item in fixed)
    if least <= FITS_BELOW * capacity:
        return _Room(base, FITS_BELOW * capacity)
    if least <= capacity or needed > capacity:
        return _Room(base, capacity)
    worst = max(fixed, key=lambda item: (item.gib, item.role, item.part))
    free = capacity - (least - needed)
    return _Room(base, capacity, Stuck(index, worst.role, worst.part, worst.mode, worst.gib, needed, free))


def hand_overs(
    tenants: Sequence[Tenant], steps: Sequence[Step], holdings: Sequence[Sequence[Holding]]
) -> tuple[HandOver, ...]:
    """Each passing of the device from one step that uses it to the next, round to the next iteration."""
    roles = [tuple(w.role for w in works_here(step, (t.role for t in tenants))) for step in steps]
    busy = [index for index, names in enumerate(roles) if names]
    found = []
    for position, first in enumerate(busy):
        last = busy[(position + 1) % len(busy)]
        length = (last - first) % len(steps) or len(steps)
        between = [(first + d) % len(steps) for d in range(length + 1)]
        leaves, comes = _moves(holdings, between, steps)
        if leaves or comes or set(roles[first]) != set(roles[last]):
            found.append(
                HandOver(steps[first].name, steps[last].name, roles[first], roles[last], leaves, comes, last <= first)
            )
    return tuple(found)


def _moves(
    holdings: Sequence[Sequence[Holding]], between: Sequence[int], steps: Sequence[Step]
) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    leaves, comes = [], []
    first, last = between[0], between[-1]
    for row, start in enumerate(holdings[first]):
        away = [s for s in between if not holdings[s][row].is_resident]
        end = holdings[last][row]
        if start.is_resident and away:
            how: How = "copied" if holdings[away[0]][row].state == "offloaded" else "dropped"
            leaves.append(Move(start.role, start.part, how, start.gib))
        if end.is_resident and away:
            comes.append(Move(end.role, end.part, _coming(end, steps[last]), end.gib))
    return tuple(leaves), tuple(comes)


def _coming(holding: Holding, step: Step) -> How:
    if holding.part in _WORTHLESS_WHEN_IDLE:
        return "allocated"
    is_pushed = holding.part is Part.WEIGHTS and holding.role in step.pushes
    return "pushed" if is_pushed else "restored"
