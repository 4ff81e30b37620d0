"""`hotseat status`: how a run is, for people as a table and for programs as JSON and an exit code."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotseat.checks.run_directory import owner_of
from hotseat.observe.machine_use import PREFIX
from hotseat.observe.report.key_figures import duration
from hotseat.observe.report.reading import check_is_run
from hotseat.observe.status import IS_ALIVE, State, Status, read_status

# 0: nobody has to do anything. 1 and 2 are the command's own, as everywhere.
EXIT_CODES: dict[State, int] = {
    "running": 0, "starting": 0, "finished": 0, "stuck": 3, "stopped": 4, "failed": 5, "died": 6, "unknown": 7,
}  # fmt: skip
MEANINGS: dict[State, str] = {
    "running": "it makes progress",
    "starting": "a process has begun, and has not said anything yet",
    "finished": "all steps are done, and the model is exported",
    "stuck": "it runs, and has made no progress for longer than it may",
    "stopped": "by Ctrl-C or SIGTERM; `hotseat resume` continues it",
    "failed": "it ended with an error; `hotseat resume` continues it once the cause is removed",
    "died": "killed, or its machine was lost; `hotseat resume` continues it",
    "unknown": "no process of it runs here, and it has left no sign of life",
}
_SHOWN = ("reward", "loss", "eval/accuracy", "eval/reward", "eval/loss", "length", "tokens_per_s", "step_s")


def run_status(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    check_is_run(run_dir)
    status = read_status(run_dir, owner_of(run_dir) is not None)
    if arguments.json:
        print(json.dumps(status.facts(), indent=1))
    else:
        Console().print(table_of(status))
    return EXIT_CODES[status.state]


def table_of(status: Status) -> Table:
    """Make the table for people."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in rows_of(status):
        table.add_row(Text(label, style="dim"), Text(value))
    return table


def rows_of(status: Status) -> list[tuple[str, str]]:
    beat, now_s = status.heartbeat, time.time()
    rows = [("run", str(status.run_dir)), ("state", f"{status.state}: {MEANINGS[status.state]}")]
    if beat.get("error"):
        rows.append(("error", str(beat["error"]).splitlines()[0]))
    num_steps = f" of {beat['num_steps']:,}" if beat else ""
    rows.append(("step", f"{status.step:,}{num_steps}"))
    is_alive = status.state in IS_ALIVE
    if beat and status.state != "starting":
        if is_alive:
            quiet_s = max(0.0, now_s - beat["progress"])
            rows.append(("doing", f"{beat['doing']}, for {duration(max(0.0, now_s - beat['since']))}"))
            rows.append(("progress", f"{duration(quiet_s)} ago; stuck after {duration(beat['limit_s'])} without any"))
        rows.append(("process", f"{beat['pid']} on {beat['host']}, began {_date(beat['started'])}"))
        word = "sign of life" if is_alive or status.state == "died" else "ended"
        rows.append((word, f"{_date(beat['time'])}, {duration(max(0.0, now_s - beat['time']))} ago"))
    measured = [f"{name} {status.metrics[name]:.4g}" for name in _SHOWN if _is_number(status.metrics.get(name))]
    if measured:
        rows.append(("last step", ", ".join(measured)))
    if beat.get("uploads"):
        rows.append(("checkpoints", _uploads(beat["uploads"], is_alive)))
    if beat.get("machine") and is_alive:
        rows.append(("machine", ", ".join(_figure(name, value) for name, value in beat["machine"].items())))
    if is_alive and beat.get("endpoint"):
        rows.append(("metrics", f"{beat['endpoint']}/metrics"))
    counts = [f"{number} {kind}{'s' * (number != 1)}" for kind, number in status.num_events.items() if kind != "note"]
    if counts:
        rows.append(("events", ", ".join(counts)))
    if status.last_event is not None:
        rows.append(("last warning", status.last_event))
    return rows


def _uploads(facts: Mapping[str, Any], is_alive: bool) -> str:
    last, step = facts["last_step"], facts["step"]
    parts = [f"step {last:,} is at {facts['url']}" if last is not None else f"none is at {facts['url']} yet"]
    if step is not None:
        share = f" ({facts['sent'] / facts['bytes']:.0%})" if is_alive and facts["bytes"] else ""
        parts.append(f"step {step:,} {'is being uploaded' if is_alive else 'is on disk only'}{share}")
    if facts["error"]:
        parts.append(str(facts["error"]).splitlines()[0])
    return "; ".join(parts)


def _figure(name: str, value: float) -> str:
    name = name.removeprefix(PREFIX)
    return f"{name} {value:.1f} GiB" if name.endswith("memory") else f"{name} {value:.0%}"


def _date(when_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when_s))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
