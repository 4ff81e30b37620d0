"""The hang doctor: who waits for whom, for what and since when, and who is to blame.

`examine` looks at every process of some groups: its state, what it says it is doing, and its stack. `Watch` looks every
second, and ends a process that is stopped or does not answer, so that calls that wait for it fail.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hotseat.cluster.activity import DIRECTORY, Operation, activity
from hotseat.cluster.group import WorkerGroup
from hotseat.cluster.sighting import STACK_TIMEOUT_S, stack_of
from hotseat.errors import DeadlineError, WorkerError, causes

_COLLECTIVE = ("torch/distributed", "/ranks.py")  # in the stack of a rank that waits for the others


@dataclass(frozen=True)
class ProcessReport:
    """One process, as seen from outside."""

    name: str  # such as `actor rank 1`
    pid: int | None
    state: str
    doing: tuple[Operation, ...]
    stack: str
    hostname: str = ""  # of its node, if that is not the driver's

    @property
    def identity(self) -> str:
        return f"(pid {self.pid} on {self.hostname})" if self.hostname else f"(pid {self.pid})"

    @property
    def is_in_collective(self) -> bool:
        return any(mark in self.stack for mark in _COLLECTIVE)

    def __str__(self) -> str:
        doing = "; ".join(map(str, self.doing)) or "nothing that it reported"
        shared = ", in a collective with the other ranks" if self.is_in_collective else ""
        return f"{self.name} {self.identity} is {self.state}: {doing}{shared}"


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of an examination. `culprit` names a process, and says why it is to blame."""

    culprit: str
    waits: str
    processes: tuple[ProcessReport, ...]

    def summary(self) -> str:
        lines = [f"hang: {self.waits}", *(f"  {process}" for process in self.processes), f"culprit: {self.culprit}"]
        return "\n".join(lines)

    def text(self) -> str:
        """Return the summary with the stacks of all processes."""
        stacks = (f"--- {process.name} {process.identity}\n{process.stack.rstrip()}\n" for process in self.processes)
        return self.summary() + "\n\n" + "\n".join(stacks)


def examine(groups: Iterable[WorkerGroup[Any]], error: BaseException | None = None, waits: str = "") -> Diagnosis:
    """Examine every process. `error`: what a wait that ran out raised; `waits`: in words, where there is no error."""
    awaited = awaited_in(error)
    processes = [process for group in groups for process in _reports_of(group)]
    own_stack = stack_of(os.getpid(), os.environ.get(DIRECTORY, ""))
    processes.append(ProcessReport("driver", os.getpid(), "running", tuple(activity.now()), own_stack))
    return Diagnosis(_blame(processes, awaited), waits or _first_line(error), tuple(processes))


def is_hang(error: BaseException) -> bool:
    """Tell whether an error is a wait that timed out, here, in a worker, or in a collective there."""
    return any(isinstance(each, DeadlineError) or _is_late_collective(each) for each in causes(error))


def _is_late_collective(error: BaseException) -> bool:
    trace = error.remote_traceback if isinstance(error, WorkerError) else ""
    return "imed out" in trace and any(mark in trace for mark in _COLLECTIVE)


def awaited_in(error: BaseException | None) -> list[str]:
    """Return the processes that were waited for in vain, by the innermost error that names some."""
    named = [each.awaited for each in causes(error) if isinstance(each, DeadlineError) and each.awaited]
    return list(named[-1]) if named else []


def _first_line(error: BaseException | None) -> str:
    return str(error).splitlines()[0] if error is not None else "somebody waits"


def _reports_of(group: WorkerGroup[Any]) -> Iterator[ProcessReport]:
    for rank, state in enumerate(group.states()):
        seen = group.look(rank, with_stack=state in ("running", "stopped"))
        yield ProcessReport(f"{group.name} rank {rank}", seen.pid, state, seen.doing, seen.stack, seen.hostname)


def _blame(processes: Sequence[ProcessReport], awaited: Sequence[str]) -> str:
    by_name = {process.name: process for process in processes}
    for state in ("gone", "stopped"):
        for process in sorted(processes, key=lambda process: process.name not in awaited):
            if process.state == state:
                return f"{process.name} {process.identity}, which is {state}"
    suspect = next((by_name[name] for name in awaited if name in by_name), None)
    if suspect is None:
        return "unknown: every process is alive, and none says what it waits for"
    seen: list[str] = []
    while suspect.name not in seen:
        seen.append(suspect.name)
        later = _waits_for(suspect, processes)
        if later is None:
            doing = f" ({suspect.doing[0]})" if suspect.doing else ""
            return f"{suspect.name} {suspect.identity}, which waits for nobody{doing}"
        suspect = later
    return f"{' and '.join(seen)}, which wait for each other"


def _waits_for(process: ProcessReport, processes: Sequence[ProcessReport]) -> ProcessReport | None:
    if process.is_in_collective:
        siblings = [other for other in processes if other.name.split(" rank ")[0] == process.name.split(" rank ")[0]]
        late = [other for other in siblings if not other.is_in_collective]
        if late:
            return late[0]
    names = [name for doing in sorted(process.doing, key=lambda doing: doing.since_s) for name in doing.whom]
    return next((other for name in names for other in processes if other.name == name), None)


# --- the watch --------------------------------------------------------------------------------------------------------


MOST_OFTEN = 64  # ranks of a group that is looked at every second


class Watch:
    """A thread that looks at processes every second, and ends those that have been silent for `limit_s`.

    At groups of more than `MOST_OFTEN` ranks it looks once in `limit_s`, since each look is a call to each of their
    nodes: one of them that falls silent is ended after one to two times `limit_s`.

    A process is silent if it is stopped, or if its group is in `pinged` and it does not answer `health`. `on_silence`
    is called with group, rank and reason before the process is ended. `close` wakes the thread.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup[Any]],
        *,
        pinged: Sequence[str] = (),
        limit_s: float,
        on_silence: Callable[[WorkerGroup[Any], int, str], object],
    ):
        self._groups = groups
        self._pinged = pinged
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._poll_s = min(1.0, limit_s / 4)
        self._since: dict[tuple[str, int, int | None], float] = {}  # stopped since
        self._pings: dict[tuple[str, int, int | None], tuple[float, Future[Any]]] = {}
        self._troubled: set[str] = set()
        self._looked_s: dict[str, float] = {}  # when large groups were looked at last
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(self._limit_s + STACK_TIMEOUT_S)

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
                if not self.is_due(group, now):
                    continue
                try:
                    self._look(group, now)
                except Exception as error:  # reported, not hidden; one group's trouble must not leave the others alone
                    self._report_trouble(group, error)
            last = time.monotonic()  # reporting silence takes its time

    def is_due(self, group: WorkerGroup[Any], now: float) -> bool:
        """Tell whether to look at a group now, and if so, note it."""
        if group.size > MOST_OFTEN:
            if now - self._looked_s.get(group.name, -math.inf) < self._limit_s:
                return False
            self._looked_s[group.name] = now
        return True

    def _look(self, group: WorkerGroup[Any], now: float) -> None:
        for rank, (state, pid) in enumerate(zip(group.states(), group.known_pids(), strict=True)):
            key = group.name, rank, pid
            if state != "stopped":
                self._since.pop(key, None)
            elif now - self._since.setdefault(key, now) > self._limit_s:
                self._end(group, rank, pid, f"it was stopped for {self._limit_s:g} s")
                continue
            if state == "running" and group.name in self._pinged and not self._answers(group, rank, key):
                self._end(group, rank, pid, f"it did not answer for {self._limit_s:g} s")

    def _answers(self, group: WorkerGroup[Any], rank: int, key: tuple[str, int, int | None]) -> bool:
        if key not in self._pings:
            self._pings[key] = time.monotonic(), group.ping(rank)
        asked, future = self._pings[key]
        if future.done():
            del self._pings[key]
            return True
        return time.monotonic() - asked < self._limit_s

    def _end(self, group: WorkerGroup[Any], rank: int, pid: int | None, why: str) -> None:
        if self._is_closing.is_set():
            return
        self._since.pop((group.name, rank, pid), None)
        self._pings.pop((group.name, rank, pid), None)
        try:
            self._on_silence(group, rank, why)
        finally:
            group.end(rank, why, pid=pid)

    def _report_trouble(self, group: WorkerGroup[Any], error: Exception) -> None:
        if group.name not in self._troubled and not self._is_closing.is_set():
            self._troubled.add(group.name)
            print(f"hotseat: {group.name} cannot be watched: {type(error).__name__}: {error}", file=sys.stderr)
