"""How much memory the processes of a role hold."""

from __future__ import annotations

import os
from functools import cache

from hotseat.cluster.group import Group


def held_gib(group: Group, *, is_working: bool) -> float | None:
    """On a GPU the most that it held since last asked, of a role that has just worked; else its resident memory."""
    if _has_gpu():
        return sum(group.call("peak_bytes")) / 2**30 if is_working else None
    sizes = [_resident_bytes(pid) for pid in set(group.known_pids()) if pid is not None]
    return sum(sizes) / 2**30 if sizes else None


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it is gone, or this is not Linux
