"""The driver of a run as the child of a small process that outlives it, passes signals on, and can start it again.

The driver is forked before anything heavy is loaded, so that it costs no time. It is in a process group of its own:
what a terminal, `timeout` or a scheduler sends to the command's group reaches the driver only through its parent, and
once. If the parent dies, so does the driver. If the driver wants the terminal, as a debugger does, it gets it.

The driver tells its parent facts, as lines of JSON through a pipe, with `tell`. Without a parent that does nothing.
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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotseat.processes.child import die_with

_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_MAX_TEXT = 800  # of a fact: a line must fit into what a pipe takes at once
_LOOK_EVERY_S = 1.0
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


# --- the side of the driver -------------------------------------------------------------------------------------------

_pipe: int | None = None  # to the parent
_driver = 0  # the process that may write there: not one that it forks
restarts: tuple[Restart, ...] = ()  # those of this command, in a driver that was started again


def tell(**facts: Any) -> None:
    """Tell the parent facts about this driver. Strings may be cut."""
    if _pipe is None or os.getpid() != _driver:
        return
    short = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in facts.items()}
    with contextlib.suppress(OSError):  # it is stopped, and the pipe is full
        os.write(_pipe, (json.dumps(short, ensure_ascii=False) + "\n").encode("utf-8", "replace"))


# --- the side of the parent -------------------------------------------------------------------------------------------


class DriverKeeper:
    """Starts drivers one after another, in the main thread of a process that does nothing else.

    stopped_by: the last signal that asked the command to end.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
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

    def run(self, made: tuple[Restart, ...] = ()) -> DriverEnd | None:
        """Fork a driver, and wait for its end. Returns None in the driver. made: the restarts before."""
        global _pipe, _driver, restarts
        reading_end, writing_end = os.pipe()
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
            for end in (reading_end, self._woken, self._wake, self._terminal):
                if end is not None:
                    os.close(end)
            os.set_blocking(writing_end, False)
            _pipe, _driver, restarts = writing_end, os.getpid(), made
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._watched)
            return None
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        os.close(writing_end)
        os.set_blocking(reading_end, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._watched)
        try:
            code = self._wait(pid, reading_end)
        finally:
            self._take_terminal(pid)
            self._read(reading_end)
            os.close(reading_end)
        facts, self._facts, self._unread = self._facts, {}, b""
        return DriverEnd(code, facts)

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

    def _wait(self, pid: int, told: int) -> int:
        while True:
            select.select([self._woken, told], [], [], _LOOK_EVERY_S)
            self._read(told)
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
                    return os.waitstatus_to_exitcode(status)

    def _signals(self) -> bytes:
        try:
            return os.read(self._woken, 4096)
        except BlockingIOError:
            return b""

    def _read(self, told: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(told, 1 << 16):
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
