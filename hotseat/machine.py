"""Finds out what this machine has and uses: GPUs, processor time, and host memory."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def available_bytes(system: Path = Path("/")) -> int:
    """Return the host memory of this node that is available without swapping; 0 if it is not known."""
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
        [free] = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return 0
    # In a container that is the memory of the whole machine, but the container is killed at its own limit.
    group = system / "sys/fs/cgroup"
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, min(free, limit - used + int(stat["inactive_file"])))
    except (OSError, ValueError, KeyError):
        return free  # no limit


def used_bytes(system: Path = Path("/")) -> int:
    """Return the host memory that is in use, of this container where it has a limit; 0 if it is not known."""
    group = system / "sys/fs/cgroup"
    try:
        total = int((group / "memory.max").read_text())
    except (OSError, ValueError):
        try:
            lines = (system / "proc/meminfo").read_text().splitlines()
            [total] = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
        except (OSError, ValueError):
            return 0
    return max(0, total - available_bytes(system))


def processor_seconds(system: Path = Path("/")) -> tuple[float, float] | None:
    """Return the seconds for which processors have worked, and how many there are; None if it is not known.

    In a container with a limit on processors, they are its own.
    """
    group = system / "sys/fs/cgroup"
    try:
        quota, period = (int(word) for word in (group / "cpu.max").read_text().split())
        stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(stat["usage_usec"]) / 1e6, quota / period
    except (OSError, ValueError, KeyError):
        pass  # no limit
    try:
        lines = [line.split() for line in (system / "proc/stat").read_text().splitlines() if line.startswith("cpu")]
        user, nice, kernel, _idle, _waiting, *interrupts = (int(word) for word in lines[0][1:8])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + kernel + sum(interrupts)) / os.sysconf("SC_CLK_TCK"), float(len(lines) - 1)
