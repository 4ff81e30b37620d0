"""Settings that were changed when a run was resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotseat.config.hiding import without_secrets
from hotseat.observe.report.curves import Table
from hotseat.observe.report.reading import json_lines, shortened

MAX_CHANGES = 200


def read_changes(run_dir: Path, table: Table) -> list[dict[str, Any]]:
    """List the changes: key, both values, the first step with the new one, and the seconds in steps before that."""
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
                "from": _written(record.get("from")),
                "to": _written(record.get("to")),
                "is_allowed": record.get("is_allowed") is True,
            }
        )
    return changes[:MAX_CHANGES]


def _written(value: Any) -> str:
    """Format a value as a config writes it."""
    value = without_secrets(value)
    return shortened(value if isinstance(value, str) else json.dumps(value), 200)
