"""Ends of commands: exit codes, errors on standard error, Ctrl-C and SIGTERM."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hotseat import interrupts
from hotseat.errors import HotseatError, UserError
from hotseat.interrupts import STOPPED

# Exit codes: done; failed while running; refused before anything ran. `STOPPED`: by Ctrl-C or SIGTERM.
OK, FAILED, REFUSED = 0, 1, 2
__all__ = ["FAILED", "OK", "REFUSED", "STOPPED", "last_words", "reported"]


def reported(command: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code, with errors and interruptions reported on standard error."""
    with interrupts.installed() as current:
        try:
            try:
                with interrupts.handled():
                    return run()
            finally:
                current.is_over = True
        except UserError as error:
            print(f"{command}: {error}", file=sys.stderr)
            return REFUSED
        except HotseatError as error:
            print("\n".join([f"{command}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
            return FAILED
        except KeyboardInterrupt as interrupt:
            print(last_words(command, interrupt), file=sys.stderr)
            return STOPPED


def last_words(command: str, interrupt: KeyboardInterrupt) -> str:
    """Compose the last message of an interrupted command: what became of its run, or that none had begun."""
    notes = getattr(interrupt, "__notes__", None)
    describe = interrupts.current().describe
    if not notes:
        notes = ["no run had begun: start it again with the same command" if describe is None else describe()]
    return "\n".join([f"{command}: stopped", *notes])
