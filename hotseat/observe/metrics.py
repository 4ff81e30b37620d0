"""Metrics: one JSON object per line on disk, the copy that counts, and TensorBoard beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Value = float | int | str | None


class MetricsFile:
    """`metrics.jsonl`: appended and flushed at each step, so that a run that dies has said all it knew."""

    def __init__(self, path: Path, last_step: int | None = None):
        """`last_step`: what a file that is there says of later steps is forgotten, since they are made again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if last_step is not None and path.exists():
            kept = [record for record in read_metrics(path) if record["step"] <= last_step]
            shorter = path.with_name(f".{path.name}.shorter")
            shorter.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            shorter.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        record = {"step": step} | {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line. A last line that a crash cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


class TensorBoard:
    """The same numbers for TensorBoard."""

    def __init__(self, path: Path, last_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path), purge_step=None if last_step is None else last_step + 1)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


def _plain(value: Value) -> Value:
    """JSON has no NaN: a number that is not finite is written as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
