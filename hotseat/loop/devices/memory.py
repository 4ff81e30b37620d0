"""How much memory the processes of a role hold, and how much is left."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hotseat.errors import RunError

if TYPE_CHECKING:
    from hotseat.cluster import WorkerGroup
    from hotseat.cluster.lease import DeviceMemory


@dataclass(frozen=True)
class Held:
    """Device memory of a process since this was last asked, in bytes."""

    peak: int  # the most that was in use
    unused: int  # that its allocator held beyond that


class MeasuresMemory(Protocol):
    """The process of a role, as far as its memory is asked for."""

    def held(self) -> Held:
        """Return the device memory of the process since this was last asked."""


def group_memory(group: WorkerGroup[MeasuresMemory]) -> list[tuple[float, float]] | None:
    """(GiB held, GiB that the allocator held beyond that) of each process of a role.

    On a GPU the most that was in use since last asked; else resident memory.
    """
    if has_gpu():
        with contextlib.suppress(RunError):  # whoever works with it next hears of it
            return [(held.peak / 2**30, held.unused / 2**30) for held in group.call(MeasuresMemory.held)]
        return None
    sizes = [_resident_bytes(pid) for pid in set(group.known_pids()) if pid is not None]
    return [(size / 2**30, 0.0) for size in sizes] or None


class DeviceWatch:
    """The most that was in use on each device, looked at many times a second by a thread of its own."""

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
        """Since this was last asked, device by device; nothing where it cannot be measured."""
        self._look()
        with self._lock:
            found, self._peaks = self._peaks, {}
        return {device: used / 2**30 for device, used in found.items()}

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
                found = self._measure(device)
                if found is not None:
                    self._peaks[device] = max(self._peaks.get(device, 0), found.used)


def available_bytes(system: Path = Path("/")) -> int:
    """Of host memory on this node that can be had without swapping; 0 if that cannot be known."""
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
        [free] = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return 0
    # A container sees the memory of the whole machine there, and is ended when it uses more than its own share.
    group = system / "sys/fs/cgroup"
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, min(free, limit - used + int(stat["inactive_file"])))
    except (OSError, ValueError, KeyError):
        return free  # no limit


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it is gone, or this is not Linux
