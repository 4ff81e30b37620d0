"""The timeline: spans of work by process and thread, as trace events that Perfetto and Chrome open."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotseat.files import opened
from hotseat.observe.metric_files import drop_cut_line


class Timeline:
    """Appends events to a file. Times are seconds of `time.time`. Threads may share it.

    Numbers of processes and threads come from their names, so that a resumed run continues the same lanes.
    """

    def __init__(self, path: Path):
        drop_cut_line(path)
        is_new = not path.exists() or path.stat().st_size == 0
        self._file = opened(path, "a")
        self._lock = threading.Lock()
        self._named: set[tuple[int, int]] = set()
        if is_new:
            self._file.write("[\n")

    def span(self, process: str, thread: str, name: str, start_s: float, end_s: float, **facts: Any) -> None:
        """Record a span of time. `kind` among the facts becomes the event's category."""
        self._event(process, thread, name, "X", start_s, {"dur": round(1e6 * max(0.0, end_s - start_s))}, facts)

    def instant(self, process: str, thread: str, name: str, **facts: Any) -> None:
        self._event(process, thread, name, "i", time.time(), {"s": "g"}, facts)

    def flush(self) -> None:
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _event(
        self, process: str, thread: str, name: str, kind: str, at_s: float, more: dict[str, Any], facts: dict[str, Any]
    ) -> None:
        place = _number(process), _number(thread)
        event = {"ph": kind, "name": name, "pid": place[0], "tid": place[1], "ts": round(1e6 * at_s), **more}
        category = facts.pop("kind", None)
        if category:
            event["cat"] = category
        if facts:
            event["args"] = facts
        with self._lock:
            if self._file.closed:
                return
            if place not in self._named:
                self._named.add(place)
                for what, named in (("process_name", process), ("thread_name", thread)):
                    naming = {"ph": "M", "name": what, "pid": place[0], "tid": place[1], "args": {"name": named}}
                    self._file.write(json.dumps(naming) + ",\n")
            self._file.write(json.dumps(event) + ",\n")


def _number(name: str) -> int:
    """Number a process or thread by its name; phases and devices come first."""
    return {"phases": 1, "devices": 2}.get(name) or 10 + zlib.crc32(name.encode()) % 1_000_000


def read_timeline(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all complete events of a timeline: a crash may have cut the last one short."""
    with path.open("rb") as file:
        for line in file:
            text = line.strip().removesuffix(b",")
            if text.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    yield json.loads(text)
