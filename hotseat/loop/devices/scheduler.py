"""Schedules devices: carries out the plan's residency, lease by lease.

A lease is for a step of the plan. Before it is granted, parts that must not be on its devices are offloaded, and the
holders of the previous lease report how much they freed; then the parts that the step needs are onloaded. The end of a
lease moves nothing: what has to move is known only when the next lease is requested.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from hotseat import faults
from hotseat.cluster import WorkerGroup
from hotseat.cluster.lease import DeviceMemory, Holder, Lease, Leases
from hotseat.errors import PlacementError, RunError
from hotseat.loop.devices.memory import MeasuresMemory
from hotseat.observe import Timeline
from hotseat.placement import GIB, Part, PhaseStep, Plan
from hotseat.types import Moved

ALLOWANCE_BYTES = 1 << 29  # memory that a process may still hold of the parts that it has offloaded


@dataclass(frozen=True)
class PartMove:
    """Offload or onload of one part of one role, before a step of the plan."""

    step: str
    role: str
    part: str
    is_leaving: bool
    num_bytes: int
    ms: float


class Movable(MeasuresMemory, Protocol):
    """Calls that `DeviceScheduler` makes to a process of a role with devices."""

    def offload(self, parts: Sequence[Any], keep_weights: bool = True) -> Moved:
        """Take parts off the device; without `keep_weights` no copy of the weights is kept."""

    def onload(self, parts: Sequence[Any]) -> Moved:
        """Put parts back on the device."""

    def release_cache(self) -> None:
        """Return unused allocator cache to the device."""


class DeviceScheduler:
    """Grants leases, and moves parts so that each step has the residency of the plan.

    `groups` holds the running roles; a role that is not in it gets no lease. A process that is gone has left its
    devices: it is not asked to offload or onload anything, and the next call to it raises. offloaded: the parts
    that are off their devices now, by role; all others are resident. when_measured: called with a device, and by how
    many bytes the memory in use there fell, when simulators have left it: only the device knows how much they took.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[str, WorkerGroup[Movable]],
        *,
        timeout_s: float,
        is_gone: Callable[[Holder], bool] = lambda holder: False,
        measure: Callable[[int], DeviceMemory | None] = lambda device: None,
        timeline: Timeline | None = None,
        offloaded: Mapping[str, Sequence[Part]] | None = None,
        when_measured: Callable[[int, int], object] = lambda device, num_bytes: None,
    ):
        self._plan = plan
        self._groups = groups
        self._timeout_s = timeout_s
        self._is_gone = is_gone
        self._measure = measure
        self._leases = Leases(measure=measure, is_gone=is_gone)
        self._lease: Lease | None = None
        self._timeline = timeline
        self._when_measured = when_measured
        self._since_s = time.time()  # when the lease was granted
        self._processes = {
            (role.name, process.rank): process for role in plan.roles for process in role.processes if process.devices
        }
        self._offloaded: dict[tuple[str, int], set[Part]] = {
            (role, rank): set((offloaded or {}).get(role, ())) for role, rank in self._processes
        }
        self._without_weights: set[str] = set()
        self.moves: deque[PartMove] = deque(maxlen=10_000)  # the newest; the timeline has all of them
        self._spent: dict[str, float] = {}  # see `spent`

    @contextmanager
    def lease(self, phase: str, role: str) -> Iterator[None]:
        """Hold the devices of the step in which `role` works. phase: the kind of work, however the flow names it."""
        step = self._step(phase, role)
        started_s = time.monotonic()
        self._hand_over(self._leaving(step), step.name)
        holders = self._holders(step)
        if holders:
            remaining_s = max(1.0, self._timeout_s - (time.monotonic() - started_s))
            self._lease = self._leases.acquire(step.name, holders, timeout_s=remaining_s)
            self._since_s = time.time()
        self._make_room(step)
        self._onload(step)
        yield

    def spent(self) -> dict[str, float]:
        """Return seconds and GiB of hand-overs since the last call: offload_s, onload_s, gib, gib_copied."""
        spent, self._spent = self._spent, {}
        return spent

    def has_weights(self, role: str) -> bool:
        """Tell whether no weights of a role were dropped since they were last loaded."""
        return role not in self._without_weights

    def mark_weights_loaded(self, role: str) -> None:
        """Record that a role has just received all of its weights."""
        self._without_weights.discard(role)

    def replaced(self, role: str, rank: int) -> None:
        """Record that a process was replaced by a new one, which has all its parts on its devices, if it has any."""
        if (role, rank) in self._processes:
            self._offloaded[role, rank] = set()
            self._leases.forget_use(self._processes[role, rank].devices)

    def make_way(self, role: str, rank: int) -> None:
        """Offload other roles from the devices of a process that is about to start and measures free memory there."""
        devices = set(self._processes[role, rank].devices) if (role, rank) in self._processes else set()
        for (other, number), process in self._processes.items():
            if other == role or other not in self._groups or not devices & set(process.devices):
                continue
            parts = sorted(self._parts(other) - self._offloaded[other, number])
            if parts and self._move("offload", "restart", other, number, parts, True) is not None:
                self._offloaded[other, number] |= set(parts)

    def _parts(self, role: str) -> set[Part]:
        """Return the parts that a role can offload, as far as the plan knows."""
        return {
            holding.part
            for group in self._plan.groups
            for step in group.steps
            for holding in step.holdings
            if holding.role == role
        }

    def close(self) -> None:
        """End the last lease."""
        self._hand_over({}, "end")

    def log(self) -> tuple[object, ...]:
        """Return every hand-over of a device so far."""
        return self._leases.log()

    def _step(self, phase: str, role: str) -> PhaseStep:
        for step in self._plan.steps:
            if step.kind == phase and role in step.roles:
                return step
        steps = "; ".join(f"{step.name}: {', '.join(step.roles)}" for step in self._plan.steps)
        raise PlacementError(f"the flow has no phase {phase!r} in which {role} works; it has {steps}")

    def _planned_off(self, step: PhaseStep, role: str, rank: int) -> dict[Part, bool]:
        """Return the parts that are off the device in this step, each with whether a copy is kept on the host."""
        planned_off: dict[Part, bool] = {}
        for device in self._processes[role, rank].devices:
            group = self._plan.group_of(device)
            assert group is not None, f"device {device} of {role} is in no class of the plan"
            at = next(planned for planned in group.steps if planned.step == step.name)
            for holding in at.holdings:
                if holding.role == role and not holding.is_resident:
                    planned_off[holding.part] = holding.state == "offloaded"
        return planned_off

    def _leaving(self, step: PhaseStep) -> dict[tuple[str, int], dict[Part, bool]]:
        leaving = {}
        for role, rank in self._processes:
            if role not in self._groups:
                continue
            planned_off = self._planned_off(step, role, rank)
            new = {part: is_kept for part, is_kept in planned_off.items() if part not in self._offloaded[role, rank]}
            if new:
                leaving[role, rank] = new
        return leaving

    def _hand_over(self, leaving: Mapping[tuple[str, int], Mapping[Part, bool]], step: str) -> None:
        freed_bytes: dict[tuple[str, int], int] = {}
        for (role, rank), parts in leaving.items():
            keep_weights = parts.get(Part.WEIGHTS, True)
            faults.reach("offload")
            moved = self._move("offload", step, role, rank, list(parts), keep_weights)
            self._offloaded[role, rank] |= set(parts)
            if not keep_weights:
                self._without_weights.add(role)
            freed_bytes[role, rank] = 0 if moved is None else moved.num_bytes
        if self._lease is not None:
            self._draw_lease(self._lease)
            for holder, devices in self._lease.holders.items():
                if self._is_gone(holder):
                    continue  # it cannot report anything; `Leases` waits until the memory of its device is free
                # Processes that span several devices free an equal share on each.
                share = freed_bytes.get((holder.group, holder.rank), 0) // len(devices)
                self._lease.report(holder, dict.fromkeys(devices, share))
            self._lease = None

    def _make_room(self, step: PhaseStep) -> None:
        """Have idle roles release unused allocator cache on devices where memory is short."""
        for group in self._plan.groups:
            at = next(planned for planned in group.steps if planned.step == step.name)
            working = sum(term.gib for term in at.terms if term.part is None and term.role in at.roles)
            for first, last in group.devices:
                for device in range(first, last + 1):
                    memory = self._measure(device)
                    if memory is None or memory.total is None or memory.used / GIB + working <= memory.total / GIB:
                        continue
                    for (role, rank), process in self._processes.items():
                        if device in process.devices and role not in step.roles and role in self._groups:
                            self._groups[role].on(rank).within(self._timeout_s).call(Movable.release_cache)

    def _onload(self, step: PhaseStep) -> None:
        for (role, rank), offloaded in self._offloaded.items():
            if role not in self._groups or not offloaded:
                continue
            coming = [part for part in offloaded if part not in self._planned_off(step, role, rank)]
            if coming:
                faults.reach("onload")
                self._move("onload", step.name, role, rank, coming)
                offloaded.difference_update(coming)

    def _move(
        self,
        how: Literal["offload", "onload"],
        step: str,
        role: str,
        rank: int,
        parts: Sequence[Part],
        keep_weights: bool = True,
    ) -> Moved | None:
        """Have a process move parts. Returns None if it is gone."""
        started_s, names = time.time(), [str(part) for part in parts]
        devices = self._processes[role, rank].devices
        before = [self._measure(device) for device in devices]
        try:
            process = self._groups[role].on(rank).within(self._timeout_s)
            if how == "offload":
                [moved] = process.call(Movable.offload, names, keep_weights)
            else:
                [moved] = process.call(Movable.onload, names)
        except RunError:
            if all(not self._is_gone(holder) for holder in self._groups[role].holders() if holder.rank == rank):
                raise
            return None
        assert isinstance(moved, Moved)
        is_leaving = how == "offload"
        if is_leaving:
            self._check_freed(role, rank, names, moved.num_bytes // len(devices), devices, before)
            if list(parts) == [Part.SIMULATOR]:
                moved = replace(moved, num_bytes=self._measured_freed(devices, before) or moved.num_bytes)
        facts = {f"{how}_s": time.time() - started_s, "gib": moved.num_bytes / GIB}
        for name, value in (facts | {"gib_copied": moved.num_bytes_copied / GIB}).items():
            self._spent[name] = self._spent.get(name, 0.0) + value
        self.moves += [PartMove(step, role, name, is_leaving, moved.num_bytes, moved.ms) for name in names]
        if self._timeline is not None:
            what = f"{'offload' if is_leaving else 'onload'} {role} {', '.join(names)}"
            for device in devices:
                about = {"kind": "hand-over", "bytes": moved.num_bytes, "turn": step}
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
        """Raise unless each device has gained as much free memory as the process reports to have freed."""
        for device, then in zip(devices, before, strict=True):
            now = self._measure(device)
            if then is None or now is None:
                continue
            freed = then.used - now.used
            if num_bytes - freed > ALLOWANCE_BYTES:
                raise RunError(
                    f"{role} rank {rank} offloaded its {' and '.join(parts)} on device {device}, by its own account"
                    f" {num_bytes / GIB:.2f} GiB, but the memory in use there fell by {freed / GIB:.2f} GiB: it still"
                    f" holds the rest ({ALLOWANCE_BYTES / GIB:.2f} GiB are allowed)"
                )

    def _measured_freed(self, devices: Sequence[int], before: Sequence[DeviceMemory | None]) -> int:
        """Return by how much the memory in use on devices fell, as far as it can be measured, and report it."""
        total = 0
        for device, then in zip(devices, before, strict=True):
            now = self._measure(device)
            if then is not None and now is not None:
                freed = max(0, then.used - now.used)
                self._when_measured(device, freed)
                total += freed
        return total

    def _draw_lease(self, lease: Lease) -> None:
        """Draw into the timeline who held each device until now."""
        if self._timeline is None:
            return
        for device in lease.devices:
            names = sorted({holder.group for holder, devices in lease.holders.items() if device in devices})
            thread = f"device {device}"
            self._timeline.span("devices", thread, ", ".join(names), self._since_s, time.time(), turn=lease.phase)

    def _holders(self, step: PhaseStep) -> dict[Holder, tuple[int, ...]]:
        holders = {}
        for role in step.roles:
            if role in self._groups:
                for holder in self._groups[role].holders():
                    process = self._processes.get((role, holder.rank))
                    if process is not None:
                        holders[holder] = process.devices
        return holders
