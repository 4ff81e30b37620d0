"""Metrics: one JSON object per line on disk, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotseat.closing import Closing
from hotseat.files import opened

Value = float | int | str | None

_STEP = re.compile(rb'\{"step": (\d+)[,}]')


class JsonLines(Closing):
    """Writer of one JSON object per line. Each is flushed at once, so that a run that dies loses none."""

    def __init__(self, path: Path, last_step: int | None = None):
        """Open a file to append. last_step: records of later steps are removed, since a resumed run repeats them.

        That relies on records in the order of their steps, each beginning with its step.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_cut_line(path)
        if last_step is not None:
            _drop_later(path, last_step)
        self._path = path
        self._file = opened(path, "a")

    def write(self, record: Mapping[str, Any]) -> None:
        plain = {name: _plain(value) for name, value in record.items()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def go_back(self, last_step: int) -> None:
        """Remove records of later steps."""
        _drop_later(self._path, last_step)

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all complete lines; a last line that a crash cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_last_line(path: Path) -> dict[str, Any] | None:
    """Read the last complete line; None if there is none, or the file is missing."""
    end = b""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            while size > 0 and end.count(b"\n") < 2:
                length = min(size, 1 << 16)
                size = file.seek(size - length)
                end = file.read(length) + end
        lines = end[: end.rfind(b"\n") + 1].splitlines()
        line = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return None
    return line if isinstance(line, dict) else None


class TensorBoard:
    def __init__(self, path: Path, last_step: int | None = None):
        self._path = path
        self._open(last_step)

    def _open(self, last_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._path), purge_step=None if last_step is None else last_step + 1)

    def go_back(self, last_step: int) -> None:
        """Have TensorBoard leave out what was written of later steps."""
        self._writer.close()
        self._open(last_step)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def drop_cut_line(path: Path) -> None:
    """Remove a last line that a crash cut short, so that appended text begins on a new line."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with opened(path, "rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)


def _drop_later(path: Path, last_step: int) -> None:
    """Cut the file off before the first record of a later step."""
    if not path.exists():
        return
    with opened(path, "rb+") as file:
        place = 0
        for line in file:
            step = _STEP.match(line)
            if step is None or int(step[1]) > last_step:
                break
            place += len(line)
        file.truncate(place)


def _plain(value: Any) -> Any:
    """Replace numbers that are not finite by their names, since JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
