"""Handling of Ctrl-C and SIGTERM, the same at every moment of a command or a run.

The first one lets a run finish what it has under way, if it has something to save, and then raises KeyboardInterrupt;
otherwise it raises KeyboardInterrupt at once, and everything that was started is closed. One more after that ends a
command where it stands: its processes end with it. In a program of the user's it raises KeyboardInterrupt again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOPPED = 130  # exit code of a command that was stopped
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Reaction of this process to the signals.

    describe: returns what the newest run loses if it ends now, and how to resume it; None before a run is open.
    is_raised: a signal has raised KeyboardInterrupt, which a library may have replaced by another error, or dropped.
    is_over: the command has nothing left to do but to exit.
    """

    def __init__(self, ends_process: bool = False):
        """Take no signals yet. ends_process: this process is a command, which a further signal may end at once."""
        self.describe: Callable[[], str] | None = None
        self.is_raised = False
        self.is_over = False
        self._ends_process = ends_process
        self._is_run = False
        self._finish: Callable[[], str | None] | None = None

    @contextmanager
    def in_run(self) -> Iterator[None]:
        """Enclose a run, whose parts take a while to close: print a line at the signal, before they are closed."""
        self._is_run = True
        try:
            yield
        finally:
            self._is_run = False

    @contextmanager
    def finishing(self, finish: Callable[[], str | None]) -> Iterator[None]:
        """Let the first signal call `finish`, which returns what is finished before the run ends; None if nothing is.

        It is called at any moment, between any two instructions.
        """
        self._finish, before = finish, self._finish
        try:
            yield
        finally:
            self._finish = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has raised it before and a library dropped it."""
        if self.is_raised:
            raise KeyboardInterrupt

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal."""
        name = _NAMES[signal.Signals(number)]
        if not (self.is_raised or self.is_over):
            finished = None if self._finish is None else self._finish()
            if finished is not None:
                _write(f"hotseat: {name}: {finished}, then the run ends; a second one ends it at once\n")
                return
            self.is_raised = True
            if self._is_run:
                _write(f"hotseat: {name}: the run ends; one more ends it without closing what it started\n")
            raise KeyboardInterrupt
        if self._ends_process:
            _write(f"{_SHOW_CURSOR * os.isatty(2)}hotseat: {name}: ended at once\n")
            os._exit(STOPPED)
        raise KeyboardInterrupt

    def drop(self, unraisable: Any) -> None:
        """Print nothing of a KeyboardInterrupt that came where nothing can be raised: `check` raises it again."""
        if not (self.is_raised and issubclass(unraisable.exc_type, KeyboardInterrupt)):
            sys.__unraisablehook__(unraisable)


_current: Interrupts | None = None  # of this process


def current() -> Interrupts:
    """Return what handles the signals of this process now; in other threads than the main one, one without handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    return _current if _current is not None and is_main else Interrupts()


def handle_until_exit() -> None:
    """Handle the signals from now on, up to the end of this process, which is a command."""
    if _current is None:
        _install(Interrupts(ends_process=True))


@contextmanager
def installed() -> Iterator[Interrupts]:
    """Install handlers of the signals inside the context. In other threads than the main one this does nothing.

    Handlers of the user's program are restored afterwards.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield current()
        return
    interrupts = Interrupts()
    hook, before = sys.unraisablehook, _install(interrupts)
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set by Python
                signal.signal(number, handler)
        _current, sys.unraisablehook = None, hook


@contextmanager
def handled() -> Iterator[Interrupts]:
    """Handle the signals inside the context, and leave it by KeyboardInterrupt if one has raised that.

    A library that is interrupted while it loads or saves may replace KeyboardInterrupt by another error, or drop it.
    """
    with installed() as interrupts:
        try:
            yield interrupts
            interrupts.check()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if interrupts.is_raised:
                raise KeyboardInterrupt from error
            raise


def _install(interrupts: Interrupts) -> dict[signal.Signals, Any]:
    """Install handlers; return the earlier ones. Ctrl-C stays ignored in what a shell started in the background."""
    global _current
    _current = interrupts
    sys.unraisablehook = interrupts.drop
    before = {number: signal.getsignal(number) for number in _NAMES}
    for number, handler in before.items():
        if not (number == signal.SIGINT and handler == signal.SIG_IGN):
            signal.signal(number, interrupts.handle)
    return before


def _write(text: str) -> None:
    """Write to standard error by its descriptor: the interrupted code may hold the locks of other ways to print."""
    with suppress(OSError):  # nobody reads it any more; the signal counts
        os.write(2, text.encode())
