"""Who sits on the devices: carries the Plan out, turn by turn.

A turn is a step of the plan. To enter one, what must not be on its devices leaves, the holders of the turn before
report what they gave up, the lease passes, and what is needed comes back. Leaving a turn moves nothing: whether
anything has to move is known only when the next turn is known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hotseat import faults
from hotseat.cluster.group import Group
from hotseat.cluster.lease import DeviceMemory, Holder, Lease, Leases
from hotseat.errors import PlacementError, RunError
from hotseat.observe import Timeline
from hotseat.placement import GIB, Part, Plan, Step
from hotseat.types import Moved

ALLOWANCE_BYTES = 1 << 29  # what a process may still hold of the parts that it has put aside


@dataclass(frozen=True)
class SeatMove:
    """One part of one role that was put aside or brought back."""

    turn: str
    role: str
    part: str
    is_leaving: bool
    num_bytes: int
    ms: float


class Seats:
    """The plan's residency, made true. `groups` holds the running roles; a role that is not there takes no turn.

    A process that is gone has left its devices: it is not asked to put anything aside, or to bring anything back.
    Whoever calls it next hears of its death.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[str, Group],
        *,
        timeout_s: float,
        is_gone: Callable[[Holder], bool] = lambda holder: False,
        measure: Callable[[int], DeviceMemory | None] = lambda device: None,
        timeline: Timeline | None = None,
    ):
        self._plan = plan
        self._groups = groups
        self._timeout_s = timeout_s
        self._is_gone = is_gone
        self._measure = measure
        self._leases = Leases(measure=measure, is_gone=is_gone)
        self._lease: Lease | None = None
        self._timeline = timeline
        self._since_s = time.time()  # when the lease was granted
        self._processes = {
            (role.name, process.rank): process for role in plan.roles for process in role.processes if process.devices
        }
        self._aside: dict[tuple[str, int], set[Part]] = {key: set() for key in self._processes}
        self._without_weights: set[str] = set()
        self.moves: deque[SeatMove] = deque(maxlen=10_000)  # the newest; the timeline has them all
        self._spent: dict[str, float] = {}  # see `spent`

    @contextmanager
    def turn(self, phase: str, role: str) -> Iterator[None]:
        """Hold the devices of the step in which `role` works in `phase`."""
        step = self._step(phase, role)
        started_s = time.monotonic()
        self._hand_over(self._leaving(step), step.name)
        holders = self._holders(step)
        if holders:
            remaining_s = max(1.0, self._timeout_s - (time.monotonic() - started_s))
            self._lease = self._leases.acquire(step.name, holders, timeout_s=remaining_s)
            self._since_s = time.time()
        self._make_room(step)
        self._bring_back(step)
        yield

    def spent(self) -> dict[str, float]:
        """Seconds and GiB of hand-overs since this was last asked: put_aside_s, bring_back_s, gib, gib_copied."""
        found, self._spent = self._spent, {}
        return found

    def has_weights(self, role: str) -> bool:
        """Whether none of its weights were dropped since it was last given some."""
        return role not in self._without_weights

    def given_weights(self, role: str) -> None:
        self._without_weights.discard(role)

    def replaced(self, role: str, rank: int) -> None:
        """A process was replaced by a new one, which has all its parts on its devices, if it has any."""
        if (role, rank) in self._processes:
            self._aside[role, rank] = set()
            self._leases.forget_use(self._processes[role, rank].devices)

    def make_way(self, role: str, rank: int) -> None:
        """Put aside what other roles have on a process's devices: it is about to start, and measures what is free."""
        devices = set(self._processes[role, rank].devices) if (role, rank) in self._processes else set()
        for (other, number), process in self._processes.items():
            if other == role or other not in self._groups or not devices & set(process.devices):
                continue
            parts = sorted(self._parts(other) - self._aside[other, number])
            if parts and self._move("put_aside", "restart", other, number, parts, True) is not None:
                self._aside[other, number] |= set(parts)

    def _parts(self, role: str) -> set[Part]:
        """That it can put aside, as far as the plan knows."""
        return {
            holding.part
            for group in self._plan.groups
            for step in group.steps
            for holding in step.holdings
            if holding.role == role
        }

    def close(self) -> None:
        """End the last turn's lease."""
        self._hand_over({}, "end")

    def log(self) -> tuple[object, ...]:
        """Every hand-over of a device so far."""
        return self._leases.log()

    def _step(self, phase: str, role: str) -> Step:
        for step in self._plan.steps:
            if step.phase == phase and role in step.roles:
                return step
        found = "; ".join(f"{step.name}: {', '.join(step.roles)}" for step in self._plan.steps)
        raise PlacementError(f"the flow has no phase {phase!r} in which {role} works; it has {found}")

    def _wanted(self, step: Step, role: str, rank: int) -> dict[Part, bool]:
        """Part to whether a copy is kept on the host, of what is off the device in this step."""
        away: dict[Part, bool] = {}
        for device in self._processes[role, rank].devices:
            group = self._plan.group_of(device)
            assert group is not None, f"device {device} of {role} is in no class of the plan"
            at = next(found for found in group.steps if found.step == step.name)
            for holding in at.holdings:
                if holding.role == role and not holding.is_resident:
                    away[holding.part] = holding.state == "aside"
        return away

    def _leaving(self, step: Step) -> dict[tuple[str, int], dict[Part, bool]]:
        leaving = {}
        for role, rank in self._processes:
            if role not in self._groups:
                continue
            wanted = self._wanted(step, role, rank)
            new = {part: is_kept for part, is_kept in wanted.items() if part not in self._aside[role, rank]}
            if new:
                leaving[role, rank] = new
        return leaving

    def _hand_over(self, leaving: Mapping[tuple[str, int], Mapping[Part, bool]], turn: str) -> None:
        given_up: dict[tuple[str, int], int] = {}
        for (role, rank), parts in leaving.items():
            keep_weights = parts.get(Part.WEIGHTS, True)
            faults.reach("put-aside")
            moved = self._move("put_aside", turn, role, rank, list(parts), keep_weights)
            self._aside[role, rank] |= set(parts)
            if not keep_weights:
                self._without_weights.add(role)
            given_up[role, rank] = 0 if moved is None else moved.num_bytes
        if self._lease is not None:
            self._draw_lease(self._lease)
            for holder, devices in self._lease.holders.items():
                if self._is_gone(holder):
                    continue  # it cannot have given up anything in order; the lease finds its device free
                # Processes that span several devices give up an equal share of each.
                share = given_up.get((holder.group, holder.rank), 0) // len(devices)
                self._lease.report(holder, dict.fromkeys(devices, share))
            self._lease = None

    def _make_room(self, step: Step) -> None:
        """Where memory is short, idle roles give back what their allocators hold and nothing uses."""
        for group in self._plan.groups:
            at = next(found for found in group.steps if found.step == step.name)
            working = sum(term.gib for term in at.terms if term.part is None and term.role in at.roles)
            for first, last in group.devices:
                for device in range(first, last + 1):
                    memory = self._measure(device)
                    if memory is None or memory.total is None or memory.used / GIB + working <= memory.total / GIB:
                        continue
                    for (role, rank), process in self._processes.items():
                        if device in process.devices and role not in step.roles and role in self._groups:
                            self._groups[role].call("release_cache", ranks=[rank], timeout_s=self._timeout_s)

    def _bring_back(self, step: Step) -> None:
        for (role, rank), aside in self._aside.items():
            if role not in self._groups or not aside:
                continue
            coming = [part for part in aside if part not in self._wanted(step, role, rank)]
            if coming:
                faults.reach("bring-back")
                self._move("bring_back", step.name, role, rank, coming)
                aside.difference_update(coming)

    def _move(self, how: str, turn: str, role: str, rank: int, parts: Sequence[Part], *options: Any) -> Moved | None:
        """Ask a process to move parts. None: it is gone."""
        started_s, names = time.time(), [str(part) for part in parts]
        devices = self._processes[role, rank].devices
        before = [self._measure(device) for device in devices]
        try:
            [moved] = self._groups[role].call(how, names, *options, ranks=[rank], timeout_s=self._timeout_s)
        except RunError:
            if all(not self._is_gone(holder) for holder in self._groups[role].holders() if holder.rank == rank):
                raise
            return None
        assert isinstance(moved, Moved)
        is_leaving = how == "put_aside"
        if is_leaving:
            self._check_freed(role, rank, names, moved.num_bytes // len(devices), devices, before)
        facts = {f"{how}_s": time.time() - started_s, "gib": moved.num_bytes / GIB}
        for name, value in (facts | {"gib_copied": moved.num_bytes_copied / GIB}).items():
            self._spent[name] = self._spent.get(name, 0.0) + value
        self.moves += [SeatMove(turn, role, name, is_leaving, moved.num_bytes, moved.ms) for name in names]
        if self._timeline is not None:
            what = f"{'put aside' if is_leaving else 'bring back'} {role} {', '.join(names)}"
            for device in devices:
                about = {"kind": "hand-over", "bytes": moved.num_bytes, "turn": turn}
                self._timeline.span("devices", f"device {device}", what, started_s, time.time(), **about)
        return moved

    def _check_freed(
        self,
        role: str,
        rank: int,
        parts: Sequence[str],
        num_bytes: int,
        devices: Sequence[int],
        before: Sequence[DeviceMemory | None],
    ) -> None:
        """Whether each device has as much memory more as the process says that it gave up there."""
        for device, then in zip(devices, before, strict=True):
            now = self._measure(device)
            if then is None or now is None:
                continue
            freed = then.used - now.used
            if num_bytes - freed > ALLOWANCE_BYTES:
                raise RunError(
                    f"{role} rank {rank} put aside its {' and '.join(parts)} on device {device}, by its own account"
                    f" {num_bytes / GIB:.2f} GiB, but the memory in use there fell by {freed / GIB:.2f} GiB: it still"
                    f" holds the rest ({ALLOWANCE_BYTES / GIB:.2f} GiB are allowed)"
                )

    def _draw_lease(self, lease: Lease) -> None:
        """Who held each device, until now."""
        if self._timeline is None:
            return
        for device in lease.devices:
            names = sorted({holder.group for holder, devices in lease.holders.items() if device in devices})
            thread = f"device {device}"
            self._timeline.span("devices", thread, ", ".join(names), self._since_s, time.time(), turn=lease.phase)

    def _holders(self, step: Step) -> dict[Holder, tuple[int, ...]]:
        found = {}
        for role in step.roles:
            if role in self._groups:
                for holder in self._groups[role].holders():
                    process = self._processes.get((role, holder.rank))
                    if process is not None:
                        found[holder] = process.devices
        return found
