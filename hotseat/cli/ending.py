"""Ends of commands: exit codes, errors on standard error, Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from hotseat import interrupts
from hotseat.errors import HotseatError, UserError
from hotseat.interrupts import STOPPED
from hotseat.processes.kept_driver import is_kept, tell

# Exit codes: done; failed while running; refused before anything ran. `STOPPED`: by Ctrl-C or SIGTERM.
OK, FAILED, REFUSED = 0, 1, 2
_is_death = False  # what ends this command would not come again
_THREADS_S = 3.0
_LOOK_EVERY_S = 0.25
_WAITING = {("threading.py", "_shutdown"), ("thread.py", "_python_exit")}  # where Python waits for threads at its end
__all__ = ["FAILED", "OK", "REFUSED", "STOPPED", "last_words", "leave", "reported", "show"]


def reported(command: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code, with errors and interruptions reported on standard error."""
    with interrupts.installed() as current:
        try:
            try:
                with interrupts.handled():
                    code = run()
            finally:
                current.is_over = True
        except UserError as error:
            print(f"{command}: {error}", file=sys.stderr)
            code = REFUSED
        except HotseatError as error:
            print("\n".join([f"{command}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
            _tell(error)
            return FAILED
        except KeyboardInterrupt as interrupt:
            print(last_words(command, interrupt), file=sys.stderr)
            code = STOPPED
        except Exception as error:
            _tell(error)
            raise
        tell(over=code)
        return code


def _tell(error: Exception) -> None:
    """Tell the process that may start this command again why it ends."""
    from hotseat.deaths import comes_again

    global _is_death
    _is_death = not comes_again(error)
    tell(error=str(error).partition("\n")[0] or type(error).__name__, comes_again=not _is_death)


def show(text: str) -> None:
    """Print a text that may be read through a pipe."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Without this, Python would complain again at exit.
        sys.stderr.close()


def leave(code: int) -> NoReturn:
    """End this process, which is a command that is over, with an exit code.

    Python waits for threads that are not daemons, such as those of an agent or a reward, and of their executors. A
    thread that does not end by itself is waited for `_THREADS_S`. A driver that is to be started again ends at once:
    everything of the run is closed, and Ray's library waits for seconds for daemons that are gone.
    """
    if _is_death and is_kept():
        _end_now(code)
    threading.Thread(target=_end_despite_threads, args=(code,), name="ending", daemon=True).start()
    sys.exit(code)


def _end_despite_threads(code: int) -> None:
    """End the process once Python has waited long enough for other threads. A thread of its own."""
    main = threading.main_thread().ident or 0
    waited_s = 0.0
    while waited_s < _THREADS_S:
        time.sleep(_LOOK_EVERY_S)
        frame, waits = sys._current_frames().get(main), False
        while frame is not None:
            waits = waits or (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in _WAITING
            frame = frame.f_back
        waited_s = waited_s + _LOOK_EVERY_S if waits else 0.0
    ours = {threading.current_thread(), threading.main_thread()}
    names = sorted({each.name for each in threading.enumerate() if each not in ours and not each.daemon})
    which = f": {', '.join(names)}" if names else ""
    print(f"hotseat: threads of user code were still running at the end, and are left{which}", file=sys.stderr)
    _end_now(code)


def _end_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def last_words(command: str, interrupt: KeyboardInterrupt) -> str:
    """Compose the last message of an interrupted command: what became of its run, or that none had begun."""
    notes = getattr(interrupt, "__notes__", None)
    describe = interrupts.current().describe
    if not notes:
        notes = ["no run had begun: start it again with the same command" if describe is None else describe()]
    return "\n".join([f"{command}: stopped", *notes])
