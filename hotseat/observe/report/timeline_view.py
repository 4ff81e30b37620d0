"""The timeline of the page: some steps of `timeline.json`, as lanes of spans."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotseat.observe.report.reading import finite, largest_that_fits, shortened
from hotseat.observe.timeline import read_timeline as read_events

PHASES, DEVICES = "phases", "devices"
SPAN_LIMITS = (12_000, 8_000, 5_000, 3_000, 1_500, 700, 300, 100)
FIRST_SHARE, SLOWEST_SHARE = 0.2, 0.2  # of the spans; the newest steps get the rest


@dataclass(frozen=True)
class Span:
    """One span of the timeline. Times are in microseconds."""

    lane: tuple[Any, Any]  # process and thread, as the file numbers them
    name: str
    start: float
    end: float
    step: int | None = None
    num_bytes: int | None = None
    is_hand_over: bool = False


@dataclass
class Trace:
    """State of reading a timeline: the names of lanes so far."""

    processes: dict[Any, str] = field(default_factory=dict)
    threads: dict[tuple[Any, Any], str] = field(default_factory=dict)

    def spans(self, path: Path) -> Iterator[Span]:
        for event in read_events(path):
            kind, lane = event.get("ph"), (event.get("pid"), event.get("tid"))
            start = finite(event.get("ts"))
            if kind == "M":
                name = str((event.get("args") or {}).get("name", ""))
                if event.get("name") == "process_name":
                    self.processes[lane[0]] = name
                elif event.get("name") == "thread_name":
                    self.threads[lane] = name
            elif kind == "X" and start is not None:
                yield _span(event, lane, start, start + (finite(event.get("dur")) or 0.0))

    def lane_name(self, lane: tuple[Any, Any]) -> tuple[str, str]:
        process = self.processes.get(lane[0], str(lane[0]))
        return process, self.threads.get(lane, process)


def _span(event: dict[str, Any], lane: tuple[Any, Any], start: float, end: float) -> Span:
    arguments = event.get("args")
    args = arguments if isinstance(arguments, dict) else {}
    num_bytes = finite(args.get("bytes"))
    return Span(
        lane,
        shortened(event.get("name", ""), 120),
        start,
        end,
        args["step"] if isinstance(args.get("step"), int) else None,
        None if num_bytes is None else int(num_bytes),
        event.get("cat") == "hand-over",
    )


def choose_windows(windows: list[Span], num_spans: list[int], max_spans: int) -> list[int]:
    """Choose the first, the slowest and the newest steps that together have at most `max_spans` spans, by index."""
    by_time = range(len(windows))
    slowest = sorted(by_time, key=lambda index: windows[index].start - windows[index].end)
    chosen: set[int] = set()
    left = max_spans
    for order, share in ((by_time, FIRST_SHARE), (slowest, SLOWEST_SHARE), (reversed(by_time), 1.0)):
        allowed = left if share == 1.0 else int(share * max_spans)
        for index in order:
            if index in chosen:
                continue
            if num_spans[index] > allowed:
                break
            chosen.add(index)
            allowed -= num_spans[index]
            left -= num_spans[index]
    return sorted(chosen or {len(windows) - 1})


class Spans:
    """Spans of a file as columns, because a long run has millions."""

    def __init__(self, path: Path):
        trace = Trace()
        starts, ends, num_bytes = array("d"), array("d"), array("d")
        lanes, names, hand_overs = array("q"), array("q"), array("b")
        self.phases: list[Span] = []
        lane_numbers: dict[tuple[Any, Any], int] = {}
        name_numbers: dict[str, int] = {}
        for span in trace.spans(path):
            starts.append(span.start)
            ends.append(span.end)
            lanes.append(lane_numbers.setdefault(span.lane, len(lane_numbers)))
            names.append(name_numbers.setdefault(span.name, len(name_numbers)))
            hand_overs.append(span.is_hand_over)
            num_bytes.append(-1 if span.num_bytes is None else span.num_bytes)
            if span.step is not None and trace.lane_name(span.lane)[0] == PHASES:
                self.phases.append(span)
        self.starts, self.ends, self.num_bytes = np.array(starts), np.array(ends), np.array(num_bytes)
        self.lanes, self.names, self.hand_overs = np.array(lanes), np.array(names), np.array(hand_overs)
        self.lane_names = [trace.lane_name(lane) for lane in lane_numbers]
        self.span_names = list(name_numbers)


def read_timeline(run_dir: Path, budget: int) -> dict[str, Any] | None:
    """Read spans of as many steps as fit into `budget` bytes. None without a timeline, or without any step in it."""
    path = run_dir / "timeline.json"
    if not path.is_file():
        return None
    spans = Spans(path)
    # Of each step, from its first phase to its last. A step that was repeated after a resume has two windows.
    windows: list[Span] = []
    for phase in sorted(spans.phases, key=lambda phase: phase.start):
        if windows and windows[-1].step == phase.step:
            windows[-1] = replace(windows[-1], end=max(windows[-1].end, phase.end))
        else:
            windows.append(phase)
    if not windows:
        return None
    return largest_that_fits(lambda limit: _cut(spans, windows, limit), SPAN_LIMITS, budget)


def _cut(spans: Spans, windows: list[Span], max_spans: int) -> dict[str, Any]:
    bounds = np.array([window.start for window in windows])
    window_of_span = np.maximum(np.searchsorted(bounds, spans.starts, side="right") - 1, 0)
    num_spans = np.bincount(window_of_span, minlength=len(windows)).tolist()
    chosen = choose_windows(windows, num_spans, max_spans)
    # Spans that lie at least partly in one of the chosen windows, which are in the order of time.
    begins, ends = np.array([(windows[index].start, windows[index].end) for index in chosen]).T
    last = np.searchsorted(begins, spans.ends, side="right") - 1
    touching = np.flatnonzero((last >= 0) & (ends[last] >= spans.starts))
    longest_first = touching[np.argsort(spans.starts[touching] - spans.ends[touching], kind="stable")]
    # A single step may have more spans than a page can hold: then the short ones are left out.
    kept = longest_first[:max_spans]
    kept = kept[np.argsort(spans.starts[kept], kind="stable")]
    origin = min(windows[chosen[0]].start, float(spans.starts[kept].min()))
    lanes = sorted(np.unique(spans.lanes[kept]).tolist(), key=lambda lane: _lane_order(*spans.lane_names[lane]))
    names = sorted(np.unique(spans.names[kept]).tolist(), key=lambda name: spans.span_names[name])
    lane_numbers = {lane: number for number, lane in enumerate(lanes)}
    name_numbers = {name: number for number, name in enumerate(names)}
    slowest = max(range(len(windows)), key=lambda index: windows[index].end - windows[index].start)
    return {
        "origin": origin / 1e6,
        "windows": [
            {
                "step": windows[index].step,
                "start": round(windows[index].start - origin),
                "end": round(windows[index].end - origin),
                "is_slowest": index == slowest,
                # Neighbours in this list need not be neighbours in the run.
                "index": index,
            }
            for index in chosen
        ],
        "num_windows": len(windows),
        "num_left_out": len(touching) - len(kept),
        "lanes": [spans.lane_names[lane] for lane in lanes],
        "names": [spans.span_names[name] for name in names],
        "spans": [
            [
                lane_numbers[int(spans.lanes[index])],
                name_numbers[int(spans.names[index])],
                round(float(spans.starts[index]) - origin),
                round(float(spans.ends[index] - spans.starts[index])),
                int(spans.hand_overs[index]),
                *([] if spans.num_bytes[index] < 0 else [int(spans.num_bytes[index])]),
            ]
            for index in kept.tolist()
        ],
    }


def _lane_order(process: str, thread: str) -> tuple[int, str, int, str]:
    """Return the sort key of a lane: phases, devices, then roles; `device 10` after `device 9`."""
    digits = "".join(filter(str.isdigit, thread))
    return {PHASES: 0, DEVICES: 1}.get(process, 2), process, int(digits or 0), thread
