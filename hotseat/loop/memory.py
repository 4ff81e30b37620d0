"""How much memory the processes of a role hold, and how much is left."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hotseat.errors import RunError

if TYPE_CHECKING:
    from hotseat.cluster.group import Group


def held_gib(group: Group, *, is_working: bool) -> float | None:
    """On a GPU the most that it held since last asked, of a role that has just worked; else its resident memory."""
    if has_gpu():
        with contextlib.suppress(RunError):  # whoever works with it next hears of it
            return sum(group.call("peak_bytes")) / 2**30 if is_working else None
        return None
    sizes = [_resident_bytes(pid) for pid in set(group.known_pids()) if pid is not None]
    return sum(sizes) / 2**30 if sizes else None


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
