"""Restarts worker groups whose processes cannot be replaced one by one, and has the run go back to its last checkpoint.

The ranks of a model meet, and hold what only a checkpoint has. When one dies or hangs, all ranks of its group end and
start again at a new address, in the living driver. Then the loop resumes as a new driver would, from the newest
checkpoint: weights and optimizers, ledger, order of prompts, tickets, spool, journal and versions go back together.
Engines, with their weights and compiled graphs, hosts, rewards and all other groups stay.

Versions may go back, too: engines take whatever is pushed next, and serve it under the version of the checkpoint. No
sample of a later version is left by then: hosts have dropped all groups, and engines all requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from hotseat.cluster import WorkerGroup
from hotseat.deaths import is_loss, who_died
from hotseat.errors import ClusterError, RunError
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.rl.recovery import DYING_S
from hotseat.loop.state.checkpoints import Checkpoint
from hotseat.loop.state.saving import Saver
from hotseat.observe import Journal
from hotseat.processes.kept_driver import tell


@dataclass(eq=False)
class GroupRestarts:
    """Restarts groups as a whole, up to `max_restarts` times without a new checkpoint.

    groups: by role, those whose processes are not replaced one by one. makes_way: other roles leave the devices of a
    group before it starts. end_open_work: has hosts and engines drop all that they hold. settle: waits until no rank of
    the other groups writes a part of a checkpoint. proving: encloses a start, in which ranks prove that they see the
    folder of checkpoints. examine: records what all processes do, after a hang. restarts: how often, by role.
    """

    groups: Mapping[str, WorkerGroup[Any]]
    scheduler: DeviceScheduler
    max_restarts: int
    makes_way: bool
    end_open_work: Callable[[], object]
    settle: Callable[[Sequence[str]], object]
    proving: Callable[[], AbstractContextManager[object]]
    examine: Callable[[RunError], object] = lambda error: None
    restarts: Counter[str] = field(default_factory=Counter)
    _num_in_vain: int = field(default=0, init=False)  # since the last new checkpoint
    _saved: int | None = field(default=None, init=False)  # step of the newest checkpoint, when last restarted

    def recover(self, error: RunError, saver: Saver, journal: Journal) -> Checkpoint:
        """Restart the groups that lost a process, and return the checkpoint from which the run continues.

        Raises the error if that cannot help.
        """
        while True:
            lost = self._lost(error)
            if not lost or self.max_restarts == 0 or saver.is_stopping:
                raise error
            self.examine(error)
            journal.phase("restart")
            try:
                checkpoint = self._restart(lost, error, saver, journal)
            except ClusterError:
                raise
            except RunError as another:
                if not is_loss(another):
                    raise _given_up(lost, another) from error
                error = another
                continue
            if checkpoint is None:
                raise error
            return checkpoint

    @property
    def num_restarts(self) -> int:
        return sum(self.restarts[role] for role in self.groups)

    def _lost(self, error: RunError) -> list[str]:
        """Return the roles to restart. A death may be reported before its process is gone, and by another group."""
        if isinstance(error, ClusterError) or not is_loss(error):
            return []
        death, named = who_died(error)
        until_s = time.monotonic() + DYING_S
        while True:
            lost = [role for role, group in self.groups.items() if role == death or not all(group.alive())]
            if lost:
                return lost
            if time.monotonic() > until_s:
                return [role for role in self.groups if role in named]
            time.sleep(0.05)

    def _may_restart(self, saved: int) -> bool:
        if saved != self._saved:
            self._saved, self._num_in_vain = saved, 0
        if self._num_in_vain >= self.max_restarts:
            return False
        self._num_in_vain += 1
        tell(in_vain=self._num_in_vain)
        return True

    def _announcement(self, error: RunError, lost: Sequence[str], step: int) -> str:
        sizes = [self.groups[role].size for role in lost]
        ranks = [f"{role} ({size} ranks)" if size > 1 else role for role, size in zip(lost, sizes, strict=True)]
        return (
            f"{str(error).splitlines()[0]}; {' and '.join(ranks)} started again, the run continues after step {step}"
            f" (restart {self._num_in_vain} of {self.max_restarts} without a new checkpoint)"
        )

    def _restart(self, lost: Sequence[str], error: RunError, saver: Saver, journal: Journal) -> Checkpoint | None:
        """Restart these roles; return the checkpoint from which the run continues, None if it cannot."""
        started_s = time.monotonic()
        self.settle([role for role in self.groups if role not in lost])
        checkpoint = saver.go_back()
        if checkpoint is None or not self._may_restart(checkpoint.step):
            return None
        journal.say(self._announcement(error, lost, checkpoint.step), kind="restart")
        self.end_open_work()
        for role in lost:
            self._restart_group(role)
        journal.go_back(checkpoint.step)
        journal.say(f"{' and '.join(lost)}: ready again after {time.monotonic() - started_s:.1f} s")
        return checkpoint

    def _restart_group(self, role: str) -> None:
        group = self.groups[role]
        for rank in group.ranks if self.makes_way else ():
            self.scheduler.make_way(role, rank)
        with self.proving():
            group.restart_all()
        self.restarts[role] += 1
        for rank in group.ranks:
            self.scheduler.replaced(role, rank)


def _given_up(lost: Sequence[str], error: RunError) -> RunError:
    """Make the error of a group that does not start, perhaps since its node is gone: another driver may place it."""
    given_up = RunError(f"{' and '.join(lost)} could not be started again: {error}")
    given_up.is_death = True
    return given_up
