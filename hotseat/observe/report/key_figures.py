"""Key figures of a run, for the tiles at the top of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hotseat.observe.report.curves import MetricTable
from hotseat.observe.report.reading import finite, json_lines
from hotseat.observe.report.timeline_view import Trace

START = "start"  # kind of the event that records the begin of a command
HEADLINES = ("eval/accuracy", "eval/reward", "eval/loss", "reward", "loss")


def read_total(run_dir: Path) -> tuple[float, int] | None:
    """Return the seconds from each command of a run to its last record, and the number of commands.

    A run that was resumed has several; the time between them is not counted. None where no command was recorded.
    """
    starts: list[float] = []
    times: list[float] = []
    for record in json_lines(run_dir / "events.jsonl"):
        time = finite(record.get("time"))
        if time is not None:
            (starts if record.get("kind") == START else times).append(time)
    if not starts:
        return None
    path = run_dir / "timeline.json"
    ends = (span.end / 1e6 for span in Trace().spans(path)) if path.is_file() else ()
    # The last record of each command is the last one before the next command began.
    last = list(starts)
    for time in chain(times, ends):
        number = sum(start <= time for start in starts) - 1
        if number >= 0:
            last[number] = max(last[number], time)
    return sum(end - start for start, end in zip(starts, last, strict=True)), len(starts)


def read_prediction(run_dir: Path) -> float | None:
    """Return the seconds of a step that a profile predicted for the run; None where none was asked."""
    records = list(json_lines(run_dir / "prediction.json"))
    return finite(records[0].get("step_s")) if records else None


def make_facts(
    table: MetricTable,
    counts: Mapping[str, Any] | None,
    total: tuple[float, int] | None = None,
    headlines: Iterable[str] = (),
    predicted_s: float | None = None,
) -> list[dict[str, str]]:
    """Return label, value and note of each tile. Figures that the run did not measure are left out.

    total: seconds from its commands to their ends, and their number. headlines: the main metrics of the other runs on
    the page, which are shown for this run, too, if it has them. predicted_s: of a step, by a profile.
    """
    step_s = table.values("step_s")[1]
    pace = f"{np.median(step_s):.3g} s each (median)" if len(step_s) else ""
    facts = [_fact("Steps", f"{int(table.steps[-1]):,}" if len(table.steps) else "0", pace)]
    if predicted_s is not None:
        note = "by a profile; not measured yet"
        if len(step_s) > 1:  # the first takes longer than others
            measured_s = float(np.mean(step_s[1:]))
            error = f"{predicted_s / measured_s - 1:+.0%}"
            note = f"by a profile; measured {measured_s:.3g} s (mean after the first), {error}"
        facts.append(_fact("Predicted step", f"{predicted_s:.3g} s", note))
    if total is not None:
        seconds, num_commands = total
        note = "from the command to the end" if num_commands == 1 else f"of {num_commands} commands, each to its end"
        facts.append(_fact("Time in all", duration(seconds), note))
    if table.seconds is not None:
        facts.append(_fact("Time in steps", duration(float(table.seconds[-1])), "without start, evaluations and end"))
    own = headline_metric(table)
    names = dict.fromkeys([*([own] if own is not None else []), *headlines])
    facts += [_headline_fact(table, name) for name in names if len(table.values(name)[0])]
    rates = table.columns.get("tokens_per_s")
    if rates is not None:
        weights = table.columns.get("step_s", np.ones(len(rates)))  # over the whole time
        known = np.isfinite(rates) & np.isfinite(weights) & (weights > 0)
        if known.any():
            speed = float(np.average(rates[known], weights=weights[known]))
            facts.append(_fact("Tokens per second", f"{speed:,.0f}", "mean over the run"))
    facts += _sample_facts(table, counts)
    if "engine_restarts" in table.columns:
        restarts = num_restarts(table.values("engine_restarts")[1])
        facts.append(_fact("Engine restarts", f"{restarts:,}", ""))
    return facts


def headline_metric(table: MetricTable) -> str | None:
    """Return the metric that best describes the run's success, if it has one."""
    others = sorted(name for name in table.columns if name.startswith("eval/"))
    return next((name for name in (*HEADLINES[:3], *others, *HEADLINES[3:]) if len(table.values(name)[0])), None)


def _headline_fact(table: MetricTable, name: str) -> dict[str, str]:
    """Describe a metric by its first, last and best value; a single value by its step."""
    steps, values = table.values(name)
    if len(values) == 1:
        return _fact(name, f"{values[0]:.4g}", f"at step {int(steps[0]):,}, measured once", is_headline=True)
    is_loss = name.endswith("loss")
    best = int(np.argmin(values) if is_loss else np.argmax(values))
    word = "lowest" if is_loss else "best"
    where = f"{word} {values[best]:.4g} at step {int(steps[best]):,}"
    if values[best] == values[-1]:
        where = f"{word} at the end" if values[0] != values[-1] else "as at the beginning"
    return _fact(name, f"{values[0]:.4g} \u2192 {values[-1]:.4g}", where, is_headline=True)


def _sample_facts(table: MetricTable, counts: Mapping[str, Any] | None) -> list[dict[str, str]]:
    if counts is not None and counts["states"]:
        states = counts["states"]
        note = f"{states.get('dropped', 0):,} dropped, {states.get('failed', 0):,} failed"
        return [_fact("Samples trained on", f"{states.get('trained', 0):,}", note)]
    if "samples" in table.columns:
        failed = f"{table.values('samples_failed')[1].sum():,.0f} failed"
        return [_fact("Samples trained on", f"{table.values('samples')[1].sum():,.0f}", failed)]
    return []


def num_restarts(counted: np.ndarray) -> int:
    """Sum up the restarts from a counter that starts again at 0 when a run is resumed."""
    previous = np.concatenate([[0.0], counted[:-1]])
    return int(np.where(counted >= previous, counted - previous, counted).sum())


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def _fact(label: str, value: str, note: str, is_headline: bool = False) -> dict[str, Any]:
    return {"label": label, "value": value, "note": note, "is_headline": is_headline}
