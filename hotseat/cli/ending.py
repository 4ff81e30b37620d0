"""How commands end: exit codes, errors on standard error, Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hotseat.errors import HotseatError, UserError

# Exit codes: done; failed while running; refused before anything ran; stopped by Ctrl-C or SIGTERM.
OK, FAILED, REFUSED, STOPPED = 0, 1, 2, 130


def reported(command: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code, with errors and interruptions reported on standard error."""
    try:
        with interrupted_by_sigterm():
            return run()
    except UserError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return REFUSED
    except HotseatError as error:
        print("\n".join([f"{command}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as interrupt:
        print(last_words(command, interrupt), file=sys.stderr)
        return STOPPED


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, also while libraries load. A started run has its own handler."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def last_words(command: str, interrupt: KeyboardInterrupt) -> str:
    """Compose the last message of an interrupted command: the notes of its run, or that none had begun."""
    notes = getattr(interrupt, "__notes__", None) or ["no run had begun: start it again with the same command"]
    return "\n".join([f"{command}: stopped", *notes])
