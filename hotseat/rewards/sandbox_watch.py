"""The watch over all processes of a program, which bounds the memory and CPU time that they use together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

LOOK_EVERY_S = 0.02  # longest interval of looks at the processes; shorter as their memory nears its limit
_GROWTH = 8 * 2**30  # bytes a second by which one thread can fill memory
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Counts:
    """The kernel's counts of one process: bytes of its own memory and of memory to share, page faults, and threads."""

    anonymous: int
    shared: int
    faults: int
    num_threads: int
    cpu_s: float


class ProcessWatch:
    """Looks at all processes of a program, and returns the limit that they exceed together.

    The kernel's counts of a process are cheap to read, but a page that processes share is in the count of each. To
    count it once takes tens of milliseconds, in which memory grows. So pages are counted only if the limit can be
    exceeded, by the kernel's counts and how they changed since pages were counted last.
    """

    def __init__(self, max_memory_bytes: int, max_cpu_s: float, max_processes: int | None, proc: str = "/proc"):
        self._max_memory_bytes = max_memory_bytes
        self._max_cpu_s = max_cpu_s
        self._max_processes = max_processes
        self._proc = proc
        self._counted = 0  # bytes of all processes, when pages were counted
        self._then: dict[int, _Counts] = {}  # of each process at that time
        self._next_count_s = 0.0
        self.wait_s = 0.0  # until the next look

    def look(self, root: int) -> Literal["cpu", "memory", "processes"] | None:
        """Look at the processes below `root`; return the limit that they exceed, None if they exceed none."""
        begun_s = time.monotonic()
        limit = self._max_memory_bytes
        now: dict[int, _Counts] = {}
        for pid in below(root, self._proc):
            with contextlib.suppress(OSError, ValueError, IndexError):
                now[pid] = _counts(pid, self._proc)
        if self._max_processes is not None and len(now) > self._max_processes:
            return "processes"
        if sum(counts.cpu_s for counts in now.values()) > self._max_cpu_s:
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
                memory += _memory(pid, self._proc)
            if memory > self._max_memory_bytes:
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
