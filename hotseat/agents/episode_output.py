"""Output of the code of agents, by episode: kept in a file of the run, and bounded."""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_EPISODE_CHARS = 1 << 16
MAX_ERROR_CHARS = 1 << 13
MAX_FILE_BYTES = 1 << 26  # of the newest file, beside which the one before it is kept
MAX_ECHO_CHARS = 1 << 16  # that a process shows on its console

current_log: contextvars.ContextVar[EpisodeLog | None] = contextvars.ContextVar("episode log", default=None)


@dataclass(eq=False)
class EpisodeLog:
    """The lines of one episode. key: of its sample. output: None keeps nothing."""

    key: str
    output: EpisodeOutput | None = None
    _num_chars: int = 0
    _begun: str = ""  # a line that has no end yet
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, text: str) -> None:
        """Keep a text, up to the bound of an episode. May be called in any thread."""
        if self.output is None:
            return
        with self._lock:
            room = MAX_EPISODE_CHARS - self._num_chars
            if room <= 0:
                return
            self._num_chars += len(text)
            whole, newline, self._begun = (self._begun + text[:room]).rpartition("\n")
            if len(text) >= room:
                whole, newline = whole + newline + self._begun, "\n"
                self._begun = f"... more than {MAX_EPISODE_CHARS >> 10} Ki characters: the rest is not kept"
            if newline:
                self.output.append(self.key, whole)

    def end(self, error: str = "") -> None:
        """Write a line that has no end, and the traceback of what ended the episode, beyond the bound too."""
        last = [each for each in (self._begun, error[-MAX_ERROR_CHARS:].rstrip()) if each]
        if last and self.output is not None:
            self.output.append(self.key, "\n".join(last))


class EpisodeOutput:
    """A file of lines, each after the key of its episode. Where it cannot be written, nothing is kept."""

    def __init__(self, file: Path):
        self.file = file
        self._lock = threading.Lock()
        self._opened: Any = None
        self._num_bytes = 0

    def append(self, key: str, text: str) -> None:
        lines = "".join(f"{key}  {line}\n" for line in text.split("\n")).encode(errors="backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if self._opened is None or self._num_bytes > MAX_FILE_BYTES:
                self._open()
            self._num_bytes += len(lines)
            self._opened.write(lines)

    def _open(self) -> None:
        if self._opened is not None:
            self._opened.close()
            os.replace(self.file, f"{self.file}.1")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._opened = self.file.open("ab", buffering=0)
        self._num_bytes = self._opened.tell()

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None


class _EpisodeStream(io.TextIOBase):
    """A standard stream that sends the text of an episode to its log, and all other text where it went before.

    has_echo: it goes there too, up to a bound.
    """

    def __init__(self, stream: Any, has_echo: bool, when_full: Callable[[], object]):
        self.stream = stream
        self._num_left = MAX_ECHO_CHARS if has_echo else 0
        self._when_full = when_full

    def write(self, text: str) -> int:
        log = current_log.get()
        if log is None or log.output is None:
            self.stream.write(text)  # Ray's streams do not say how much they wrote
            return len(text)
        log.write(text)
        if self._num_left > 0:
            self._num_left -= len(text)
            self.stream.write(text[: self._num_left + len(text)])
            if self._num_left <= 0:
                self._when_full()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(ValueError):  # it may be closed by now
            self.stream.flush()

    def isatty(self) -> bool:
        return bool(self.stream.isatty())

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def captured(has_echo: bool, when_full: Callable[[], object]) -> Iterator[None]:
    """Keep what agents print in this process while the context lasts.

    has_echo: the console shows it too, up to a bound, at which `when_full` is called once for each stream.
    """
    before = tuple(each.stream if isinstance(each, _EpisodeStream) else each for each in (sys.stdout, sys.stderr))
    ours = tuple(_EpisodeStream(stream, has_echo, when_full) for stream in before)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        # What was put in front of ours meanwhile stays, and ours behind it.
        if sys.stdout is ours[0]:
            sys.stdout = before[0]
        if sys.stderr is ours[1]:
            sys.stderr = before[1]
