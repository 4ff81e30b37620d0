r"""GSM8K with answers in \boxed{}: its rows, and the reward, of TRL's form, which Hotseat and TRL both call."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

INSTRUCTION = r"Solve it step by step, and put the final number into \boxed{}."
BOXED = re.compile(r"boxed\{[^0-9-]*(-?[0-9.,]*[0-9])")


def reward_func(completions: list[list[dict[str, str]]], label: list[str], **columns: Any) -> list[float]:
    r"""Return 1 for each answer whose last \boxed{} has the label's number, else 0."""
    return [
        float(number_in(completion[0]["content"]) == float(right))
        for completion, right in zip(completions, label, strict=True)
    ]


def number_in(answer: str) -> float | None:
    """Return the number in the last box; None without any."""
    found = BOXED.findall(answer)
    try:
        return float(found[-1].replace(",", "")) if found else None
    except ValueError:
        return None


def write_data(
    source: Path,
    folder: Path,
    *,
    seed: int | None = None,
    num_prompts: int | None = None,
    num_problems: int | None = None,
) -> None:
    """Write train.jsonl, shuffled if there is a seed, and test.jsonl: GSM8K's, or as many of their rows."""
    for name, count in (("train", num_prompts), ("test", num_problems)):
        rows = [json.loads(line) for line in (source / f"{name}.jsonl").read_text().splitlines()]
        if name == "train" and seed is not None:
            random.Random(seed).shuffle(rows)
        if len(rows) < (count or 1):
            raise SystemExit(f"{source / name}.jsonl has {len(rows)} rows, {count} are needed: take fewer steps")
        lines = [
            {
                "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
                "label": row["answer"].rpartition("####")[2].strip().replace(",", ""),
            }
            for row in rows[:count]
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
