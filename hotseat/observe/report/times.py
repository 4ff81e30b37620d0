"""Total time of a run, from each of its commands to its end."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from hotseat.observe.report.reading import finite, json_lines
from hotseat.observe.report.timeline_view import Trace

START = "start"  # kind of the event that records the begin of a command


def read_total(run_dir: Path) -> tuple[float, int] | None:
    """Return the seconds from each command of a run to its last record, and the number of commands.

    A run that was resumed has several; the time between them is not counted. None where no command was recorded.
    """
    starts: list[float] = []
    times: list[float] = []
    for record in json_lines(run_dir / "events.jsonl"):
        time = finite(record.get("time"))
        if time is not None:
            (starts if record.get("kind") == START else times).append(time)
    if not starts:
        return None
    path = run_dir / "timeline.json"
    ends = (span.end / 1e6 for span in Trace().spans(path)) if path.is_file() else ()
    # The last record of each command is the last one before the next command began.
    last = list(starts)
    for time in chain(times, ends):
        number = sum(start <= time for start in starts) - 1
        if number >= 0:
            last[number] = max(last[number], time)
    return sum(end - start for start, end in zip(starts, last, strict=True)), len(starts)


def read_prediction(run_dir: Path) -> float | None:
    """Return the seconds of a step that a profile predicted for the run; None where none was asked."""
    records = list(json_lines(run_dir / "prediction.json"))
    return finite(records[0].get("step_s")) if records else None
