"""Measures the memory that the processes of a role hold, and what is left."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotseat.cluster import DeviceMemory, Pending, WorkerGroup
from hotseat.errors import RunError
from hotseat.machine import has_gpu
from hotseat.types import Moved


@dataclass(frozen=True)
class Held:
    """Device memory of a process since the last measurement, in bytes."""

    peak: int  # the most that was allocated
    unused: int  # that its allocator reserved beyond that


def device_of_process() -> torch.device:
    """Return the device of this process: a GPU if it sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def release_cache_here() -> None:
    """Return unused allocator cache of this process to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class DeviceWorker:
    """Worker whose process may hold device memory."""

    def held(self) -> Held:
        """Measure the device memory of this process since the last call."""
        if not torch.cuda.is_available():
            return Held(0, 0)
        peak = torch.cuda.max_memory_allocated()
        unused = torch.cuda.max_memory_reserved() - peak
        torch.cuda.reset_peak_memory_stats()
        return Held(peak, unused)

    def release_cache(self) -> None:
        """Return unused allocator cache to the device."""
        release_cache_here()

    def offload(self, parts: Sequence[Any], keep_weights: bool = True) -> Moved:
        """Take parts off the device; without `keep_weights` no copy of the weights is kept."""
        return Moved(0, 0, 0.0)

    def onload(self, parts: Sequence[Any]) -> Moved:
        """Put parts back on the device."""
        return Moved(0, 0, 0.0)


def memory_by_role(groups: Mapping[str, WorkerGroup[DeviceWorker]]) -> dict[str, list[tuple[float, float]]]:
    """Return (GiB in use, GiB that the allocator reserved beyond that) of each process, by role; all measure at once.

    On a GPU, the peak since the last call; otherwise the resident memory of the process. A role whose processes do not
    answer is left out: the next call to it raises the reason.
    """
    if not has_gpu():
        pids = {role: {pid for pid in group.known_pids() if pid is not None} for role, group in groups.items()}
        return {role: [(_resident_bytes(pid) / 2**30, 0.0) for pid in ids] for role, ids in pids.items() if ids}
    started: dict[str, Pending[Held]] = {}
    memory = {}
    for role, group in groups.items():
        with contextlib.suppress(RunError):
            started[role] = group.start(DeviceWorker.held)
    for role, pending in started.items():
        with contextlib.suppress(RunError):
            memory[role] = [(held.peak / 2**30, held.unused / 2**30) for held in pending.result()]
    return memory


class DeviceWatch:
    """Samples the memory in use on each device many times a second, in a thread, and keeps the peaks."""

    PERIOD_S = 0.02

    def __init__(self, devices: Sequence[int], measure: Callable[[int], DeviceMemory | None]):
        self._measure = measure
        self._devices = [device for device in devices if measure(device) is not None]
        self._peaks: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device-watch", daemon=True)
        if self._devices:
            self._thread.start()

    def peaks_gib(self) -> dict[int, float]:
        """Return the peak of each device since the last call; devices that cannot be measured are left out."""
        self._look()
        with self._lock:
            peaks, self._peaks = self._peaks, {}
        return {device: used / 2**30 for device, used in peaks.items()}

    def close(self) -> None:
        self._ended.set()
        if self._devices:
            self._thread.join(5.0)

    def _watch(self) -> None:
        while not self._ended.wait(self.PERIOD_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for device in self._devices:
                memory = self._measure(device)
                if memory is not None:
                    self._peaks[device] = max(self._peaks.get(device, 0), memory.used)


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # the process is gone, or this is not Linux
