"""Schedules devices: carries out the plan's residency, lease by lease.

A lease is for a step of the plan. Before it is granted, parts that must not be on its devices are offloaded, and the
holders of the previous lease report how much they freed; then the parts that the step needs are onloaded. Where the
devices have room for both, parts come before others leave: memory that another process has just freed is cleared by the
driver while it is filled again, which halves the speed of the copy. All processes move at once. The end of a lease
moves nothing: what has to move is known only when the next lease is requested.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from hotseat import faults
from hotseat.cluster import Pending, WorkerGroup
from hotseat.cluster.lease import DeviceMemory, Holder, Lease, Leases
from hotseat.errors import PlacementError, RunError
from hotseat.loop.devices.memory import MeasuresMemory
from hotseat.observe import Timeline
from hotseat.placement import GIB, Holding, Part, PhaseStep, Plan
from hotseat.types import Moved

ALLOWANCE_BYTES = 1 << 29  # memory that a process may still hold of the parts that it has offloaded
ROOM_BYTES = 2 << 30  # memory that stays free on a device where parts come before others leave
ROOM_FACTOR = 1.1  # parts may take so many times what the plan says

Process = tuple[str, int]  # role and rank


@dataclass(frozen=True)
class PartMove:
    """Offload or onload of one part of one role, before a step of the plan."""

    step: str
    role: str
    part: str
    is_leaving: bool
    num_bytes: int
    ms: float


@dataclass
class _Batch:
    """Moves that happen at once: the parts of each process, and those whose weights are dropped, not kept."""

    how: Literal["offload", "onload"]
    step: str
    parts: dict[Process, list[Part]] = field(default_factory=dict)
    dropping: set[Process] = field(default_factory=set)


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
        self._offloaded: dict[Process, set[Part]] = {
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
        leaving = self._leaving(step)
        if leaving:
            for key, moved in self._onload(step, self._with_room(step)).items():
                devices = self._processes[key].devices
                more = moved.num_bytes // len(devices) + ALLOWANCE_BYTES  # the allocator's own included
                self._leases.expect_use(dict.fromkeys(devices, more))
        self._hand_over(leaving, step.name)
        holders = self._holders(step)
        if holders:
            remaining_s = max(1.0, self._timeout_s - (time.monotonic() - started_s))
            self._lease = self._leases.acquire(step.name, holders, timeout_s=remaining_s)
            self._since_s = time.time()
        self._make_room(step)
        self._onload(step, self._coming(step))
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
        batch = _Batch("offload", "restart")
        for (other, number), process in self._processes.items():
            if other == role or other not in self._groups or not devices & set(process.devices):
                continue
            parts = sorted(self._parts(other) - self._offloaded[other, number])
            if parts:
                batch.parts[other, number] = parts
        self._move(batch)

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

    def _holdings(self, step: PhaseStep, device: int) -> Sequence[Holding]:
        """Return what the plan has on a device, or off it, in a step."""
        group = self._plan.group_of(device)
        assert group is not None, f"device {device} is in no class of the plan"
        return next(planned for planned in group.steps if planned.step == step.name).holdings

    def _planned_off(self, step: PhaseStep, role: str, rank: int) -> dict[Part, bool]:
        """Return the parts that are off the device in this step, each with whether a copy is kept on the host."""
        return {
            holding.part: holding.state == "offloaded"
            for device in self._processes[role, rank].devices
            for holding in self._holdings(step, device)
            if holding.role == role and not holding.is_resident
        }

    def _leaving(self, step: PhaseStep) -> dict[Process, dict[Part, bool]]:
        leaving = {}
        for role, rank in self._processes:
            if role not in self._groups:
                continue
            planned_off = self._planned_off(step, role, rank)
            new = {part: is_kept for part, is_kept in planned_off.items() if part not in self._offloaded[role, rank]}
            if new:
                leaving[role, rank] = new
        return leaving

    def _coming(self, step: PhaseStep) -> dict[Process, list[Part]]:
        """Return the parts that a step needs and that are off their devices now."""
        coming = {}
        for (role, rank), offloaded in self._offloaded.items():
            parts = offloaded - self._planned_off(step, role, rank).keys() if role in self._groups else set()
            if parts:
                coming[role, rank] = sorted(parts)
        return coming

    def _with_room(self, step: PhaseStep) -> dict[Process, list[Part]]:
        """Return the parts that a step needs and that fit on their devices before anything leaves.

        Simulators do not come early: what they take is not known well enough.
        """
        coming = {key: parts for key, parts in self._coming(step).items() if Part.SIMULATOR not in parts}
        holders = self._lease.holders if self._lease is not None else {}
        if not coming or any(self._is_gone(holder) for holder in holders):
            return {}
        coming_to: dict[int, set[tuple[str, Part]]] = {}
        for (role, rank), parts in coming.items():
            for device in self._processes[role, rank].devices:
                coming_to.setdefault(device, set()).update((role, part) for part in parts)
        for device, names in coming_to.items():
            # A holding is what all processes of a role have on the device.
            held = [each.gib for each in self._holdings(step, device) if (each.role, each.part) in names]
            memory = self._measure(device)
            if memory is None or memory.total is None or None in held:
                return {}
            gib = sum(each for each in held if each is not None)
            if memory.total - memory.used < gib * ROOM_FACTOR * GIB + ROOM_BYTES:
                return {}
        return coming

    def _hand_over(self, leaving: Mapping[Process, Mapping[Part, bool]], step: str) -> None:
        freed_bytes: dict[Process, int] = {}
        # What simulators take is measured as they leave: nothing else moves meanwhile.
        simulators = [key for key, parts in leaving.items() if list(parts) == [Part.SIMULATOR]]
        for keys in ([key for key in leaving if key not in simulators], *([key] for key in simulators)):
            parts = {key: list(leaving[key]) for key in keys}
            dropping = {key for key in keys if not leaving[key].get(Part.WEIGHTS, True)}
            for _ in keys:
                faults.reach("offload")
            moved = self._move(_Batch("offload", step, parts, dropping))
            freed_bytes |= {key: each.num_bytes for key, each in moved.items()}
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
                            with self._unless_gone((role, rank)):
                                self._groups[role].on(rank).within(self._timeout_s).call(Movable.release_cache)

    def _onload(self, step: PhaseStep, coming: Mapping[Process, list[Part]]) -> dict[Process, Moved]:
        for _ in coming:
            faults.reach("onload")
        return self._move(_Batch("onload", step.name, dict(coming)))

    def _move(self, batch: _Batch) -> dict[Process, Moved]:
        """Have processes move their parts, all at once. Processes that are gone are not in the result."""
        started_s = time.time()
        devices = sorted({device for key in batch.parts for device in self._processes[key].devices})
        before = {device: self._measure(device) for device in devices}
        pending: dict[Process, Pending[Moved]] = {}
        moved: dict[Process, Moved] = {}
        failures: list[RunError] = []
        for key in batch.parts:
            with self._unless_gone(key, failures):
                pending[key] = self._start(batch, key)
        for key, call in pending.items():
            with self._unless_gone(key, failures):
                [moved[key]] = call.result()
                self._draw_move(batch, key, moved[key], started_s)
        self._record(batch, moved)
        if failures:
            raise failures[0]
        if batch.how == "offload":
            for device in devices:
                self._check_freed(batch, moved, device, before[device])
            for key, parts in batch.parts.items():
                if parts == [Part.SIMULATOR] and key in moved:
                    freed = self._measured_freed(self._processes[key].devices, before)
                    moved[key] = replace(moved[key], num_bytes=freed or moved[key].num_bytes)
        if moved:
            facts = {
                f"{batch.how}_s": time.time() - started_s,
                "gib": sum(each.num_bytes for each in moved.values()) / GIB,
                "gib_copied": sum(each.num_bytes_copied for each in moved.values()) / GIB,
            }
            for name, value in facts.items():
                self._spent[name] = self._spent.get(name, 0.0) + value
        for (role, rank), each in moved.items():
            names = [str(part) for part in batch.parts[role, rank]]
            self.moves += [
                PartMove(batch.step, role, name, batch.how == "offload", each.num_bytes, each.ms) for name in names
            ]
        return moved

    def _start(self, batch: _Batch, key: Process) -> Pending[Moved]:
        (role, rank), names = key, [str(part) for part in batch.parts[key]]
        process = self._groups[role].on(rank).within(self._timeout_s)
        if batch.how == "offload":
            return process.start(Movable.offload, names, key not in batch.dropping)
        return process.start(Movable.onload, names)

    def _record(self, batch: _Batch, moved: Mapping[Process, Moved]) -> None:
        """Record which parts are where now. A process that is gone has none on its devices, and none comes back."""
        for key, parts in batch.parts.items():
            if key not in moved and not self._has_gone(key):
                continue
            if batch.how == "onload":
                self._offloaded[key] -= set(parts)
            else:
                self._offloaded[key] |= set(parts)
            if key in batch.dropping:
                self._without_weights.add(key[0])

    def _has_gone(self, key: Process) -> bool:
        role, rank = key
        return any(self._is_gone(holder) for holder in self._groups[role].holders() if holder.rank == rank)

    @contextmanager
    def _unless_gone(self, key: Process, failures: list[RunError] | None = None) -> Iterator[None]:
        """Let a call to a process fail if that process is gone: it has left its devices.

        Otherwise the error is raised, or added to `failures` by who has more calls to wait for.
        """
        try:
            yield
        except RunError as error:
            if self._has_gone(key):
                return
            if failures is None:
                raise
            failures.append(error)

    def _draw_move(self, batch: _Batch, key: Process, moved: Moved, started_s: float) -> None:
        if self._timeline is None:
            return
        what = f"{batch.how} {key[0]} {', '.join(map(str, batch.parts[key]))}"
        about = {"kind": "hand-over", "bytes": moved.num_bytes, "turn": batch.step}
        for device in self._processes[key].devices:
            self._timeline.span("devices", f"device {device}", what, started_s, time.time(), **about)

    def _check_freed(
        self, batch: _Batch, moved: Mapping[Process, Moved], device: int, before: DeviceMemory | None
    ) -> None:
        """Raise unless a device has gained as much free memory as the processes report to have freed there."""
        now = self._measure(device)
        if before is None or now is None:
            return
        shares = {
            key: each.num_bytes // len(self._processes[key].devices)
            for key, each in moved.items()
            if device in self._processes[key].devices
        }
        if not shares:
            return  # the processes are gone; what they had is seen free before the lease passes on
        claimed, freed = sum(shares.values()), before.used - now.used
        if claimed - freed > ALLOWANCE_BYTES * len(shares):
            who = "; ".join(
                f"{role} rank {rank} offloaded its {' and '.join(map(str, batch.parts[role, rank]))}"
                for role, rank in shares
            )
            raise RunError(
                f"{who} on device {device}, by {'its' if len(shares) == 1 else 'their'} own account"
                f" {claimed / GIB:.2f} GiB, but the memory in use there fell by {freed / GIB:.2f} GiB:"
                f" {'it still holds' if len(shares) == 1 else 'they still hold'} the rest"
                f" ({ALLOWANCE_BYTES * len(shares) / GIB:.2f} GiB are allowed)"
            )

    def _measured_freed(self, devices: Sequence[int], before: Mapping[int, DeviceMemory | None]) -> int:
        """Return by how much the memory in use on devices fell, as far as it can be measured, and report it."""
        total = 0
        for device in devices:
            then, now = before[device], self._measure(device)
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
