"""`hotseat generate`: batch inference to JSON lines; with a reward also rejection sampling, best of n, and pairs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hotseat.config import Config
from hotseat.loop.offline.answering import answer_all, prepare
from hotseat.loop.offline.group_file import GroupFile, Row, Selection
from hotseat.observe import LiveView


@dataclass(frozen=True)
class Generated:
    """Counts of a command's output."""

    num_prompts: int
    num_samples: int
    num_lines: int
    num_failed: int


def generate(
    config: Config,
    output: Path,
    selection: Selection,
    view: LiveView,
    *,
    overwrite: bool = False,
    first_row: int = 0,
) -> Generated:
    """Answer all prompts and write the lines that `selection` keeps, in the order of the prompts."""
    prepared = prepare(config, view, first_row=first_row)
    for note in prepared.notes:
        view.say(note)
    with answer_all(prepared, output, view, needs_reward=selection.needs_reward, replace=overwrite) as file:
        num_lines = write_lines(output, (line for group in file.groups() for line in selection.of(group["rows"])))
        generated = _counted(file, num_lines)
        file.remove()
    return generated


def write_lines(output: Path, lines: Iterable[Row]) -> int:
    """Write a file of JSON lines as a whole: it has all of them, or it is as it was. Returns their number."""
    unfinished = output.with_name(f".{output.name}.unfinished")
    count = 0
    with unfinished.open("w", encoding="utf-8", errors="replace") as out:
        for line in lines:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(output)
    return count


def _counted(file: GroupFile, num_lines: int) -> Generated:
    counts = [(len(group["rows"]), len(group["failures"])) for group in file.groups()]
    return Generated(len(counts), sum(rows for rows, _ in counts), num_lines, sum(failed for _, failed in counts))
