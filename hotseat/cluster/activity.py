"""Records what a process is doing and whom it waits for, where others can read it even when the process hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = "HOTSEAT_ACTIVITY"  # of the files; unset: they are kept in memory alone


@dataclass(frozen=True)
class Operation:
    """Something under way. `whom`: processes that are waited for, such as `rollout rank 0`."""

    what: str
    whom: tuple[str, ...]
    since_s: float  # by `time.time`

    def __str__(self) -> str:
        return f"{self.what}, for {max(0.0, time.time() - self.since_s):.1f} s"


class Activity:
    """One per process. Beginning and ending something takes some microseconds."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._now: dict[int, Operation] = {}
        self._lock = threading.Lock()
        self._file: int | None = None

    def keep_in(self, directory: str, name: str) -> None:
        """Keep the record in a file too, from now on."""
        with contextlib.suppress(OSError):  # a worker does its work without it
            make_private(directory)
            self._file = os.open(Path(directory) / name, os.O_CREAT | os.O_RDWR, 0o600)

    @contextlib.contextmanager
    def doing(self, what: str, whom: Sequence[str] = ()) -> Iterator[None]:
        number, entry = next(self._numbers), Operation(what, tuple(whom), time.time())
        with self._lock:
            self._now[number] = entry
            self._write()
        try:
            yield
        finally:
            with self._lock:
                del self._now[number]
                self._write()

    def becomes(self, what: str) -> None:
        """Replace the operation that was begun last: it is something else from now on."""
        with self._lock:
            if self._now:
                number = max(self._now)
                self._now[number] = Operation(what, self._now[number].whom, time.time())
                self._write()

    def now(self) -> list[Operation]:
        with self._lock:
            return list(self._now.values())

    def _write(self) -> None:
        if self._file is not None:
            entries = [[entry.what, entry.whom, entry.since_s] for entry in self._now.values()]
            os.pwrite(self._file, json.dumps(entries).encode() + b"\0", 0)


def make_private(directory: str) -> None:
    """Make a folder, and the one around it, for this user alone."""
    for folder in (os.path.dirname(directory), directory):
        if folder:
            os.makedirs(folder, mode=0o700, exist_ok=True)


def read_activity(directory: str, name: str) -> list[Operation]:
    """Read what a process on this machine was doing when it last recorded it."""
    try:
        text = (Path(directory) / name).read_bytes().partition(b"\0")[0]
        return [Operation(what, tuple(whom), since_s) for what, whom, since_s in json.loads(text)]
    except (OSError, ValueError):
        return []


def show_stacks_on_signal(directory: str) -> None:
    """Have SIGUSR2 write the stacks of this process's threads to a file, for machines without py-spy."""
    with contextlib.suppress(OSError, ValueError):
        make_private(directory)
        file = (Path(directory) / f"{os.getpid()}.stack").open("w")  # stays open: the handler writes to it
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


activity = Activity()  # of this process
