"""Schedules devices: carries out the plan's residency, lease by lease.

A lease is for a step of the plan. Before it is granted, parts that must not be on its devices are offloaded, and the
memory that this freed is measured; then the parts that the step needs are onloaded. Where the devices have room for
both, parts come while others leave: that is faster, and memory that another process has just freed would be cleared by
the driver while it is filled again, which halves the speed of the copy. All processes move at once. The end of
a lease moves nothing: what has to move is known only when the next lease is requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from hotseat import faults
from hotseat.cluster import Pending, WorkerGroup
from hotseat.cluster.lease import DeviceMemory, Holder, Lease, Leases
from hotseat.errors import PlacementError, RunError
from hotseat.loop.devices.held_memory import DeviceWorker
from hotseat.loop.devices.lanes import DeviceLanes
from hotseat.observe import Timeline
from hotseat.placement import GIB, Holding, Part, PhaseStep, Plan
from hotseat.registry.roles import role_entry
from hotseat.types import Moved

ALLOWANCE_BYTES = 1 << 29  # memory that a process may still hold of the parts that it has offloaded
ROOM_BYTES = 2 << 30  # memory that stays free on a device where parts come while others leave
ROOM_FACTOR = 1.1  # by which parts may exceed the sizes in the plan

Process = tuple[str, int]  # role and rank


@dataclass
class _Batch:
    """Moves that happen at once."""

    how: Literal["offload", "onload"]
    step: str
    parts: dict[Process, list[Part]] = field(default_factory=dict)
    dropping: set[Process] = field(default_factory=set)  # processes whose weights are dropped instead of kept
    moved: dict[Process, Moved] = field(default_factory=dict)  # results, without those of processes that are gone
    seconds: float = 0.0  # of waiting for them


class DeviceScheduler:
    """Grants leases, and moves parts so that each step has the residency of the plan.

    groups: worker groups of the running roles; others get no lease. offloaded: by role, the parts that are off their
    devices now; all others are resident. when_measured: called when simulators have left a device, with the device and
    the number of bytes by which the memory in use there fell: nothing else tells how much they take.

    A process that is gone has left its devices: it is not asked to offload or onload, and the next call to it raises.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Mapping[str, WorkerGroup[DeviceWorker]],
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
        self._lanes = DeviceLanes(plan, timeline)
        self._when_measured = when_measured
        self._since_s = time.time()  # when the lease was granted
        self._processes = {
            (role.name, process.rank): process for role in plan.roles for process in role.processes if process.devices
        }
        self._offloaded: dict[Process, set[Part]] = {
            (role, rank): set((offloaded or {}).get(role, ())) for role, rank in self._processes
        }
        self._planned: dict[tuple[str, str, int], Mapping[Part, bool]] = {}  # see `_planned_off`: the plan stays
        self._without_weights: set[str] = set()
        self._spent: dict[str, float] = {}  # see `spent`

    @contextmanager
    def lease(self, phase: str, role: str) -> Iterator[None]:
        """Hold the devices of the step in which `role` works. phase: the kind of work, however the flow names it."""
        step = self._step(phase, role)
        started_s = time.monotonic()
        leaving = self._leaving(step)
        self._hand_over(leaving, step.name, self._with_room(step) if leaving else {})
        holders = self._holders(step)
        if holders:
            remaining_s = max(1.0, self._timeout_s - (time.monotonic() - started_s))
            self._lease = self._leases.acquire(step.name, holders, timeout_s=remaining_s)
            self._since_s = time.time()
        self._make_room(step)
        self._move(self._onload(step.name, self._coming(step)))
        yield

    def spent(self) -> dict[str, float]:
        """Return metrics of the hand-overs since the last call: seconds, and GiB that moved and that were copied."""
        spent, self._spent = self._spent, {}
        return spent

    def has_weights(self, role: str) -> bool:
        """Tell whether no weights of a role were dropped since they were last loaded."""
        return role not in self._without_weights

    def mark_weights_loaded(self, role: str) -> None:
        """Record that a role has just received all of its weights."""
        self._without_weights.discard(role)

    def replaced(self, role: str, rank: int) -> None:
        """Record that a process was replaced by a new one: all its parts are on its devices."""
        if (role, rank) in self._processes:
            self._offloaded[role, rank] = set()
            self._leases.forget_use(self._processes[role, rank].devices)

    def make_way(self, role: str, rank: int) -> None:
        """Offload other roles from the devices of a process that is about to start and measures free memory there."""
        devices = set(self._processes[role, rank].devices) if (role, rank) in self._processes else set()
        leaving: dict[Process, list[Part]] = {}
        for (other, number), process in self._processes.items():
            if other == role or other not in self._groups or not devices & set(process.devices):
                continue
            parts = sorted(self._parts(other) - self._offloaded[other, number])
            if parts:
                leaving[other, number] = parts
        for keys in _at_once(leaving):
            self._move(_Batch("offload", "restart", {key: leaving[key] for key in keys}))

    def _parts(self, role: str) -> set[Part]:
        return {
            holding.part
            for group in self._plan.groups
            for step in group.steps
            for holding in step.holdings
            if holding.role == role
        }

    def close(self) -> None:
        """End the last lease."""
        self._hand_over({}, "end", {})

    def _step(self, phase: str, role: str) -> PhaseStep:
        for step in self._plan.steps:
            if step.kind == phase and role in step.roles:
                return step
        steps = "; ".join(f"{step.name}: {', '.join(step.roles)}" for step in self._plan.steps)
        raise PlacementError(f"the flow has no phase {phase!r} in which {role} works; it has {steps}")

    def _holdings(self, step: PhaseStep, device: int) -> Sequence[Holding]:
        group = self._plan.group_of(device)
        assert group is not None, f"device {device} is in no class of the plan"
        return next(planned for planned in group.steps if planned.step == step.name).holdings

    def _planned_off(self, step: PhaseStep, role: str, rank: int) -> Mapping[Part, bool]:
        """Return the parts that are off the device in this step, each with whether a copy is kept on the host."""
        key = step.name, role, rank
        if key not in self._planned:
            self._planned[key] = {
                holding.part: holding.state == "offloaded"
                for device in self._processes[role, rank].devices
                for holding in self._holdings(step, device)
                if holding.role == role and not holding.is_resident
            }
        return self._planned[key]

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
        coming = {}
        for (role, rank), offloaded in self._offloaded.items():
            if not offloaded or role not in self._groups:
                continue
            if parts := offloaded - self._planned_off(step, role, rank).keys():
                coming[role, rank] = sorted(parts)
        return coming

    def _with_room(self, step: PhaseStep) -> dict[Process, list[Part]]:
        """Return the parts that a step needs and that fit on their devices before anything leaves.

        Simulators and custom components are left out: the memory that they take is not known well enough.
        """
        coming = {
            key: parts for key, parts in self._coming(step).items() if role_entry(key[0]).kind in ("model", "engine")
        }
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

    def _hand_over(
        self, leaving: Mapping[Process, Mapping[Part, bool]], step: str, coming: Mapping[Process, list[Part]]
    ) -> None:
        """Have the last holders give up what the next ones do not need. coming: parts that need not wait for it."""
        for keys in _at_once(leaving):
            parts = {key: list(leaving[key]) for key in keys}
            dropping = {key for key in keys if not leaving[key].get(Part.WEIGHTS, True)}
            for _ in keys:
                faults.reach("offload")
            offload, onload = _Batch("offload", step, parts, dropping), self._onload(step, coming)
            try:
                self._move(offload, onload)
            finally:
                came = {device: self._shares(onload, device) for device in self._devices(onload)}
                self._leases.expect_use(
                    {device: sum(shares) + ALLOWANCE_BYTES * len(shares) for device, shares in came.items()}
                )
            coming = {}
        if self._lease is not None:
            groups: dict[str, set[str]] = {}  # by lane: those that worked there
            for holder, devices in self._lease.holders.items():
                for lane in self._lanes.of(devices):
                    groups.setdefault(lane, set()).add(holder.group)
            for lane in self._lanes.of(self._lease.devices):
                self._lanes.draw([lane], ", ".join(sorted(groups[lane])), self._since_s, turn=self._lease.phase)
            self._leases.end(self._lease)
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
                                self._groups[role].on(rank).within(self._timeout_s).call(DeviceWorker.release_cache)

    def _onload(self, step: str, coming: Mapping[Process, list[Part]]) -> _Batch:
        for _ in coming:
            faults.reach("onload")
        return _Batch("onload", step, dict(coming))

    def _move(self, *batches: _Batch) -> None:
        """Have processes move their parts, all at once. Time in which two batches move is counted as the first's."""
        started_s = ended_s = time.time()
        before = {device: self._measure(device) for device in self._devices(*batches)}
        pending: list[tuple[_Batch, Process, Pending[Moved]]] = []
        failures: list[RunError] = []
        for batch in reversed(batches):  # onloads before offloads, to get memory that nobody has just freed
            for key in batch.parts:
                with self._unless_gone(key, failures):
                    pending.append((batch, key, self._start(batch, key)))
        drawn: set[tuple[str, str]] = set()  # where many devices share a lane, the first of them stands for all
        for batch, key, call in sorted(pending, key=lambda started: started[0] is not batches[0]):
            with self._unless_gone(key, failures):
                [batch.moved[key]] = call.result()
                what = f"{batch.how} {key[0]} {', '.join(map(str, batch.parts[key]))}"
                about = {"kind": "hand-over", "bytes": batch.moved[key].num_bytes, "turn": batch.step}
                lanes = self._lanes.of(self._processes[key].devices)
                if not self._lanes.are_ranges or (lanes[0], what) not in drawn:
                    drawn.add((lanes[0], what))
                    self._lanes.draw(lanes, what, started_s, **about)
            now_s = time.time()
            batch.seconds += now_s - ended_s
            ended_s = now_s
        for batch in batches:
            self._record(batch)
        if failures:
            raise failures[0]
        for batch in batches:
            if batch.how == "offload":
                self._check_freed(batch, [other for other in batches if other.how == "onload"], before)
            if batch.moved:
                self._count(batch)

    def _start(self, batch: _Batch, key: Process) -> Pending[Moved]:
        (role, rank), names = key, [str(part) for part in batch.parts[key]]
        process = self._groups[role].on(rank).within(self._timeout_s)
        if batch.how == "offload":
            return process.start(DeviceWorker.offload, names, key not in batch.dropping)
        return process.start(DeviceWorker.onload, names)

    def _record(self, batch: _Batch) -> None:
        """Record which parts are where now. A process that is gone has none on its devices, and none comes back."""
        for key, parts in batch.parts.items():
            if key not in batch.moved and not self._has_gone(key):
                continue
            if batch.how == "onload":
                self._offloaded[key] -= set(parts)
            else:
                self._offloaded[key] |= set(parts)
            if key in batch.dropping:
                self._without_weights.add(key[0])

    def _count(self, batch: _Batch) -> None:
        facts = {
            f"time/{batch.how}": batch.seconds,
            "handover/gib": sum(each.num_bytes for each in batch.moved.values()) / GIB,
            "handover/gib_copied": sum(each.num_bytes_copied for each in batch.moved.values()) / GIB,
        }
        for name, value in facts.items():
            self._spent[name] = self._spent.get(name, 0.0) + value

    def _has_gone(self, key: Process) -> bool:
        role, rank = key
        return any(self._is_gone(holder) for holder in self._groups[role].holders() if holder.rank == rank)

    @contextmanager
    def _unless_gone(self, key: Process, failures: list[RunError] | None = None) -> Iterator[None]:
        """Let a call to a process fail if that process is gone: it has left its devices.

        Otherwise the error is raised, or added to `failures` where there are more calls to wait for.
        """
        try:
            yield
        except RunError as error:
            if self._has_gone(key):
                return
            if failures is None:
                raise
            failures.append(error)

    def _check_freed(self, batch: _Batch, onloads: Sequence[_Batch], before: Mapping[int, DeviceMemory | None]) -> None:
        """Raise unless each device has gained as much free memory as the processes report to have freed there.

        onloads: what came meanwhile. What simulators freed is known from the device alone.
        """
        for device in self._devices(batch):
            claims = self._shares(batch, device)
            if not claims:
                continue  # processes that are gone have freed what they had before the lease passes on
            then, now = before[device], self._measure(device)
            if then is None or now is None:
                continue
            came = [share for onload in onloads for share in self._shares(onload, device)]
            freed, allowed = then.used - now.used, ALLOWANCE_BYTES * (len(claims) + len(came))
            if sum(claims) - freed - sum(came) > allowed:
                raise RunError(self._not_freed(batch, device, freed, sum(came), allowed))
        for key, parts in batch.parts.items():
            if parts == [Part.SIMULATOR] and key in batch.moved:
                freed = self._measured_freed(self._processes[key].devices, before)
                batch.moved[key] = replace(batch.moved[key], num_bytes=freed or batch.moved[key].num_bytes)

    def _not_freed(self, batch: _Batch, device: int, freed: int, came: int, allowed: int) -> str:
        keys = [key for key in batch.moved if device in self._processes[key].devices]
        who = "; ".join(
            f"{role} rank {rank} offloaded its {' and '.join(map(str, batch.parts[role, rank]))}" for role, rank in keys
        )
        its, holds = ("its", "it still holds") if len(keys) == 1 else ("their", "they still hold")
        meanwhile = f" while {came / GIB:.2f} GiB were onloaded" if came else ""
        return (
            f"{who} on device {device}, by {its} own account {sum(self._shares(batch, device)) / GIB:.2f} GiB, but the"
            f" memory in use there fell by {freed / GIB:.2f} GiB{meanwhile}: {holds} the rest"
            f" ({allowed / GIB:.2f} GiB are allowed)"
        )

    def _devices(self, *batches: _Batch) -> list[int]:
        return sorted({device for batch in batches for key in batch.parts for device in self._processes[key].devices})

    def _shares(self, batch: _Batch, device: int) -> list[int]:
        """Return the bytes that each process moved on a device; one that spans several moves as much on each."""
        spans = {key: self._processes[key].devices for key in batch.moved}
        return [batch.moved[key].num_bytes // len(devices) for key, devices in spans.items() if device in devices]

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

    def _holders(self, step: PhaseStep) -> dict[Holder, tuple[int, ...]]:
        holders = {}
        for role in step.roles:
            if role in self._groups:
                for holder in self._groups[role].holders():
                    process = self._processes.get((role, holder.rank))
                    if process is not None:
                        holders[holder] = process.devices
        return holders


def _at_once(leaving: Mapping[Process, Collection[Part]]) -> list[list[Process]]:
    """Return the processes that leave at once: all but simulators, and then each of these alone.

    What simulators take is measured as they leave: nothing else moves meanwhile.
    """
    simulators = [key for key, parts in leaving.items() if list(parts) == [Part.SIMULATOR]]
    return [[key for key in leaving if key not in simulators], *([key] for key in simulators)]
