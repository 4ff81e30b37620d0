"""The page: data of the runs, style, script and plotting library in one file."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from hotseat import __version__
from hotseat.config.hiding import without_secrets
from hotseat.errors import UserError
from hotseat.files import write_whole
from hotseat.observe.machine_use import MACHINE
from hotseat.observe.report import curves, reading
from hotseat.observe.report.key_figures import headline_metric, make_facts, read_prediction, read_total
from hotseat.observe.report.reading import as_written, encoded, json_lines, largest_that_fits, shortened
from hotseat.observe.report.samples import read_samples
from hotseat.observe.report.timeline_view import read_timeline
from hotseat.registry.tasks import DEFAULT_TASK

MAX_BYTES = 4_800_000  # of the whole file
SUMMARY_BYTES = 4_000  # of a run, for readers without scripts
MAX_RUNS = 24
MAX_CHANGES = 200  # settings that were changed when a run was resumed
EVALUATED = "answers.jsonl"  # in the folder of an evaluation: its answers
POINT_LIMITS = (1_500, 1_000, 600, 400, 200, 100, 50, 20, 8)
EVENT_LIMITS = (400, 200, 100, 50, 10)
COLUMN_LIMITS = (160, 80, 40, 20)
SCRIPTS = (
    "base", "charts", "overview", "curves", "timeline", "phases", "memory", "machine", "heatmaps", "conversation",
    "samples", "setup", "main",
)  # fmt: skip


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Write one page about all runs to `output`, and return the path. An existing report is replaced as a whole."""
    if not run_dirs:
        raise UserError("a report needs at least one run directory")
    if len(run_dirs) > MAX_RUNS:
        raise UserError(f"{len(run_dirs)} runs are too many for one page: give at most {MAX_RUNS}")
    for run_dir in run_dirs:
        reading.check_is_run(run_dir)
    page = make_page(run_dirs)
    try:
        write_whole(output, page)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return output


def make_page(run_dirs: Sequence[Path]) -> bytes:
    assets = files(__package__)
    style = (assets / "assets" / "page.css").read_bytes()
    library = (assets / "vendor" / "echarts.min.js").read_bytes()
    parts = [(assets / "assets" / f"{name}.js").read_bytes() for name in SCRIPTS]
    script = b"(() => {\n'use strict';\n" + b"\n".join(parts) + b"\n})();\n"
    template = (assets / "assets" / "page.html").read_bytes()
    taken = sum(map(len, (style, library, script, template))) + SUMMARY_BYTES * len(run_dirs)
    budget = (MAX_BYTES - taken) // len(run_dirs)
    labels = label_runs(run_dirs)
    known_by = [headline_metric(curves.read_table(run_dir)) for run_dir in run_dirs] if len(run_dirs) > 1 else []
    headlines = [name for name in known_by if name is not None]
    runs = [read_run(run_dir, label, budget, headlines) for run_dir, label in zip(run_dirs, labels, strict=True)]
    data = encoded({"version": __version__, "runs": runs})
    contents = {
        b"POLICY": content_policy(library, script),
        b"STYLE": style,
        b"DATA": data,
        b"LIBRARY": library,
        b"SCRIPT": script,
        b"SUMMARY": summary(runs),
    }
    # Split once instead of replacing one by one: text of a run may look like a placeholder.
    pieces = re.split(rb"{{([A-Z]+)}}", template)
    return b"".join(
        contents[piece] if is_name else piece for piece, is_name in zip(pieces, cycle((False, True)), strict=False)
    )


def summary(runs: Sequence[Mapping[str, Any]]) -> bytes:
    """Make a table of each run's facts, for readers whose browser runs no scripts."""
    lines = []
    for run in runs:
        lines.append(f"<table><caption>{html.escape(run['label'])}</caption>")
        for fact in run["facts"]:
            cells = "".join(f"<td>{html.escape(fact[name])}</td>" for name in ("value", "note"))
            lines.append(f'<tr><th scope="row">{html.escape(fact["label"])}</th>{cells}</tr>')
        lines.append("</table>")
    return "\n".join(lines).encode()


def content_policy(*scripts: bytes) -> bytes:
    """Return a policy by which only these scripts run and nothing is fetched. Charts may style their elements, and
    images of prompts are in the page.
    """
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'" for script in scripts)
    rules = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {hashes}; {rules}".encode()


def label_runs(run_dirs: Sequence[Path]) -> list[str]:
    """Label runs by their directories' names, with the parent's where two are alike, then with a number if needed."""
    paths = [run_dir.resolve() for run_dir in run_dirs]
    labels = [path.name for path in paths]
    for longer in ([f"{path.parent.name}/{path.name}" for path in paths], None):
        counts = Counter(labels)
        labels = [
            label if counts[label] == 1 else longer[index] if longer else f"{label} ({index + 1})"
            for index, label in enumerate(labels)
        ]
    return labels


def read_run(run_dir: Path, label: str, budget: int, headlines: Sequence[str] = ()) -> dict[str, Any]:
    """Read everything that the page shows of a run, in about `budget` bytes. Missing parts are None.

    headlines: the main metrics of the other runs on the page.
    """
    table = curves.read_table(run_dir)
    config = reading.read_config(run_dir)
    counts = reading.count_samples(run_dir)
    distributions = curves.read_distributions(run_dir)
    run: dict[str, Any] = {
        "label": label,
        "task": None if config is None else config["keys"].get("task", DEFAULT_TASK),
        "facts": make_facts(table, counts, read_total(run_dir), headlines, read_prediction(run_dir)),
        "changes": read_changes(run_dir, table),
        "headline": headline_metric(table),
        "counts": counts,
        "config": config,
        "plan": reading.read_plan(run_dir),
        "events": largest_that_fits(lambda count: reading.read_events(run_dir, count), EVENT_LIMITS, budget // 10),
        "phases": curves.make_phases(table),
        "machine": curves.make_machine(list(json_lines(run_dir / MACHINE))),
        "distributions": largest_that_fits(
            lambda columns: curves.make_heat_maps(distributions, columns), COLUMN_LIMITS, budget // 8
        ),
        "is_evaluation": (run_dir / EVALUATED).is_file(),
        "has_model": (run_dir / "model").is_dir(),
        "num_steps": len(table.steps),
    }
    left = budget - len(encoded(run))
    run["curves"] = curves.without_surplus(
        largest_that_fits(lambda points: curves.make_curves(table, points), POINT_LIMITS, left // 2), left // 2
    )
    left -= len(encoded(run["curves"]))
    run["timeline"] = read_timeline(run_dir, left * 2 // 5)
    left -= len(encoded(run["timeline"]))
    run["samples"] = read_samples(run_dir, left - 1_000)
    return run


def read_changes(run_dir: Path, table: curves.MetricTable) -> list[dict[str, Any]]:
    """List settings that were changed at a resume: key, both values, first step with the new one, seconds before it."""
    seconds = table.seconds
    changes = []
    for record in json_lines(run_dir / "changes.jsonl"):
        step = record.get("step")
        if not isinstance(step, int):
            continue
        num_before = int((table.steps < step).sum())
        changes.append(
            {
                "step": step,
                "seconds": None if seconds is None else float(seconds[num_before - 1]) if num_before else 0.0,
                "key": shortened(record.get("key", ""), 200),
                **{name: shortened(as_written(without_secrets(record.get(name))), 200) for name in ("from", "to")},
                "is_allowed": record.get("is_allowed") is True,
            }
        )
    return changes[:MAX_CHANGES]
