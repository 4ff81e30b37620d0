"""Notes from worker processes for the user, by a file in the run's folder: on Ray, no process shares the screen."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_EVERY_S = 0.5


def note_writer(path: str | None) -> Callable[[str], None]:
    """Return a function that appends a note to a file. Without one, and where it cannot be written, stderr is used."""

    def write(note: str) -> None:
        try:
            if path is not None:
                file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, 0o600)
                try:
                    os.write(file, f"{json.dumps(note)}\n".encode())  # in one piece, since several hosts write
                finally:
                    os.close(file)
                return
        except OSError as error:
            note = f"{note} ({path}: {error.strerror})"
        print(note, file=sys.stderr, flush=True)

    return write


@contextmanager
def notes_shown(path: Path, show: Callable[[str], object]) -> Iterator[None]:
    """Show each note that is appended to a file while the context lasts, soon after it was written.

    A thread reads the file every half second, waits for nothing else, and is woken at the end to read what is left.
    """
    seen = path.stat().st_size if path.is_file() else 0
    is_over = threading.Event()

    def follow() -> None:
        nonlocal seen
        is_last = False
        while not is_last:
            is_last = is_over.wait(_LOOK_EVERY_S)
            if not path.is_file() or path.stat().st_size == seen:
                continue
            with path.open("rb") as file:
                file.seek(seen)
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            seen += len(whole)
            for line in whole.splitlines():
                show(json.loads(line))

    thread = threading.Thread(target=follow, name="notes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(10.0)
