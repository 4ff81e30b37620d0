"""The live view: one line per step and, on a terminal, the current phase below it.

It begins with the command, before a model or a library is loaded. Without a terminal, every stage up to the end of the
first step is a dated line, and while processes start, a line now and then says what each of them does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_SHOWN_IF_ANY = ("samples_failed",)  # counts that a step's line leaves out if they are 0


class LiveView:
    """Shows phase, step, chosen metrics and the remaining time; plain lines if the console is not a terminal."""

    def __init__(
        self,
        title: str,
        num_steps: int = 0,
        columns: Mapping[str, str] | None = None,
        console: Console | None = None,
        every_s: float = 15.0,
    ):
        """Make a view. columns: maps a metric to its format, such as `{"reward": "reward {:.3f}"}`.

        every_s: seconds between two lines about processes that are waited for, where there is no terminal.
        """
        self._title = title
        self.pace = StepPace(num_steps)
        self._columns = columns or {}
        self._console = console or Console()
        self._live: Live | None = None
        self._phase = "starting"
        self._phase_started_s = time.monotonic()
        self._processes: Callable[[], list[str]] | None = None
        self._every_s = every_s
        self._advanced_s = self._phase_started_s  # time of the last line about progress
        self._reporting: threading.Event | None = None  # ends the thread that prints lines about processes

    @property
    def processes(self) -> Callable[[], list[str]] | None:
        """Return a function that returns a line about each process that is waited for; None if nobody is."""
        return self._processes

    @processes.setter
    def processes(self, processes: Callable[[], list[str]] | None) -> None:
        """Show these lines from now on: on a terminal below the status, elsewhere as one line now and then."""
        if self._reporting is not None:
            self._reporting.set()
            self._reporting = None
        self._processes = processes
        if processes is not None and not self._console.is_terminal:
            self._reporting = threading.Event()
            threading.Thread(
                target=self._report, args=(processes, self._reporting), name="start-up", daemon=True
            ).start()

    def _report(self, processes: Callable[[], list[str]], is_over: threading.Event) -> None:
        """Print what processes do every few seconds. A thread of its own; ends when it is over."""
        while not is_over.wait(self._every_s):
            lines = processes()
            if lines and not is_over.is_set():
                self.progress("; ".join(lines))

    def expect(self, num_steps: int, columns: Mapping[str, str]) -> None:
        """Set the number of steps and the columns, which are known only after config and data have been read."""
        self.pace.num_steps, self._columns = num_steps, columns

    def begin(self) -> None:
        """Start the clock for the remaining time, at the begin of the first step."""
        self.pace.begin()

    def __enter__(self) -> Self:
        if self._console.is_terminal and self._live is None:
            self._live = Live(console=self._console, get_renderable=self._status, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.processes = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        self._phase, self._phase_started_s = name, time.monotonic()

    def stage(self, text: str) -> None:
        """Show a stage of the start-up; where there is no terminal, as a dated line."""
        self.phase(text)
        if not self._console.is_terminal:
            self.progress(text)

    def progress(self, text: str) -> None:
        """Print a line about the start-up: on a terminal above the status, elsewhere with its date."""
        stamp = "" if self._console.is_terminal else time.strftime("%Y-%m-%d %H:%M:%S  ")
        self.say(f"{stamp}{text}")
        self._console.file.flush()

    def step(self, step: int, values: Mapping[str, float | None]) -> None:
        self.pace.step = step
        width = len(str(self.pace.num_steps))
        cells = [f"{self._title} {step:>{width}}/{self.pace.num_steps}"]
        for name, shown in self._columns.items():
            value = values.get(name)
            if value is not None and not (value == 0 and name in _SHOWN_IF_ANY):
                cells.append(shown.format(value))
        self.say("  ".join(cells))

    def advance(self, step: int, phase: str) -> None:
        """Show progress without a line for each step; without a terminal, print a line now and then."""
        self.pace.step, self._phase = step, phase
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._advanced_s >= self._every_s:
            self._advanced_s = now_s
            left = self.pace.left()
            self.progress(f"{self._title} {step:,}/{self.pace.num_steps:,}: {phase}{f', {left}' if left else ''}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _status(self) -> Group:
        grid = Table.grid(padding=(0, 2))
        for _ in range(4):
            grid.add_column(no_wrap=True)
        step, num_steps = self.pace.step, self.pace.num_steps
        done = round(24 * step / num_steps) if num_steps else 0
        grid.add_row(
            Text("━" * done, style="green") + Text("━" * (24 - done), style="dim"),
            f"{step}/{num_steps}" if num_steps else "starting",
            Text(f"{self._phase} {time.monotonic() - self._phase_started_s:.1f} s", style="cyan"),
            Text(self.pace.left(), style="dim"),
        )
        processes = self.processes
        return Group(grid, *(Text(f"  {line}", style="dim") for line in (processes() if processes else ())))


@dataclass
class StepPace:
    """Steps that are done, and how long the others take at the pace so far."""

    num_steps: int
    step: int = 0
    _first_step: int = 0
    _started_s: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        self._started_s, self._first_step = time.monotonic(), self.step

    def left(self) -> str:
        """Return the remaining time, such as `1:02:03 to go`; empty if it is not known yet."""
        num_done = self.step - self._first_step
        if num_done <= 0:
            return ""
        seconds = (time.monotonic() - self._started_s) / num_done * (self.num_steps - self.step)
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{rest:02} to go" if hours else f"{minutes}:{rest:02} to go"
