"""`hotseat ledger`: the states of a run's samples, or the history of one."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotseat.errors import UserError
from hotseat.loop.rl.ledger import NEVER_SAMPLED, count_causes, read_ledger
from hotseat.loop.state.run_dir import LEDGER
from hotseat.types import SampleKey


def run_ledger(arguments: argparse.Namespace) -> int:
    show_ledger(Path(arguments.run_dir), arguments.sample)
    return 0


def show_ledger(run_dir: Path, sample: str | None, console: Console | None = None) -> None:
    console = console or Console()
    if not (run_dir / LEDGER).is_file():
        raise UserError(f"{run_dir} has no ledger: there is no {run_dir / LEDGER}")
    entries = list(read_ledger(run_dir))
    if sample is None and not entries:
        console.print("no samples: they are recorded at the end of their step, and no step has ended")
        return
    if sample is None:
        table = Table("state", "samples", "reason")
        for each in count_causes(entries):
            reason = each.reason if each.num_reasons == 1 else f"such as {each.reason}"
            table.add_row(each.state, f"{each.num_samples:,}", Text(reason))
        console.print(table)
        return
    match = re.fullmatch(r"(\d+)/(\d+)/(\d+)", sample)
    if match is None:
        raise UserError(f"--sample {sample!r}: give pass, prompt and sample, such as 0/17/3")
    key = SampleKey(int(match[1]), int(match[2]), int(match[3]))
    history = [entry for entry in entries if key in entry.keys]
    if not history:
        raise UserError(f"{run_dir} has no sample {sample}")
    for entry in history:
        reason = f": {entry.reason}" if entry.reason else ""
        by = "never sampled" if entry.version == NEVER_SAMPLED else f"sampled by version {entry.version}"
        console.print(f"{key}  {entry.state} at step {entry.step}, {by}{reason}")
