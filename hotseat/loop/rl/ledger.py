"""The ledger: what became of every sample.

`ledger.jsonl` in the run directory has a line per group and fate: trained at a step under a version, dropped and why,
or failed and why. It includes a step that was never trained because its rewards stopped the run, and the prompts that
are left over at the end of a run. A checkpoint holds its own copy: on resume, lines written after the checkpoint are
removed, because those steps are done again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotseat.files import opened
from hotseat.loop.rl.collect import Collected
from hotseat.loop.state.run_dir import LEDGER
from hotseat.loop.workers.group_facts import GroupKey
from hotseat.types import SampleKey
from hotseat.words import cause_of

RUN_STOPPED = "the run stopped in this step"
LEFT_OVER = "left over at the end: a step takes more prompts than were left"
GIVEN_UP = "given up: enough other groups of the step were complete before (rollout.oversample)"
NEVER_SAMPLED = -1  # `LedgerEntry.version` of samples that no weights have sampled


@dataclass(frozen=True)
class LedgerEntry:
    """Fate of some samples of one group: a line of the ledger."""

    epoch: int
    prompt: int
    samples: tuple[int, ...]
    state: str  # trained, dropped or failed
    step: int  # the step they were made for
    version: int  # of the weights that sampled them: the oldest, if there were several; or NEVER_SAMPLED
    reason: str = ""

    @property
    def keys(self) -> list[SampleKey]:
        return [SampleKey(self.epoch, self.prompt, sample) for sample in self.samples]


class Ledger:
    """Writer of the ledger: it appends after each step, and when a run stops in one."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / LEDGER
        self._path.touch()

    def record(self, step: int, version: int, collected: Collected, *, is_trained: bool = True) -> None:
        """Append all samples of a step. `is_trained`: its update is done; otherwise the run stops in it."""
        state, why = ("trained", "") if is_trained else ("dropped", RUN_STOPPED)
        fates = [(facts, state, why) for facts in collected.groups]
        fates += [(facts, "dropped", reason) for facts, reason in collected.dropped]
        lines = []
        for facts, state, reason in fates:
            oldest = min((each for each, _ in facts.versions), default=version)
            if facts.samples:
                lines.append(LedgerEntry(facts.epoch, facts.prompt, facts.samples, state, step, oldest, reason))
            lines += [
                LedgerEntry(facts.epoch, facts.prompt, (sample,), "failed", step, oldest, why)
                for sample, why in facts.failures
            ]
        for each in collected.given_up:
            samples = tuple(range(each.num_samples))
            lines.append(LedgerEntry(*each.key, samples, "dropped", step, version, GIVEN_UP))
        self._append(lines)

    def record_left_over(self, step: int, prompts: Iterable[GroupKey], group_size: int) -> None:
        """Append the samples of prompts for which there was no step after `step`, the last one."""
        samples = tuple(range(group_size))
        self._append([LedgerEntry(*prompt, samples, "dropped", step, NEVER_SAMPLED, LEFT_OVER) for prompt in prompts])

    def _append(self, lines: Sequence[LedgerEntry]) -> None:
        data = "".join(json.dumps(vars(line)) + "\n" for line in lines).encode()
        with opened(self._path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def copy_to(self, directory: Path) -> None:
        shutil.copyfile(self._path, directory / LEDGER)

    def restore(self, directory: Path) -> None:
        """Replace the ledger by the copy in a checkpoint."""
        copy = self._path.with_name(f".{LEDGER}.copy")
        shutil.copyfile(directory / LEDGER, copy)
        copy.replace(self._path)


def read_ledger(run_dir: Path) -> Iterator[LedgerEntry]:
    """Yield the entries of a run's ledger; a last line that a crash cut short is left out."""
    with (run_dir / LEDGER).open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                values = json.loads(line)
                yield LedgerEntry(**values | {"samples": tuple(values["samples"])})


@dataclass(frozen=True)
class CauseCount:
    """Number of samples that are in one state for one cause, whose reasons differ at most in samples and numbers."""

    state: str
    num_samples: int
    reason: str  # the first of them
    num_reasons: int  # how many different ones there are


def count_causes(entries: Iterable[LedgerEntry]) -> list[CauseCount]:
    """Count samples by state and cause, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], dict[str, None]] = {}  # in the order of the ledger
    for entry in entries:
        cause = entry.state, cause_of(entry.reason)
        counts[cause] += len(entry.samples)
        reasons.setdefault(cause, {})[entry.reason] = None
    return [
        CauseCount(cause[0], count, next(iter(reasons[cause])), len(reasons[cause]))
        for cause, count in counts.most_common()
    ]
