"""Finds this process's control group of version 2."""

from __future__ import annotations

from pathlib import Path

OWN_GROUP = Path("/proc/self/cgroup")
MOUNTS = Path("/proc/self/mountinfo")


def own_group(own: Path = OWN_GROUP, mounts: Path = MOUNTS) -> tuple[Path, Path] | str:
    """Return the folder of this process's control group, and the mount point above it; a text if there is none."""
    try:
        groups = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
        lines = [line.partition(" - ") for line in mounts.read_text().splitlines()]
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    mounted = [Path(before.split()[4]) for before, _, after in lines if after.split()[:1] == ["cgroup2"]]
    if not groups or not mounted:
        return "this machine has no control groups of version 2"
    group = mounted[0] / groups[0].strip("/")
    if ".." in group.parts or not group.is_dir():
        return "the control group of this process is not visible here"
    return group, mounted[0]
