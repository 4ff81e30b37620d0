"""What is written of the answers to each prompt. Needs neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotseat.errors import UserError
from hotseat.loop.offline.group_file import partial_path

Keep = Literal["all", "best", "pairs"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Selection:
    """Which samples of a prompt are written.

    keep: all; `best`, the one with the highest reward; or `pairs`, the best and the worst as chosen and rejected, if
    their rewards differ. min_reward: samples, or chosen ones, with less are left out.
    """

    keep: Keep = "all"
    min_reward: float | None = None

    @property
    def needs_reward(self) -> bool:
        return self.keep != "all" or self.min_reward is not None

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return the lines for the samples of one prompt. Of equal rewards the first counts."""
        good = [row for row in rows if self.min_reward is None or row["reward"] >= self.min_reward]
        if self.keep == "all" or not good:
            return good
        best = max(good, key=_reward)
        if self.keep == "best":
            return [best]
        worst = min(rows, key=_reward)
        if worst["reward"] == best["reward"]:
            return []
        pair = {"prompt": best["input"], "chosen": best["output"], "rejected": worst["output"]}
        return [pair | {"chosen_reward": best["reward"], "rejected_reward": worst["reward"]}]


def check_output(output: Path, overwrite: bool) -> None:
    """Raise if the output exists and was not to be replaced. An unfinished one is resumed."""
    if output.is_dir():
        raise UserError(f"--output {output} is a folder: give the name of a file, such as {output}/answers.jsonl")
    if output.exists() and not overwrite and not partial_path(output).exists():
        raise UserError(f"{output} exists: choose another --output, or replace it with --overwrite")


def _reward(row: Row) -> float:
    return float(row["reward"])
