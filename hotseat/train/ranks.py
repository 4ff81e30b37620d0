"""The ranks of one model under training, and the small facts that they exchange."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from hotseat.errors import DeadlineError, RunError

_group_users = 0  # backends in this process that use a process group which one of them started


class Ranks:
    """The ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as this process sees them.

    Facts about the work (counts, losses, names) travel over gloo in host memory, so that agreeing on them never waits
    for a device. A process group that is there already is used; otherwise one is started, and stopped with the last
    backend that uses it. torch cannot start one twice at the same address: a process that closes its last backend and
    opens another keeps a group of its own. One rank needs none, unless `always_group` asks for a group of one.
    """

    def __init__(self, device: torch.device, timeout_s: float, *, always_group: bool = False):
        global _group_users
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self.facts: Any = None  # the process group for facts; None: the default one, which then has gloo
        # A group for checkpoints alone: a thread may write one, and its messages must not mix with the training's.
        self.saving: Any = None
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._is_user = False
        if self.size == 1 and not always_group:
            return
        if not dist.is_initialized():
            backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
            # A group of one rank needs no address to meet at.
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if self.size == 1 else {}
            dist.init_process_group(backend, timeout=self._timeout, **alone)
            self._is_user = True
        elif _group_users > 0:
            self._is_user = True
        _group_users += self._is_user
        if dist.get_world_size() != self.size:
            raise RunError(
                f"this process is in a group of {dist.get_world_size()} ranks, and WORLD_SIZE says {self.size}: start"
                " training in a process whose group is its own"
            )
        if self.size > 1 and "gloo" not in dist.get_backend_config():
            self.facts = dist.new_group(backend="gloo", timeout=self._timeout)
        if self.size > 1:
            self.saving = dist.new_group(backend="gloo", timeout=self._timeout)

    def max(self, value: int, what: str) -> int:
        """Return the largest value of any rank. what: the purpose, for an error message."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        self._wait_for(what, dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=self.facts)
        return int(tensor)

    def gather(self, fact: Any, what: str) -> list[Any]:
        """Gather every rank's fact, in rank order, on every rank. what: the purpose, for an error message."""
        if self.size == 1:
            return [fact]
        facts: list[Any] = [None] * self.size
        self._wait_for(what, dist.all_gather_object, facts, fact, group=self.facts)
        return facts

    def wait(self, what: str) -> None:
        """Wait until every rank is here. what: the purpose, for an error message."""
        self.max(0, what)

    def wait_to_save(self, what: str) -> None:
        """Wait for the other ranks as `wait` does, among threads that write a checkpoint."""
        if self.size > 1:
            self._wait_for(what, dist.all_reduce, torch.tensor(0), group=self.saving)

    def close(self) -> None:
        global _group_users
        if self.saving is not None and dist.is_initialized():
            dist.destroy_process_group(self.saving)
            self.saving = None
        if not self._is_user:
            return
        self._is_user = False
        _group_users -= 1
        if _group_users == 0 and dist.is_initialized():
            dist.destroy_process_group()

    def _wait_for(self, what: str, collective: Any, *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, **kwargs)
        except RuntimeError as error:
            raise DeadlineError(
                f"rank {self.rank} of {self.size} could not {what} with the other ranks within"
                f" {self._timeout.total_seconds():.0f} s: {error}"
            ) from error
