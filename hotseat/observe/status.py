"""The status of a run, from its directory alone: also of one that died, or that runs on another machine."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotseat.observe.journal import EVENTS, METRICS
from hotseat.observe.metric_files import read_last_line
from hotseat.observe.monitor import BEAT_EVERY_S, HEARTBEAT

State = Literal["running", "starting", "stuck", "finished", "stopped", "failed", "died", "unknown"]
# A run on another machine has died if it gave no sign of life for so long: clocks differ, and network disks are slow.
SILENT_S = 12 * BEAT_EVERY_S
IS_ALIVE: tuple[State, ...] = ("running", "starting", "stuck")


@dataclass(frozen=True)
class Status:
    """Outcome of a run, and what it last said of itself.

    heartbeat: its last sign of life; empty if it gave none. metrics: of its last step. num_events: by kind, of all its
    commands; `start` counts these.
    """

    state: State
    run_dir: Path
    heartbeat: Mapping[str, Any]
    metrics: Mapping[str, Any]
    num_events: Mapping[str, int]
    last_event: str | None

    def facts(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        return {
            **self.heartbeat,
            "run": str(self.run_dir),
            "state": self.state,
            "step": self.step,
            "metrics": dict(self.metrics),
            "events": dict(self.num_events),
            "last_event": self.last_event,
        }

    @property
    def step(self) -> int:
        """Return the last step that was recorded."""
        return max(int(self.metrics.get("step", 0)), int(self.heartbeat.get("step", 0)))


def read_status(run_dir: Path, is_owned: bool) -> Status:
    """Read the status of a run. is_owned: a process holds the lock of its directory, as seen from here."""
    beat = _read_heartbeat(run_dir / HEARTBEAT)
    events, last = _read_events(run_dir / EVENTS)
    metrics = read_last_line(run_dir / METRICS) or {}
    return Status(_state(beat, is_owned), run_dir, beat, metrics, events, last)


def _state(beat: Mapping[str, Any], is_owned: bool) -> State:
    said = beat.get("state")
    if said != "running":
        # A process that holds the directory and has not spoken yet is a new one.
        return "starting" if is_owned else said or "unknown"
    is_here = beat["host"] == socket.gethostname()
    silent_s = time.time() - beat["time"]
    if not is_owned and (is_here or silent_s > SILENT_S):
        return "died"
    # Of a run that says nothing, the time since its last sign counts, too: it may be stopped as a whole.
    if silent_s > SILENT_S or time.time() - beat["progress"] - min(0.0, silent_s) > beat["limit_s"]:
        return "stuck"
    return "running"


def _read_heartbeat(path: Path) -> dict[str, Any]:
    try:
        beat = json.loads(path.read_text(encoding="utf-8"))
        return beat if {"state", "host", "time", "progress", "limit_s"} <= beat.keys() else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _read_events(path: Path) -> tuple[dict[str, int], str | None]:
    """Count events by kind; also return the last warning, fault or restart."""
    counts: Counter[str] = Counter()
    last = None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                    counts[event["kind"]] += 1
                    if event["kind"] in ("warning", "fault", "restart"):
                        last = str(event["text"]).splitlines()[0]
                except (ValueError, LookupError, TypeError):
                    continue  # cut short by a crash
    except OSError:
        pass
    return dict(counts), last
