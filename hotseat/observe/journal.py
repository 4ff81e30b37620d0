"""The journal, which writes a run's output to the screen and to the files of its directory."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

from hotseat.closing import Closing
from hotseat.observe.live import LiveView
from hotseat.observe.metric_files import JsonLines, TensorBoard
from hotseat.observe.run_progress import QuietLimits, RunProgress
from hotseat.observe.timeline import Timeline

METRICS = "metrics.jsonl"
DISTRIBUTIONS = "distributions.jsonl"
SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
TIMELINE = "timeline.json"
PREDICTION = "prediction.json"  # seconds of a step, predicted from a profile before the first
RECORDS = (METRICS, DISTRIBUTIONS, SAMPLES, EVENTS, TIMELINE)

# Descriptions of phases, shown during the first step.
FIRST_TIME = {
    "sync": "sending the weights to the engines",
    "reference": "scoring pairs with the reference",
    "evaluate": "evaluating",
    "rollout": "sampling and scoring answers",
    "prepare": "computing log-probs and advantages",
    "update": "updating the weights",
    "save": "saving a checkpoint",
    "restart": "starting what died again",
}

AFTERWARDS = ("save", "export", "push")  # phases that follow after the metrics of their step are recorded

MAX_VALUES = 64  # distinct values of a distribution; more are binned

# start: a command began. restart: it began since the one before had died, or a group was restarted whose process had.
Kind = Literal["start", "note", "warning", "fault", "restart"]


class Sink(Protocol):
    """A further receiver of each step's metrics."""

    def write(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Journal(Closing):
    """Records a run: metrics, distributions, samples, events and the timeline.

    last_step: that of the checkpoint that a run resumes from; records of later steps are removed from the files.
    """

    def __init__(
        self,
        run_dir: Path,
        view: LiveView,
        *,
        num_steps: int,
        log_every: int = 1,
        limits: QuietLimits | None = None,
        tensorboard: Path | None = None,
        last_step: int | None = None,
        started_s: float | None = None,
        for_trackers: Callable[[int, Mapping[str, Any]], Mapping[str, Any]] = lambda step, values: values,
    ):
        """Open the files of a run directory.

        started_s: when the command began. for_trackers: returns the metrics of a step as trackers get them. limits: of
        the time without progress.
        """
        self.run_progress = RunProgress(num_steps, last_step, limits)
        self.measured: Callable[[], Mapping[str, Any]] = dict  # returns how the machine was used since the last step
        # Returns further metrics of a step, from a script that watches the run.
        self.stepped: Callable[[int, Mapping[str, Any]], Mapping[str, Any]] = lambda step, metrics: {}
        self._for_trackers = for_trackers
        self._view = view
        self._log_every = log_every
        self._phase: tuple[str, float, int] | None = None  # its name, beginning and step
        self._lock = threading.Lock()
        self._stack = ExitStack()
        with ExitStack() as stack:
            last_steps = {METRICS: last_step, DISTRIBUTIONS: last_step, SAMPLES: last_step, EVENTS: None}
            self._files = {
                name: stack.enter_context(JsonLines(run_dir / name, last)) for name, last in last_steps.items()
            }
            board = TensorBoard(tensorboard or run_dir / "tensorboard", last_step)
            stack.callback(board.close)
            self.timeline = Timeline(run_dir / TIMELINE)
            stack.callback(self.timeline.close)
            stack.enter_context(view)
            self._stack = stack.pop_all()
        self._board = board
        self._sinks: list[Sink] = [board]
        text = "started" if last_step is None else f"resumed after step {last_step}"
        when_s = time.time() if started_s is None else started_s
        self._files[EVENTS].write({"time": when_s, "step": self.run_progress.steps_made, "kind": "start", "text": text})

    def add(self, sink: Sink) -> None:
        """Add a sink, which gets the metrics of each step and is closed before the journal's own files."""
        self._sinks.append(sink)
        self._stack.callback(sink.close)

    def phase(self, name: str) -> None:
        """Begin a phase, and end the one before."""
        self.end_phase()
        self.run_progress.begin(name)
        step = self.run_progress.step
        self._phase = name, time.time(), step if name in AFTERWARDS else step + 1
        if self.run_progress.has_stepped:
            self._view.phase(name)
        else:
            if name in ("rollout", "update"):
                self._view.begin()
            self._view.stage(f"step {self._phase[2] or 1}: {FIRST_TIME.get(name, name)}")

    def stage(self, text: str, processes: Callable[[], list[str]] | None = None) -> None:
        """Show a stage of the start-up. processes: returns a line about each process that the stage waits for."""
        self.run_progress.begin(text)
        self._view.processes = processes
        self._view.stage(text)

    def progress(self, text: str) -> None:
        """Show and record a line about the start-up that is not a stage of it. Any thread may call this."""
        self._view.progress(text)
        self.record(text, "note")

    def say(self, text: str, kind: Kind = "note") -> None:
        """Print a line, and record it as an event."""
        self._view.say(text)
        self.record(text, kind)

    def record(self, text: str, kind: Kind) -> None:
        """Record an event without printing it."""
        with self._lock:  # the thread that watches the processes records events, too
            self._files[EVENTS].write(
                {"time": time.time(), "step": self.run_progress.steps_made, "kind": kind, "text": text}
            )
        self.run_progress.note(kind)
        if kind == "fault":
            self.timeline.instant("phases", "phases", text.splitlines()[0][:200])

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a finished step."""
        self._view.processes = None
        metrics = {**metrics, **(self.measured() if step > 0 else {})}
        metrics |= self.stepped(step, metrics)
        self.run_progress.end_step(step, metrics)
        self._files[METRICS].write({"step": step} | metrics)
        tracked = self._for_trackers(step, metrics)
        for sink in self._sinks:
            sink.write(step, tracked)
        self.timeline.flush()
        if metrics and (step % self._log_every == 0 or step == self.run_progress.num_steps):
            self._view.step(step, metrics)

    def go_back(self, last_step: int) -> None:
        """Remove the records of later steps: the run continues from the checkpoint of `last_step`."""
        for name in (METRICS, DISTRIBUTIONS, SAMPLES):
            self._files[name].go_back(last_step)
        self._board.go_back(last_step)
        self.run_progress.step = last_step

    def distributions(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        self._files[DISTRIBUTIONS].write(
            {"step": step} | {name: histogram(each) for name, each in values.items() if each}
        )

    def samples(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            self._files[SAMPLES].write(line)

    def close(self) -> None:
        self.end_phase()
        self._stack.close()

    def end_phase(self) -> None:
        if self._phase is not None:
            name, started_s, step = self._phase
            self.timeline.span("phases", "phases", name, started_s, time.time(), step=step)
            self._phase = None


class NullJournal(Journal):
    """A journal without files, for a rank that has nothing to record. It has no timeline."""

    def __init__(self) -> None: ...

    def phase(self, name: str) -> None: ...

    def end_phase(self) -> None: ...

    def stage(self, text: str, processes: Callable[[], list[str]] | None = None) -> None: ...

    def say(self, text: str, kind: Kind = "note") -> None: ...

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def histogram(values: Sequence[float]) -> list[list[float]]:
    """Count finite values as [value, count] pairs; more than `MAX_VALUES` distinct ones as [middle, count] of bins."""
    values = [value for value in values if math.isfinite(value)]
    counts = Counter(values)
    if len(counts) > MAX_VALUES:
        low, high = min(counts), max(counts)
        width = (high - low) / MAX_VALUES
        bins = Counter(min(MAX_VALUES - 1, int((value - low) / width)) for value in values)
        counts = Counter({low + (index + 0.5) * width: count for index, count in bins.items()})
    return [[float(f"{value:.6g}"), count] for value, count in sorted(counts.items())]
