"""Finds out what this machine has: GPUs, and host memory that is available."""

from __future__ import annotations

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
