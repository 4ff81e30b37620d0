"""Replay: a recorded run is trained again from its kept groups, without engines, rewards and agents.

Groups come from `rollouts` in the run's directory, batches from `arrivals.jsonl`. Everything else is the same loop, so
the weights are those of the recorded run to the last bit if the trainer's ranks and settings are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hotseat.errors import RunError, UserError
from hotseat.loop.rl.arrivals import recorded_batches
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.hosts import RolloutHosts
from hotseat.loop.rl.stream import Stream
from hotseat.loop.state.run_dir import ARRIVALS, ROLLOUTS
from hotseat.loop.workers.group_facts import GroupFacts, GroupKey
from hotseat.loop.workers.spool import Spool

T = TypeVar("T")


class Recording:
    """The batches of a recorded run whose groups were kept: those of its first steps, without a gap."""

    def __init__(self, run_dir: Path):
        if not (run_dir / ARRIVALS).is_file() or not (run_dir / ROLLOUTS).is_dir():
            raise UserError(
                f"{run_dir} cannot be replayed: it has no {ARRIVALS} or no {ROLLOUTS}; only runs with"
                " log.keep_rollouts keep what they learned from"
            )
        self.folder = run_dir / ROLLOUTS
        self._spool = Spool(self.folder)
        self._batches = recorded_batches(run_dir)
        self.num_steps = 0
        while self._is_kept(self._batches.get(self.num_steps + 1)):
            self.num_steps += 1
        if self.num_steps == 0:
            raise UserError(f"{run_dir} cannot be replayed: the groups of its first step are not in {self.folder}")

    def batch(self, step: int) -> Collected:
        line = self._batches[step]
        return Collected(
            tuple(self._facts((epoch, prompt)) for epoch, prompt in line["groups"]),
            line["num_generated"],
            tuple((self._facts((epoch, prompt)), reason) for epoch, prompt, reason in line["dropped"]),
            line["num_failed"],
        )

    def _is_kept(self, batch: Mapping[str, Any] | None) -> bool:
        keys = [] if batch is None else [(each[0], each[1]) for each in (*batch["groups"], *batch["dropped"])]
        return bool(keys) and all(self._spool.has(key) for key in keys)

    def _facts(self, key: GroupKey) -> GroupFacts:
        finished = self._spool.get(key)
        assert finished is not None, f"{self.folder} lacks group {key}"
        return finished.facts()


class ReplayStream(Stream):
    """Supplies the batches of a recording. Nothing is sampled or evaluated."""

    def __init__(self, recording: Recording, hosts: RolloutHosts):
        self._recording = recording
        self._hosts = hosts

    def take(self, step: int) -> Collected:
        return self._recording.batch(step)

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch, whose groups hosts read from the recording."""
        return batch, use(batch)

    def release(self, batch: Collected) -> None:
        """Let hosts drop a batch from memory; the recording keeps it."""
        self._hosts.forget([facts.key for facts in batch.groups])

    def restore(self, state: Mapping[str, Any] | None, folder: Path, step: int) -> None:
        """Refuse: a replay begins at the first step."""
        raise RunError(f"a replay cannot be resumed from {folder}: start it again")
