"""Reports of a process of agents beside results: what episodes print, what blocks it, and which one ends it.

Loaded by `environment_worker.py` from its path: needs nothing but Python's own library. Messages to the rollout host:

    {"prints": 2, "text": ...}                          lines that episode 2 printed
    {"blocked": 2, "where": "FILE:LINE", "s": 0.6}      episode 2 has kept the event loop for so long since the last one
    {"exits": 2, "how": "exit code 3, by os._exit at FILE:LINE"}
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

Send = Callable[[Mapping[str, Any]], object]
LineOf = Callable[[FrameType | None], str | None]

current_episode: contextvars.ContextVar[int | None] = contextvars.ContextVar("episode", default=None)

_MAX_CHARS = 1 << 16  # of an episode; the host shows that there were more
_MAX_PIECE = 1 << 13
_BEAT_S = 0.1
_NUM_SILENT = 5  # looks in a row without a sign of life, after which the loop counts as blocked


class Prints:
    """Sends what episodes print, in lines and up to a bound. May be used in any thread."""

    def __init__(self, send: Send):
        self._send = send
        self._lock = threading.Lock()
        self._held: dict[int, str] = {}  # text that is not sent yet
        self._num_left: dict[int, int] = {}

    def begin(self, episode: int) -> None:
        with self._lock:
            self._held[episode], self._num_left[episode] = "", _MAX_CHARS + 1

    def write(self, episode: int, text: str) -> None:
        with self._lock:
            left = self._num_left.get(episode, 0)
            if left <= 0:  # more than is kept, or the episode is over
                return
            self._num_left[episode] = left - len(text)
            held = self._held[episode] + text[:left]
            whole, newline, rest = held.rpartition("\n")
            if len(rest) > _MAX_PIECE or left <= len(text):
                whole, newline, rest = held, "", ""
            self._held[episode] = rest
            if whole + newline:
                self._send({"prints": episode, "text": whole + newline})

    def end(self, episode: int) -> None:
        with self._lock:
            self._num_left.pop(episode, None)
            held = self._held.pop(episode, "")
            if held:
                self._send({"prints": episode, "text": held})

    def capture(self) -> None:
        """Have standard output and error send the text of episodes; all other text goes where it went before."""
        sys.stdout, sys.stderr = _Stream(sys.stdout, self), _Stream(sys.stderr, self)


class _Stream(io.TextIOBase):
    def __init__(self, stream: Any, prints: Prints):
        self._stream = stream
        self._prints = prints

    def write(self, text: str) -> int:
        episode = current_episode.get()
        if episode is None:
            self._stream.write(text)
            return len(text)
        self._prints.write(episode, text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(ValueError):  # it may be closed by now
            self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BlockReports(threading.Thread):
    """Looks every tenth of a second whether the event loop still runs, and reports what blocks it for half a second.

    episode_of: returns the episode of a task; None: it is not known. line_of: the user's line that a frame is in.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Send,
        episode_of: Callable[[asyncio.Task[Any] | None], int | None],
        line_of: LineOf,
    ):
        super().__init__(name="agents-watch", daemon=True)
        self._loop, self._send, self._episode_of, self._line_of = loop, send, episode_of, line_of
        self._loop_thread = threading.get_ident()
        self._beat = time.monotonic()

    def show_life(self) -> None:
        """Note that the loop runs, again and again. Called in the loop."""
        self._beat = time.monotonic()
        self._loop.call_later(_BEAT_S, self.show_life)

    def run(self) -> None:
        beat, num_silent, reported_s = self._beat, 0, 0.0
        while True:
            time.sleep(_BEAT_S)
            if self._beat != beat:
                beat, num_silent, reported_s = self._beat, 0, 0.0
                continue
            num_silent += 1
            # Looks are counted, not seconds: a machine may have kept this thread waiting just as long as the loop.
            if num_silent >= _NUM_SILENT:
                silent_s = time.monotonic() - beat - _BEAT_S
                where = self._line_of(sys._current_frames().get(self._loop_thread))
                episode = self._episode_of(asyncio.current_task(self._loop))
                self._send({"blocked": episode, "where": where, "s": silent_s - reported_s})
                reported_s = silent_s


def note_exits(current: Callable[[], Any], report: Callable[[Any, str], object], line_of: LineOf) -> None:
    """Have `os._exit`, which nothing else can see, report first: what is current, the exit code, the user's line."""
    end, pid = os._exit, os.getpid()

    def noted(status: int) -> None:
        episode = current()
        if os.getpid() == pid and episode is not None:  # not in a fork, which ends so
            with contextlib.suppress(Exception):
                where = line_of(sys._getframe(1))
                report(episode, f"exit code {status}{'' if where is None else f', by os._exit at {where}'}")
        end(status)

    os._exit = noted  # type: ignore[assignment]
