"""How much of the driver's machine is in use: processors, host memory, and the GPUs of the run.

Metrics, report, trackers, `/metrics` and `hotseat status` all have these figures under the names that are given here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotseat.files import opened, write_whole
from hotseat.machine import processor_seconds, used_bytes
from hotseat.observe.metric_files import drop_cut_line, read_lines

MACHINE = "machine.jsonl"
PREFIX = "machine/"
CPU, MEMORY = f"{PREFIX}cpu", f"{PREFIX}memory"  # share of the processors that worked; GiB in use
BUSY = "busy"  # of a device: share of the time in which it computed

# Of the processors' seconds and their number; of the bytes in use; of a device: share of the time, and bytes in use.
DeviceUse = Callable[[], tuple[float | None, int | None]]


@dataclass(eq=False)
class MachineUse:
    """Measures the use of a machine, since the measurement before where that is a share of time."""

    devices: Mapping[int, DeviceUse] = field(default_factory=dict)
    _before: tuple[float, float] | None = field(default=None, init=False)  # time, and seconds that processors worked

    def sample(self) -> dict[str, float]:
        """Return the figures by the names of their metrics. What is not known is left out."""
        figures: dict[str, float] = {}
        now, worked = time.monotonic(), processor_seconds()
        if worked is not None:
            seconds, number = worked
            if self._before is not None and now > self._before[0]:
                share = (seconds - self._before[1]) / (now - self._before[0]) / number
                figures[CPU] = min(1.0, max(0.0, share))
            self._before = now, seconds
        if used := used_bytes():
            figures[MEMORY] = used / 2**30
        for device, use in self.devices.items():
            busy, num_bytes = use()
            if busy is not None:
                figures[f"{PREFIX}device {device}/{BUSY}"] = busy
            if num_bytes is not None:
                figures[f"{PREFIX}device {device}/memory"] = num_bytes / 2**30
        return figures


def summary(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean share of each figure that is one, and the most memory."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    values = {name: [sample[name] for sample in samples if name in sample] for name in names}
    return {
        name: max(each) if name.rpartition("/")[2] == "memory" else sum(each) / len(each)
        for name, each in values.items()
    }


class UseHistory:
    """The use of a machine over a run, in a file of at most `max_lines`.

    When it is full, pairs of neighbours become one line and new lines are written half as often, so that it always
    covers the whole run, also one that is resumed.
    """

    def __init__(self, path: Path, every_s: float, max_lines: int = 2048):
        self._path = path
        self._max_lines = max_lines
        self._every_s = every_s
        self._samples: list[Mapping[str, float]] = []  # since the last line
        self._written_s = time.monotonic()
        self._num_lines = 0
        if path.exists():
            drop_cut_line(path)
            lines = _known(path)
            self._num_lines = len(lines)
            if lines:
                self._every_s = max(every_s, float(lines[-1]["over_s"]))

    def add(self, step: int, sample: Mapping[str, float]) -> None:
        """Take a sample, and write a line if one is due."""
        self._samples.append(sample)
        now = time.monotonic()
        # A little early: a sample that comes with the end of the interval belongs to it.
        if now - self._written_s < 0.9 * self._every_s:
            return
        line = {"time": time.time(), "step": step, "over_s": self._every_s, **_rounded(summary(self._samples))}
        self._samples, self._written_s = [], now
        if self._num_lines >= self._max_lines:
            self._halve()
        with opened(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        self._num_lines += 1

    def _halve(self) -> None:
        lines = _known(self._path)
        kept = [_joined(lines[at : at + 2]) for at in range(0, len(lines), 2)]
        write_whole(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._num_lines, self._every_s = len(kept), 2 * self._every_s


def _joined(pair: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    facts = ("time", "step")
    figures = [{name: value for name, value in line.items() if name not in (*facts, "over_s")} for line in pair]
    over_s = sum(line["over_s"] for line in pair)
    return {**{name: pair[-1][name] for name in facts}, "over_s": over_s, **_rounded(summary(figures))}


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def _known(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file; none if it is damaged, since it is only a record of the past."""
    try:
        lines = read_lines(path)
        return lines if all({"time", "step", "over_s"} <= line.keys() for line in lines) else []
    except (OSError, ValueError, AttributeError):
        return []
