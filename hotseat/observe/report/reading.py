"""Readers of a run directory's files, which may be missing, growing, or cut short, and the encoding for the page."""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hotseat.config.hiding import without_secrets
from hotseat.errors import UserError
from hotseat.words import leaves

T = TypeVar("T")

MAX_CONFIG_CHARACTERS = 40_000
MAX_TEXT_CHARACTERS = 2_000


def check_is_run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is no directory: give the directory of a run, such as runs/rl-1")
    if not any((run_dir / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise UserError(f"{run_dir} holds no run: there is neither config.yaml nor metrics.jsonl in it")


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of every complete line; nothing if there is no file."""
    for _, record in json_lines_at(path):
        yield record


def json_lines_at(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the object of every complete line, with the byte at which the line begins."""
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for line in file:
            record = parsed(line) if line.endswith(b"\n") else None
            if isinstance(record, dict):
                yield offset, record
            offset += len(line)


def parsed(text: bytes) -> Any:
    """Parse JSON; None if it is none: a crash can leave half a line, which a resumed run appends to."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def finite(value: object) -> float | None:
    """Return a finite number as a float, or None for anything else. Infinite numbers are written by name."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def significant(value: float, num_digits: int = 5) -> float | int:
    """Round to significant digits: a curve shows no more, and fewer digits make a smaller page."""
    rounded = float(f"{value:.{num_digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def shortened(text: object, num_characters: int = MAX_TEXT_CHARACTERS) -> str:
    text = str(text)
    if len(text) <= num_characters:
        return text
    return f"{text[:num_characters]} ... ({len(text) - num_characters:,} more characters)"


def as_written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """Return a config's text, and its values by dotted key, for comparing runs."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        return None
    import yaml

    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        values = None
    keys = {}
    if isinstance(values, Mapping):
        values = without_secrets(values)
        keys = {key: shortened(as_written(value), 300) for key, value in leaves(values)}
        text = yaml.safe_dump(values, sort_keys=False, width=120)
    return {"text": shortened(text, MAX_CONFIG_CHARACTERS), "keys": keys}


def read_plan(run_dir: Path) -> dict[str, Any] | None:
    """Read the plan: roles and their places, memory of each phase by group of devices, and moves between phases."""
    path = run_dir / "plan.json"
    plan = parsed(path.read_bytes()) if path.is_file() else None
    if not isinstance(plan, dict):
        return None
    try:
        return {
            "label": plan["label"],
            "verdict": str(plan["verdict"]).replace("_", " "),
            "roles": [
                _picked(role, "name", "on", "tensor_parallel") | {"processes": len(role["processes"])}
                for role in plan["roles"]
            ],
            "groups": [_group(group) for group in plan["groups"]],
            "warnings": [shortened(warning) for warning in plan["warnings"]],
        }
    except (KeyError, TypeError):  # written by a version with another format
        return None


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    steps = [_picked(step, "step", "roles", "used_gib") for step in group["steps"]]
    return _picked(group, "devices", "memory_gib", "hand_overs") | {"steps": steps}


def _picked(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: record[name] for name in names}


def read_events(run_dir: Path, max_events: int) -> dict[str, Any] | None:
    """Read the events of a run, at most `max_events`: notes are left out first."""
    path = run_dir / "events.jsonl"
    if not path.is_file():
        return None
    events = [
        {
            "time": finite(record.get("time")),
            "step": record.get("step"),
            "kind": str(record.get("kind", "note")),
            "text": shortened(record.get("text", "")),
        }
        for record in json_lines(path)
    ]
    counts = Counter(event["kind"] for event in events)
    if len(events) > max_events:
        by_weight = sorted(range(len(events)), key=lambda index: (events[index]["kind"] == "note", -index))
        events = [events[index] for index in sorted(by_weight[:max_events])]
    return {"shown": events, "counts": dict(counts)}


def count_samples(run_dir: Path) -> dict[str, Any] | None:
    """Count samples by state, with the reasons of those that were not trained on."""
    path = run_dir / "ledger.jsonl"
    if not path.is_file():
        return None
    counts: Counter[tuple[str, str]] = Counter()
    for record in json_lines(path):
        samples = record.get("samples")
        if isinstance(samples, list):
            counts[str(record.get("state")), shortened(record.get("reason", ""), 200)] += len(samples)
    states: Counter[str] = Counter()
    for (state, _), count in counts.items():
        states[state] += count
    reasons = [[state, reason, count] for (state, reason), count in counts.most_common() if reason][:20]
    return {"states": dict(states), "reasons": reasons}


# --- for the page -----------------------------------------------------------------------------------------------------


def encoded(value: object) -> bytes:
    """Encode a value as JSON for a script element: without `<`, no text of a model can close the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A byte-level tokenizer can leave half a surrogate pair, which has no UTF-8.
    return text.replace("<", "\\u003c").encode("utf-8", "replace")


def largest_that_fits(make: Callable[[int], T], sizes: Sequence[int], budget: int) -> T:
    """Call `make` with the first of the descending `sizes` whose JSON has at most `budget` bytes, or with the last."""
    made: dict[int, T] = {}

    def fits(size: int) -> bool:
        made[size] = make(size)
        return len(encoded(made[size])) <= budget

    first = 0 if fits(sizes[0]) else bisect.bisect_left(sizes, True, lo=1, hi=len(sizes) - 1, key=fits)
    return made[sizes[first]] if sizes[first] in made else make(sizes[first])
