"""Training on examples or pairs. Every rank reads the data and knows the order, so a step needs no word from a driver:
the same class runs as a group on Ray and as one rank per process under a launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotseat.data import PromptOrder, digest_of
from hotseat.loop.planning.budgets import Use
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.models import BackendWorker
from hotseat.loop.workers.objectives import Objective
from hotseat.train.backend import TrainOptions, UpdateReport
from hotseat.train.packing import spread
from hotseat.types import MicroBatch

# Of the items learned from, where none are held out, for what an exported model says of itself.
MAX_MEASURED = 4096


class SupervisedWorker(BackendWorker):
    """One rank of a model that learns by an objective."""

    def __init__(
        self,
        model: str,
        options: TrainOptions,
        objective: Objective[Any],
        items: Sequence[Any],
        held_out: Sequence[Any],
        batch_size: int,
        cut: BatchSettings,
        seed: int,
        trust_remote_code: bool = False,
        *,
        rank: int,
        num_ranks: int,
    ):
        """`rank` and `num_ranks` count those that learn from different examples."""
        super().__init__(model, options, trust_remote_code)
        self._objective = objective
        self._items = items
        self._held_out = held_out
        self._batch_size = batch_size
        self._cut = cut
        self._order = PromptOrder(len(items), seed, digest_of(items))
        self._rank = rank
        self._num_ranks = num_ranks
        self._evaluation: tuple[int, dict[str, float]] | None = None  # the last, and of which version of the weights

    def step(self) -> UpdateReport:
        """Together. One optimizer step on the next items."""
        chosen = [self._items[index] for _, index in self._order.next(self._batch_size)]
        _, report = self._cutter.run(
            "train",
            self._cut,
            lambda cut: self._mine(chosen, cut),
            lambda pieces: self._backend.update(pieces, self._objective.loss, 1.0),
        )
        return report

    def step_and_budget(self) -> tuple[UpdateReport, dict[Use, int]]:
        """Make a `step`, together with the other ranks; return its report and the budgets that were lowered."""
        return self.step(), self.lowered()

    def use_budget(self, max_tokens: int) -> None:
        """Cut micro-batches of at most so many tokens from now on, where their size was chosen."""
        self._cut = replace(self._cut, max_tokens=max_tokens)

    def evaluate(self) -> dict[str, float]:
        """Together. Metrics of the held-out items, or of some that are learned from if none are held out."""
        if self._evaluation is None or self._evaluation[0] != self._backend.version:
            self._evaluation = self._backend.version, self._measure()
        return self._evaluation[1]

    def _measure(self) -> dict[str, float]:
        items = self._held_out or self._items[:: -(-len(self._items) // MAX_MEASURED)]
        _, measured = self._cutter.run(
            "train",
            self._cut,
            lambda cut: self._mine(items, cut),
            lambda pieces: self._objective.measure(self._backend, pieces),
        )
        everyone = self._backend.gather_facts(measured, "add up what was measured on held-out items")
        return self._objective.evaluation(everyone)

    def export(self, directory: str, is_averaged: bool = False) -> None:
        """Together."""
        with self._backend.averaged() if is_averaged else nullcontext():
            facts = self._objective.model_facts(self._measure if is_averaged else self.evaluate)
            self._backend.export(Path(directory), facts=facts)

    def share(self, fact: Any, what: str) -> list[Any]:
        """Together. Every rank's small fact, in rank order; `what` for is said if a rank is missing."""
        return self._backend.gather_facts(fact, what, of_every_rank=True)

    def state(self) -> dict[str, Any]:
        """Where the order of items stands; the same on every rank."""
        return {"order": self._order.state()}

    def resume(self, directory: str, state: Mapping[str, Any]) -> None:
        """Together. From what `save` and `state` gave."""
        self._order = self._order.at(state["order"])
        self._backend.load(directory)
        self._evaluation = None

    def _mine(self, items: Sequence[Any], cut: BatchSettings) -> list[MicroBatch]:
        """This rank's part of a step, contiguous or as many tokens as the others', cut into micro-batches."""
        if cut.max_tokens is not None:
            chosen = spread([self._objective.num_tokens(item) for item in items], self._num_ranks)[self._rank]
            return self._objective.batches([items[index] for index in sorted(chosen)], items, cut)
        first = len(items) * self._rank // self._num_ranks
        last = len(items) * (self._rank + 1) // self._num_ranks
        return self._objective.batches(items[first:last], items, cut)
