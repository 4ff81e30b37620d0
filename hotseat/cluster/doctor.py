"""The hang doctor: who waits for whom, for what and since when, and who is to blame.

`examine` looks at every process of some groups: its state, what it says it is doing, and its stack. `Watch` looks all
the time, and ends a process that is stopped or does not answer, so that whoever waits for it hears of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat.cluster.activity import DIRECTORY, Doing, activity, read_activity
from hotseat.cluster.group import Group
from hotseat.errors import DeadlineError

_STACK_TIMEOUT_S = 10.0
_COLLECTIVE = ("torch/distributed", "/ranks.py")  # in the stack of a rank that waits for the others


@dataclass(frozen=True)
class Patient:
    """One process, as seen from outside."""

    name: str  # such as `actor rank 1`
    pid: int | None
    state: str
    doing: tuple[Doing, ...]
    stack: str

    @property
    def is_in_collective(self) -> bool:
        return any(mark in self.stack for mark in _COLLECTIVE)

    def __str__(self) -> str:
        doing = "; ".join(map(str, self.doing)) or "nothing that it told of"
        shared = ", in a collective with the other ranks" if self.is_in_collective else ""
        return f"{self.name} (pid {self.pid}) is {self.state}: {doing}{shared}"


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `culprit` names a process and says why it."""

    culprit: str
    waits: str
    patients: tuple[Patient, ...]

    def summary(self) -> str:
        lines = [f"hang: {self.waits}", *(f"  {patient}" for patient in self.patients), f"culprit: {self.culprit}"]
        return "\n".join(lines)

    def text(self) -> str:
        """With the stacks."""
        stacks = (f"--- {patient.name} (pid {patient.pid})\n{patient.stack.rstrip()}\n" for patient in self.patients)
        return self.summary() + "\n\n" + "\n".join(stacks)


def examine(groups: Iterable[Group], error: BaseException | None = None, waits: str = "") -> Diagnosis:
    """Look at everybody. `error`: what a wait that ran out was told; `waits`: in words, where there is no error."""
    awaited = awaited_in(error)
    patients = [patient for group in groups for patient in _look_at(group)]
    patients.append(Patient("driver", os.getpid(), "running", tuple(activity.now()), _stack(os.getpid())))
    return Diagnosis(_blame(patients, awaited), waits or _first_line(error), tuple(patients))


def is_hang(error: BaseException) -> bool:
    """Whether somebody waited in vain, here, in a worker, or in a collective there."""
    return any(isinstance(each, DeadlineError) or _is_late_collective(each) for each in _chain(error))


def _is_late_collective(error: BaseException) -> bool:
    trace = getattr(error, "remote_traceback", "")
    return "imed out" in trace and any(mark in trace for mark in _COLLECTIVE)


def awaited_in(error: BaseException | None) -> list[str]:
    """The processes that were waited for in vain, by the innermost error that names some."""
    found: list[str] = []
    for each in _chain(error):
        missing = getattr(each, "missing", None)
        if missing:
            found = [f"{each.group} rank {rank}" for rank in missing]  # type: ignore[attr-defined]
    return found


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(error: BaseException | None) -> str:
    return str(error).splitlines()[0] if error is not None else "somebody waits"


def _look_at(group: Group) -> Iterator[Patient]:
    for rank, (state, pid) in enumerate(zip(group.states(), group.known_pids(), strict=True)):
        doing = read_activity(os.environ.get(DIRECTORY, ""), f"{group.name}-{rank}")
        stack = _stack(pid) if pid is not None and state in ("running", "stopped") else ""
        yield Patient(f"{group.name} rank {rank}", pid, state, tuple(doing), stack)


def _blame(patients: Sequence[Patient], awaited: Sequence[str]) -> str:
    by_name = {patient.name: patient for patient in patients}
    for state in ("gone", "stopped"):
        for patient in sorted(patients, key=lambda patient: patient.name not in awaited):
            if patient.state == state:
                return f"{patient.name} (pid {patient.pid}), which is {state}"
    found = next((by_name[name] for name in awaited if name in by_name), None)
    if found is None:
        return "nobody in particular: every process is there, and nobody said whom it waits for"
    seen: list[str] = []
    while found.name not in seen:
        seen.append(found.name)
        later = _waits_for(found, patients)
        if later is None:
            doing = f" ({found.doing[0]})" if found.doing else ""
            return f"{found.name} (pid {found.pid}), which waits for nobody{doing}"
        found = later
    return f"{' and '.join(seen)}, which wait for each other"


def _waits_for(patient: Patient, patients: Sequence[Patient]) -> Patient | None:
    if patient.is_in_collective:
        siblings = [other for other in patients if other.name.split(" rank ")[0] == patient.name.split(" rank ")[0]]
        late = [other for other in siblings if not other.is_in_collective]
        if late:
            return late[0]
    wanted = [name for doing in sorted(patient.doing, key=lambda doing: doing.since_s) for name in doing.whom]
    return next((other for name in wanted for other in patients if other.name == name), None)


# --- stacks -----------------------------------------------------------------------------------------------------------


def _stack(pid: int) -> str:
    """The stacks of a process on this machine: by py-spy where there is one, else by its own handler."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_STACK_TIMEOUT_S)
            if done.returncode == 0:
                return done.stdout
    path = Path(os.environ.get(DIRECTORY, "")) / f"{pid}.stack"
    if not path.is_file():
        return "(no stack: py-spy is not installed)"
    before = path.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    written = ""
    for _ in range(20):
        time.sleep(0.05)
        last, written = written, path.read_text()[before:]
        if written and written == last:  # a thread at a time is written
            break
    return written or "(no stack: the process does not react to signals, and py-spy is not installed)"


# --- the watch --------------------------------------------------------------------------------------------------------


class Watch:
    """A thread that looks at processes every second, and ends those that have been silent for `limit_s`.

    Silent is one that is stopped, or one of `pinged` that does not answer `health`. `on_silence` is told group, rank
    and why before the process is ended. It is woken by `close`.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        *,
        pinged: Sequence[str] = (),
        limit_s: float,
        on_silence: Callable[[Group, int, str], object],
    ):
        self._groups = groups
        self._pinged = pinged
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._poll_s = min(1.0, limit_s / 4)
        self._since: dict[tuple[str, int, int | None], float] = {}  # stopped since
        self._pings: dict[tuple[str, int, int | None], tuple[float, Future[Any]]] = {}
        self._troubled: set[str] = set()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(self._limit_s + _STACK_TIMEOUT_S)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._is_closing.wait(self._poll_s):
            now = time.monotonic()
            if now - last > self._limit_s / 2:
                # This process was itself stopped, or starved: nothing is known of the others.
                self._since.clear()
                self._pings.clear()
            last = now
            for group in list(self._groups.values()):
                try:
                    self._look(group, now)
                except Exception as error:  # told, not hidden; one group's trouble must not leave the others alone
                    self._tell_trouble(group, error)
            last = time.monotonic()  # telling of silence takes its time

    def _look(self, group: Group, now: float) -> None:
        for rank, (state, pid) in enumerate(zip(group.states(), group.known_pids(), strict=True)):
            key = group.name, rank, pid
            if state != "stopped":
                self._since.pop(key, None)
            elif now - self._since.setdefault(key, now) > self._limit_s:
                self._end(group, rank, pid, f"it was stopped for {self._limit_s:g} s")
                continue
            if state == "running" and group.name in self._pinged and not self._answers(group, rank, key):
                self._end(group, rank, pid, f"it did not answer for {self._limit_s:g} s")

    def _answers(self, group: Group, rank: int, key: tuple[str, int, int | None]) -> bool:
        if key not in self._pings:
            self._pings[key] = time.monotonic(), group.ping(rank)
        asked, future = self._pings[key]
        if future.done():
            del self._pings[key]
            return True
        return time.monotonic() - asked < self._limit_s

    def _end(self, group: Group, rank: int, pid: int | None, why: str) -> None:
        if self._is_closing.is_set():
            return
        self._since.pop((group.name, rank, pid), None)
        self._pings.pop((group.name, rank, pid), None)
        try:
            self._on_silence(group, rank, why)
        finally:
            group.end(rank, why, pid=pid)

    def _tell_trouble(self, group: Group, error: Exception) -> None:
        if group.name not in self._troubled and not self._is_closing.is_set():
            self._troubled.add(group.name)
            print(f"hotseat: {group.name} cannot be watched: {type(error).__name__}: {error}", file=sys.stderr)
