"""Bounds on what the processes of a sandboxed program use together: a watch over all of them, and control groups.

Where this process may make control groups (cgroup v2), the kernel counts every page of every process in a group, and
ends all of them when they exceed the limit together. Groups are made below the nearest ancestor of this process's own
group that gives the memory controller to its children: a group with processes of its own cannot have children with
limits. Nothing but the new groups is changed, and empty ones that a process left which was killed are removed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hotseat.errors import SandboxError
from hotseat.processes.supervisor import MOUNTS, OWN_GROUP, end_group, own_group

LOOK_EVERY_S = 0.02  # longest interval of looks at the processes; shorter as their memory nears its limit
_GROWTH = 8 * 2**30  # bytes a second by which one thread can fill memory
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_OWN_PROCESSES = Path("/proc/self/ns/pid")
_REMOVED_WITHIN_S = 10.0
_PREFIX = "hotseat-sandbox"
_numbers = itertools.count()
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Counts:
    """The kernel's counts of one process: bytes of its own memory and of memory to share, page faults, and threads."""

    anonymous: int
    shared: int
    faults: int
    num_threads: int
    cpu_s: float


@dataclass(eq=False)
class ProcessWatch:
    """Looks at all processes of a program, and returns the limit that they exceed together.

    The kernel's counts of a process are cheap to read, but a page that processes share is in the count of each. To
    count it once takes tens of milliseconds, in which memory grows. So pages are counted only if the limit can be
    exceeded, by the kernel's counts and how they changed since pages were counted last.
    """

    max_memory_bytes: int
    max_cpu_s: float
    max_processes: int | None
    proc: str = "/proc"
    wait_s: float = 0.0  # until the next look
    _counted: int = 0  # bytes of all processes, when pages were counted
    _then: dict[int, _Counts] = field(default_factory=dict)  # of each process at that time
    _next_count_s: float = 0.0

    def look(self, root: int) -> Literal["cpu", "memory", "processes"] | None:
        """Look at the processes below `root`; return the limit that they exceed, None if they exceed none."""
        begun_s = time.monotonic()
        limit = self.max_memory_bytes
        now: dict[int, _Counts] = {}
        for pid in below(root, self.proc):
            with contextlib.suppress(OSError, ValueError, IndexError):
                now[pid] = _counts(pid, self.proc)
        if self.max_processes is not None and len(now) > self.max_processes:
            return "processes"
        if sum(counts.cpu_s for counts in now.values()) > self.max_cpu_s:
            return "cpu"
        most = self._most(now)
        look_s = time.monotonic() - begun_s
        # No more than half of the time goes into counting, unless the limit is probably exceeded.
        if most > limit and (begun_s >= self._next_count_s or self._likely(now) > limit):
            self._counted, self._then = self._count(now), now
            if self._counted > limit:
                return "memory"
            most = self._counted
            self._next_count_s = 2 * time.monotonic() - begun_s
        self.wait_s = wait_s(limit - most, sum(counts.num_threads for counts in now.values()), look_s)
        return None

    def _likely(self, now: dict[int, _Counts]) -> int:
        """Return how much memory there probably is: new pages of a process belong to it alone."""
        grown = 0
        for pid, then in self._then.items():
            grown += now[pid].anonymous - then.anonymous if pid in now else -then.anonymous - then.shared
        return self._counted + grown

    def _most(self, now: dict[int, _Counts]) -> int:
        """Return how much memory there is at most: a page fault may have copied a page that was shared."""
        grown = 0
        for pid, counts in now.items():
            then = self._then.get(pid)
            if then is None:
                grown += counts.anonymous + counts.shared
            else:
                grown += max(0, counts.anonymous - then.anonymous) + max(0, counts.shared - then.shared)
                grown += (counts.faults - then.faults) * _PAGE
        return self._counted + grown

    def _count(self, pids: Iterable[int]) -> int:
        memory = 0
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                memory += _memory(pid, self.proc)
            if memory > self.max_memory_bytes:
                break
        return memory


def wait_s(headroom: int, num_threads: int, look_s: float) -> float:
    """Return how long to wait after a look: no longer than threads need to fill the headroom.

    No more than a fifth of the time goes into looking.
    """
    grown_s = max(0, headroom) / (_GROWTH * max(1, min(num_threads, os.cpu_count() or 1)))
    return max(min(grown_s, LOOK_EVERY_S), 4 * look_s)


def below(root: int, proc: str = "/proc") -> Iterator[int]:
    """Yield the ids of all processes below one. Orphans stay below the first process of their namespace."""
    waiting: list[int] = children_of(root, proc)
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children_of(pid, proc)


def children_of(pid: int, proc: str = "/proc") -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"{proc}/{pid}/task"):
            with contextlib.suppress(OSError):
                children += map(int, _read(f"{proc}/{pid}/task/{task}/children").split())
    return children


def _counts(pid: int, proc: str) -> _Counts:
    fields = _read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    status = _read(f"{proc}/{pid}/status")
    return _Counts(
        _bytes(status, b"RssAnon:"),
        _bytes(status, b"RssShmem:"),
        faults=int(fields[7]),
        num_threads=int(fields[17]),
        cpu_s=ticks / _TICKS,
    )


def _memory(pid: int, proc: str) -> int:
    """Return the bytes of a process's own memory; a page that n processes share counts as an n-th of itself."""
    try:
        pages = _read(f"{proc}/{pid}/smaps_rollup")
        return _bytes(pages, b"Pss_Anon:") + _bytes(pages, b"Pss_Shmem:")
    except PermissionError:
        status = _read(f"{proc}/{pid}/status")
        return _bytes(status, b"RssAnon:") + _bytes(status, b"RssShmem:")


def _bytes(text: bytes, name: bytes) -> int:
    """Return the number of bytes behind a name in a file of /proc; 0 for a process that has ended."""
    _, _, rest = text.partition(b"\n" + name)
    return int(rest.split(None, 1)[0]) * 1024 if rest else 0


def _read(path: str) -> bytes:
    """Read a file of /proc. Python's own files take several times as long, and there are some for each process."""
    file = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(file, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(file)


# --- control groups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryGroup:
    """One control group. With its limit exceeded, all of its processes are killed."""

    path: Path

    def add(self, pid: int) -> None:
        """Put a process into the group; the processes that it starts from then on are in it too."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise SandboxError(f"control group {self.path} takes no process: {error}") from None

    @property
    def was_exceeded(self) -> bool:
        """Tell whether processes were killed because the limit was exceeded."""
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(counts.get("oom_kill", 0)) > 0
        return False


@dataclass
class MemoryGroups:
    """Makes control groups below `parent`, from any thread."""

    parent: Path

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
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a group. If that fails, what its program gave is still valid: the failure is logged."""
        error = end_group(path, _REMOVED_WITHIN_S)
        if error is not None:
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
    group_and_mount = own_group(own, mounts)
    if isinstance(group_and_mount, str):
        return group_and_mount
    group, mount = group_and_mount
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            break
        with contextlib.suppress(OSError):
            if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                is_writable = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
                return folder if is_writable else f"{folder} may not be written to"
    return "no control group above this process gives the memory controller to others"
