"""Bounds the memory of sandboxed programs by control groups (cgroup v2), on machines where this process may make some.

The kernel then counts every page of every process in a group, and ends all of them when they exceed the limit together.
Groups are made below the nearest ancestor of this process's own group that gives the memory controller to its children:
a group with processes of its own cannot have children with limits. Nothing but the new groups is changed, and empty
ones that a process left which was killed are removed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from hotseat.errors import SandboxError
from hotseat.processes.control_groups import MOUNTS, OWN_GROUP, own_group
from hotseat.processes.supervisor import end_group

_OWN_PROCESSES = Path("/proc/self/ns/pid")
_REMOVED_WITHIN_S = 10.0
_PREFIX = "hotseat-sandbox"
_numbers = itertools.count()
logger = logging.getLogger(__name__)


class MemoryGroup:
    """One control group. With its limit exceeded, all of its processes are killed."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, pid: int) -> None:
        """Put a process into the group; the processes that it starts from then on are in it too."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise SandboxError(f"control group {self.path} takes no process: {error}") from None

    @property
    def was_exceeded(self) -> bool:
        """Tell whether processes were killed because the limit was exceeded."""
        try:
            lines = (self.path / "memory.events").read_text().splitlines()
        except OSError:
            return False
        counts = dict(line.split() for line in lines)
        return int(counts.get("oom_kill", 0)) > 0


class MemoryGroups:
    """Makes control groups below `parent`, from any thread."""

    def __init__(self, parent: Path):
        self.parent = parent

    @contextlib.contextmanager
    def make(self, max_bytes: int) -> Iterator[MemoryGroup]:
        """Make a group with a limit of memory, without swap. What is left of its processes at the end is killed."""
        path = self.parent / f"{_own_prefix()}-{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except OSError as error:
            raise SandboxError(f"no control group can be made in {self.parent}: {error.strerror}") from None
        try:
            try:
                (path / "memory.max").write_text(str(max_bytes))
                (path / "memory.oom.group").write_text("1")
                if (path / "memory.swap.max").exists():  # not in a kernel without swap
                    (path / "memory.swap.max").write_text("0")
            except OSError as error:
                raise SandboxError(f"control group {path} takes no limit: {error.strerror}") from None
            yield MemoryGroup(path)
        finally:
            error = end_group(path, _REMOVED_WITHIN_S)
            if error is not None:  # what its program gave is still valid
                logger.warning("control group %s cannot be removed: %s", path, error.strerror)

    def remove_left(self) -> None:
        """Remove the empty groups of processes that are gone, as one leaves that was killed."""
        for path in self.parent.glob(f"{_own_prefix()}-*-*-*"):
            owner = path.name.removeprefix(f"{_own_prefix()}-").split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):  # it has processes, or another process removes it, too
                    path.rmdir()


def _own_prefix() -> str:
    """Return how groups of this process and its like begin: process ids mean something within one namespace alone."""
    return f"{_PREFIX}-{_OWN_PROCESSES.stat().st_ino}"


def find_parent(own: Path = OWN_GROUP, mounts: Path = MOUNTS) -> Path | str:
    """Return the folder below which groups with limits can be made, as far as files show; a text that says why not."""
    found = own_group(own, mounts)
    if isinstance(found, str):
        return found
    group, mount = found
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            break
        with contextlib.suppress(OSError):
            if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                is_writable = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
                return folder if is_writable else f"{folder} may not be written to"
    return "no control group above this process gives the memory controller to others"
