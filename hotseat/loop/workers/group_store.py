"""Finished groups that a rollout host holds until the actor's ranks have fetched them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotseat.loop.workers.group_facts import EVALUATION, GroupFacts, GroupKey
from hotseat.loop.workers.spool import Finished, Spool
from hotseat.types import PromptGroup


class GroupStore:
    """Finished groups in memory, and in the spool that all hosts share if there is one."""

    def __init__(self, spool: Spool | None):
        self._spool = spool
        self._groups: dict[GroupKey, PromptGroup] = {}

    @property
    def has_spool(self) -> bool:
        return self._spool is not None

    def add(self, finished: Finished) -> GroupFacts:
        """Hold a group, in the spool first unless it is of an evaluation; return its facts."""
        if self._spool is not None and finished.epoch != EVALUATION:
            self._spool.put(finished)
        self._groups[finished.key] = finished.group
        return finished.facts()

    def spooled(self, key: GroupKey) -> Finished | None:
        """Return a group of the spool, whichever host has finished it; None if it is not there."""
        return None if self._spool is None else self._spool.get(key)

    def group(self, key: GroupKey) -> PromptGroup:
        """Return a finished group, which another process may have finished."""
        if key not in self._groups:
            finished = self.spooled(key)
            assert finished is not None, f"no group {key} was finished"
            self._groups[key] = finished.group
        return self._groups[key]

    def change_rewards(self, rewards: Mapping[GroupKey, Sequence[float]]) -> None:
        """Replace the rewards of samples, by group, in the order of its samples."""
        for key, values in rewards.items():
            group = self.group(key)
            samples = [
                replace(sample, reward=float(reward), score=float(reward))
                for sample, reward in zip(group.samples, values, strict=True)
            ]
            self._groups[key] = replace(group, samples=tuple(samples))
            if self._spool is not None and (finished := self._spool.get(key)) is not None:
                self._spool.put(replace(finished, group=self._groups[key]))

    def forget(self, keys: Sequence[GroupKey]) -> None:
        """Drop groups, in the spool too."""
        for key in keys:
            self._groups.pop(key, None)
        if self._spool is not None:
            self._spool.forget(keys)

    def clear(self) -> None:
        """Drop all groups from memory."""
        self._groups.clear()
