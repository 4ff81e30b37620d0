"""The driver of a run as the child of a small process that outlives it, passes signals on, and can start it again.

The driver is forked before anything heavy is loaded, so that it costs no time. It is in a process group of its own:
what a terminal, `timeout` or a scheduler sends to the command's group reaches the driver only through its parent, and
once. If the parent dies, so does the driver. If the driver wants the terminal, as a debugger does, it gets it.

The driver tells its parent facts, as lines of JSON through a pipe, with `tell`. Without a parent that does nothing.
With the fact `standby` it asks for another process that prepares itself and waits, to be the driver if this one dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotseat.processes.child import die_with

_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_MAX_TEXT = 800  # of a fact: a line must fit into what a pipe takes at once
_LOOK_EVERY_S = 1.0
_STANDBY_END_S = 5.0
_UNPREPARED = 70  # exit code of a standby that is no driver: EX_SOFTWARE of sysexits.h
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Restart:
    """A restart of a driver after a death: when, and why."""

    time_s: float  # since 1970
    text: str


@dataclass(frozen=True)
class DriverEnd:
    """An end of a driver. code: its exit code, or minus the signal that ended it. facts: the newest of each name."""

    code: int
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class _Child:
    """A driver, or a process that waits to be the next one.

    facts_end: end of a pipe from which its facts are read. start: end of a pipe that tells a standby to begin.
    """

    pid: int
    facts_end: int
    start: int | None


# --- the side of the driver -------------------------------------------------------------------------------------------

_pipe: int | None = None  # to the parent
_driver = 0  # the process that may write there: not one that it forks
restarts: tuple[Restart, ...] = ()  # those of this command, in a driver that was started again


def is_kept() -> bool:
    """Tell whether this process is a driver that has a parent."""
    return _pipe is not None and os.getpid() == _driver


def tell(**facts: Any) -> None:
    """Tell the parent facts about this driver. Strings may be cut."""
    if _pipe is None or not is_kept():
        return
    short = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in facts.items()}
    with contextlib.suppress(OSError):  # it is stopped, and the pipe is full
        os.write(_pipe, (json.dumps(short, ensure_ascii=False) + "\n").encode("utf-8", "replace"))


# --- the side of the parent -------------------------------------------------------------------------------------------


Prepare = Callable[[Mapping[str, Any]], Callable[[], object]]


def _nothing() -> object:
    return None


class DriverKeeper:
    """Starts drivers one after another, in the main thread of a process that does nothing else.

    prepare: called in a standby with the facts of the driver; returns what is called if the standby is not needed.
    stopped_by: the last signal that asked the command to end. arguments: those of the driver, in a driver.
    """

    def __init__(self, prepare: Prepare = lambda facts: _nothing) -> None:
        self.stopped_by: signal.Signals | None = None
        self.arguments: list[str] = []
        self._prepare = prepare
        self._standby: _Child | None = None
        self._pid = os.getpid()
        self._facts: dict[str, Any] = {}
        self._unread = b""
        self._terminal = _terminal()
        self._has_lent = False  # the terminal is the driver's
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        watched = [*_PASSED_ON, signal.SIGCHLD, signal.SIGTSTP]
        self._before = {number: signal.getsignal(number) for number in watched}
        # What a shell starts in its background ignores Ctrl-C, and so does the driver.
        self._watched = [number for number in watched if self._before[number] is not signal.SIG_IGN]

    def run(self, made: Sequence[Restart] = (), arguments: Sequence[str] = ()) -> DriverEnd | None:
        """Start a driver, and wait for its end. Returns None in the driver. made: the restarts before."""
        standby = self._started_standby(made, arguments)
        driver = standby or self._fork()
        if driver is None:
            self._become_driver(made, arguments)
            return None
        has_asked = False
        while (code := self._wait(driver, may_ask=not has_asked)) is None:
            has_asked = True
            self._standby = self._fork(driver)
            if self._standby is None:
                return None
        facts, self._facts, self._unread = self._facts, {}, b""
        if standby is not None and code == _UNPREPARED and not facts and self.stopped_by is None:
            return self.run(made, arguments)  # it could not be prepared, and the next one is made without it
        return DriverEnd(code, facts)

    def close(self) -> None:
        """End the standby, if this process has one."""
        standby, self._standby = self._standby, None
        if standby is None or os.getpid() != self._pid:
            return
        assert standby.start is not None
        os.close(standby.start)  # it ends what it has started, and itself
        until_s = time.monotonic() + _STANDBY_END_S
        with contextlib.suppress(OSError):
            while os.waitpid(standby.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until_s:
                    os.kill(standby.pid, signal.SIGKILL)
                time.sleep(0.01)

    def _become_driver(self, made: Sequence[Restart], arguments: Sequence[str]) -> None:
        global restarts
        restarts, self.arguments = tuple(made), list(arguments)

    def _started_standby(self, made: Sequence[Restart], arguments: Sequence[str]) -> _Child | None:
        """Have the standby be the driver; None if there is none."""
        standby, self._standby = self._standby, None
        if standby is None:
            return None
        assert standby.start is not None
        order = {"made": [[each.time_s, each.text] for each in made], "arguments": list(arguments)}
        try:
            os.write(standby.start, (json.dumps(order) + "\n").encode())
            return standby if os.waitpid(standby.pid, os.WNOHANG)[0] == 0 else None
        except OSError:
            return None  # it has ended, perhaps for want of memory
        finally:
            os.close(standby.start)

    def _stand_by(self, start: int, facts: Mapping[str, Any]) -> None:
        """Prepare this process, and return once it is to be the driver. Otherwise it ends with its parent."""
        line, code, discard = "", _UNPREPARED, _nothing
        try:
            discard = self._prepare(facts)
            with os.fdopen(start) as lines:
                line = lines.readline()
        except KeyboardInterrupt:
            if line:
                raise  # as in a driver
            code = 128 + signal.SIGINT
        finally:
            if not line:
                try:
                    discard()
                finally:
                    os._exit(code)
        order = json.loads(line)
        self._become_driver([Restart(*each) for each in order["made"]], order["arguments"])

    def _fork(self, driver: _Child | None = None) -> _Child | None:
        """Fork a driver, or the standby of one. Returns None in the child; in a standby once it is to be the driver."""
        global _pipe, _driver
        reading_end, writing_end = os.pipe()
        waiting_end, starting_end = (None, None) if driver is None else os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # A signal that comes meanwhile reaches the parent, which then knows whom to pass it on to.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in self._watched:
            signal.signal(number, lambda *_: None)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _end_with(parent)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in self._watched:
                signal.signal(number, self._before[number])
            facts_end = None if driver is None else driver.facts_end
            for end in (facts_end, reading_end, starting_end, self._woken, self._wake, self._terminal):
                if end is not None:
                    os.close(end)
            os.set_blocking(writing_end, False)
            _pipe, _driver = writing_end, os.getpid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._watched)
            if waiting_end is not None:
                self._stand_by(waiting_end, self._facts)
            return None
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        os.close(writing_end)
        if waiting_end is not None:
            os.close(waiting_end)
        os.set_blocking(reading_end, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._watched)
        return _Child(pid, reading_end, starting_end)

    def pause(self, seconds: float) -> bool:
        """Wait, while no driver runs; return whether a signal asked the command to end."""
        until_s = time.monotonic() + seconds
        while True:
            for number in self._signals():
                if number in _PASSED_ON:
                    self.stopped_by = signal.Signals(number)
                elif number == signal.SIGTSTP:
                    self._stop_oneself(signal.SIGTSTP)
            left_s = until_s - time.monotonic()
            if self.stopped_by is not None or left_s <= 0:
                return self.stopped_by is not None
            select.select([self._woken], [], [], left_s)

    def _wait(self, driver: _Child, *, may_ask: bool) -> int | None:
        """Wait for the end of a driver, and return its code; None, if it `may_ask`, as soon as it wants a standby."""
        pid, facts_end = driver.pid, driver.facts_end
        while True:
            if may_ask and self._facts.get("standby"):
                return None
            select.select([self._woken, facts_end], [], [], _LOOK_EVERY_S)
            self._read(facts_end)
            for number in self._signals():
                if number in _PASSED_ON:
                    self.stopped_by = signal.Signals(number)
                    os.kill(pid, number)  # it is there, or waits to be collected
                elif number == signal.SIGTSTP:
                    os.kill(pid, signal.SIGSTOP)
                    self._stop_oneself(signal.SIGTSTP)
                    os.kill(pid, signal.SIGCONT)
            while True:  # as process 1 of a container, this one collects others, too
                try:
                    ended, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                except ChildProcessError:
                    ended, status = 0, 0
                if ended == 0:
                    break
                if ended == pid and os.WIFSTOPPED(status):
                    self._let_continue(pid, os.WSTOPSIG(status))
                elif ended == pid:
                    self._take_terminal(pid)
                    self._read(facts_end)
                    os.close(facts_end)
                    return os.waitstatus_to_exitcode(status)
                elif self._standby is not None and ended == self._standby.pid and not os.WIFSTOPPED(status):
                    self._forget_standby()

    def _forget_standby(self) -> None:
        """Have no standby any more: it has ended."""
        standby, self._standby = self._standby, None
        for end in () if standby is None else (standby.facts_end, standby.start):
            if end is not None:
                os.close(end)

    def _signals(self) -> bytes:
        try:
            return os.read(self._woken, 4096)
        except BlockingIOError:
            return b""

    def _read(self, facts_end: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(facts_end, 1 << 16):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._facts.update(json.loads(line))

    # --- the terminal ---

    def _let_continue(self, pid: int, number: int) -> None:
        """Lend a driver the terminal that it was stopped for, or stop with it if somebody stopped it there."""
        if self._terminal is None or number not in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP):
            return  # somebody has stopped it, and will let it continue
        if number == signal.SIGTSTP or os.tcgetpgrp(self._terminal) not in (os.getpgrp(), pid):
            self._take_terminal(pid)
            self._stop_oneself(signal.Signals(number))
        if number != signal.SIGTSTP and os.tcgetpgrp(self._terminal) == os.getpgrp():
            self._has_lent = True
            self._set_foreground(pid)
        os.kill(pid, signal.SIGCONT)

    def _take_terminal(self, pid: int) -> None:
        if self._has_lent and self._terminal is not None:
            self._has_lent = False
            with contextlib.suppress(OSError):  # it is closed
                if os.tcgetpgrp(self._terminal) == pid:
                    self._set_foreground(os.getpgrp())

    def _set_foreground(self, group: int) -> None:
        assert self._terminal is not None
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            os.tcsetpgrp(self._terminal, group)
        finally:
            signal.signal(signal.SIGTTOU, before)

    def _stop_oneself(self, number: signal.Signals) -> None:
        """Stop this process as the signal does by default, until it is continued."""
        handler = signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, handler)


def show_cursor() -> None:
    """Show the cursor of the terminal, which a driver that was killed may have hidden."""
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR.encode())


def _terminal() -> int | None:
    """Open the terminal that controls this process; None if there is none."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None


def _end_with(parent: int) -> None:
    """Have this process end when its parent does."""
    die_with(parent)
    if not sys.platform.startswith("linux"):

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(_LOOK_EVERY_S)
            os._exit(1)

        threading.Thread(target=watch, name="parent", daemon=True).start()
