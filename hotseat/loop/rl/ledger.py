"""The ledger: what became of every sample.

`ledger.jsonl` in the run directory has a line per group and fate: trained at a step under a version, dropped and why,
or failed and why. That includes the step in which a run stopped for its rewards, of which nothing is trained. A
checkpoint holds a copy of its own; what a run wrote after its last checkpoint is taken back when
it goes on, because it is done again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotseat.loop.rl.collect import Collected
from hotseat.loop.state.run_dir import LEDGER
from hotseat.types import SampleKey

RUN_STOPPED = "the run stopped in this step"


@dataclass(frozen=True)
class Entry:
    """What became of some samples of one group."""

    epoch: int
    prompt: int
    samples: tuple[int, ...]
    state: str  # trained, dropped or failed
    step: int  # the step they were made for
    version: int  # of the weights that sampled them: the oldest, if there were several
    reason: str = ""

    @property
    def keys(self) -> list[SampleKey]:
        return [SampleKey(self.epoch, self.prompt, sample) for sample in self.samples]


class Ledger:
    """Appended to after each step, and when a run stops in one."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / LEDGER
        self._path.touch()

    def record(self, step: int, version: int, collected: Collected, *, is_trained: bool = True) -> None:
        """Append all samples of a step whose update is done, or, not `is_trained`, in which the run stops."""
        state, why = ("trained", "") if is_trained else ("dropped", RUN_STOPPED)
        fates = [(facts, state, why) for facts in collected.groups]
        fates += [(facts, "dropped", reason) for facts, reason in collected.dropped]
        lines = []
        for facts, state, reason in fates:
            oldest = min((each for each, _ in facts.versions), default=version)
            if facts.samples:
                lines.append(Entry(facts.epoch, facts.prompt, facts.samples, state, step, oldest, reason))
            lines += [
                Entry(facts.epoch, facts.prompt, (sample,), "failed", step, oldest, why)
                for sample, why in facts.failures
            ]
        data = "".join(json.dumps(vars(line)) + "\n" for line in lines).encode()
        with self._path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def copy_to(self, directory: Path) -> None:
        """Into a checkpoint."""
        shutil.copyfile(self._path, directory / LEDGER)

    def go_back(self, directory: Path) -> None:
        """To what it was when a checkpoint was made."""
        copy = self._path.with_name(f".{LEDGER}.copy")
        shutil.copyfile(directory / LEDGER, copy)
        copy.replace(self._path)


def read_ledger(run_dir: Path) -> Iterator[Entry]:
    """Every complete line."""
    with (run_dir / LEDGER).open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                values = json.loads(line)
                yield Entry(**values | {"samples": tuple(values["samples"])})


def count_states(entries: Sequence[Entry]) -> Counter[tuple[str, str]]:
    """Samples by (state, reason)."""
    counts: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        counts[entry.state, entry.reason] += len(entry.samples)
    return counts
