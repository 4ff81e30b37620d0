"""Times and memory of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hotseat.cluster import WorkerGroup
from hotseat.loop.devices.held_memory import DeviceWatch, DeviceWorker, memory_by_role
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.machine import has_gpu
from hotseat.placement import Plan


class PhaseMeter:
    """Leases devices to roles for a phase, and measures how long they work and how much memory is used meanwhile."""

    def __init__(
        self,
        scheduler: DeviceScheduler,
        groups: Mapping[str, WorkerGroup[DeviceWorker]],
        plan: Plan,
        devices: DeviceWatch,
    ):
        self._scheduler = scheduler
        self._groups = groups
        self._plan = plan
        self._devices = devices
        self._started_s = time.monotonic()
        self._process_started_s = time.process_time()
        self._phase_s: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    def begin_step(self) -> None:
        """Start measuring a step: an evaluation and a save since the last step are no part of it."""
        self._started_s, self._process_started_s = time.monotonic(), time.process_time()
        self._phase_s.clear()
        self._memory.clear()
        self._scheduler.spent()

    def turns(self, phase: str, roles: Sequence[str]) -> list[tuple[str, ...]]:
        """Return these roles of a phase turn by turn: roles of one step of the plan work at the same time."""
        steps = [step for step in self._plan.steps if step.kind == phase]
        turns = (tuple(role for role in roles if role in step.roles) for step in steps)
        return [turn for turn in turns if turn]

    @contextmanager
    def lease(self, phase: str, *roles: str) -> Iterator[None]:
        """Hold the devices on which roles work at the same time in `phase`, and measure that work."""
        with self._scheduler.lease(phase, roles[0]):
            self._reset_peaks()
            started_s = time.monotonic()
            yield
            self._phase_s[phase] = self._phase_s.get(phase, 0.0) + time.monotonic() - started_s
        self._record_peaks(phase, roles)

    def metrics(self) -> dict[str, float]:
        """Return seconds, memory and hand-overs of the step that ends now. `step_s` is the whole step's."""
        metrics = {
            "step_s": time.monotonic() - self._started_s,
            "time/driver_cpu": time.process_time() - self._process_started_s,  # of this process's own work
        }
        metrics |= {f"time/{phase}": seconds for phase, seconds in self._phase_s.items()}
        return metrics | self._memory | self._scheduler.spent()

    def _reset_peaks(self) -> None:
        """Forget peaks of memory that were reached while parts were offloaded and onloaded."""
        self._devices.peaks_gib()
        if has_gpu():
            memory_by_role(self._groups)

    def _record_peaks(self, phase: str, roles: Sequence[str]) -> None:
        """Record peak memory per role and per device, excluding unused allocator cache. The highest turn counts."""
        peaks = self._devices.peaks_gib()
        measured: dict[str, float] = {}
        for name, memory in memory_by_role(self._groups).items():
            if name in roles or not has_gpu():
                measured[f"memory/{phase}/{name}"] = sum(held for held, _ in memory)
            for process, (_, unused) in zip(self._plan.role(name).processes, memory, strict=False):
                # A process that spans several devices has several caches, so none can be subtracted from one device.
                if len(process.devices) == 1 and process.devices[0] in peaks:
                    peaks[process.devices[0]] -= unused
        measured |= {f"memory/{phase}/device {device}": gib for device, gib in peaks.items()}
        for name, gib in measured.items():
            self._memory[name] = max(gib, self._memory.get(name, 0.0))
