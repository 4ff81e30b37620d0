"""Ending of commands that are interrupted by Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
