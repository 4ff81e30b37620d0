"""The record of arrivals: `arrivals.jsonl`, a line for everything on which the choice of batches depends.

    begun      groups that hosts sample from now on, and the version that is served then
    arrived    a finished group, and why it was dropped, if it was
    taken      the groups of a step, in the order in which they are trained, the dropped ones, those that were given
               up, and for all others the seconds that each episode took, and then the rewards
    trained    the next version is served
    restored   the run was resumed after a step: what was recorded after that step's update is void

With the same pacer these lines give the same batches; with the groups in `rollouts` they give the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotseat.files import opened
from hotseat.loop.rl.collect import Collected
from hotseat.loop.state.run_dir import ARRIVALS
from hotseat.loop.workers.group_facts import GroupFacts, GroupKey
from hotseat.observe import drop_cut_line, read_lines


class Arrivals:
    """Writer of the record. Each line is in the file before what it says takes effect."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / ARRIVALS
        drop_cut_line(self._path)

    def begun(self, version: int, keys: Sequence[GroupKey]) -> None:
        """Record groups that are sampled from the beginning."""
        self._write({"event": "begun", "version": version, "groups": keys})

    def arrived(self, groups: Sequence[tuple[GroupFacts, str | None]]) -> None:
        """Record finished groups, each with the reason for which it was dropped; None: it was kept."""
        self._write(*({"event": "arrived", "group": facts.key, "dropped": reason} for facts, reason in groups))

    def taken(self, step: int, batch: Collected) -> None:
        """Record the batch of a step."""
        dropped = [(*facts.key, reason) for facts, reason in batch.dropped]
        groups = [facts.key for facts in batch.groups]
        numbers = {"num_generated": batch.num_generated, "num_failed": batch.num_failed}
        all_facts = batch.all_groups
        seconds = [[round(s, 4) for s in (*facts.episode_s, facts.scoring_s)] for facts in all_facts]
        line = {"event": "taken", "step": step, "groups": groups, "dropped": dropped, **numbers, "seconds": seconds}
        if batch.given_up:
            line["given_up"] = [each.key for each in batch.given_up]
        turns = [facts.turn_times.every_turn for facts in all_facts]
        if num_turns := sum(turn.num_samples for turn in turns):
            line["num_turns"] = num_turns
            line["policy_s"] = round(sum(turn.policy_s for turn in turns), 4)
        self._write(line)

    def trained(self, version: int) -> None:
        """Record that a batch was trained, and the version that is served since."""
        self._write({"event": "trained", "version": version})

    def restored(self, step: int, state: Any) -> None:
        """Record that the run continues after `step` with a state of its stream."""
        self._write({"event": "restored", "step": step, "stream": state})

    def _write(self, *lines: dict[str, Any]) -> None:
        with opened(self._path, "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def recorded_batches(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the line of each step's batch, as it was taken last: steps after a checkpoint are made again."""
    batches: dict[int, dict[str, Any]] = {}
    for line in read_lines(run_dir / ARRIVALS):
        if line["event"] == "taken":
            batches[line["step"]] = line
        elif line["event"] == "restored":
            batches = {step: batch for step, batch in batches.items() if step <= line["step"]}
    return batches
