"""Worker of supervised training, on examples or pairs.

Every rank has the data and knows its order, so a step needs no input from a driver: the same class runs as a group on
Ray and as one rank per process under a launcher. A method marked as collective waits for the other ranks: all of them
have to call it.
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
from hotseat.train.packing import balance
from hotseat.types import MicroBatch

# Items to evaluate on where none are held out, taken from those that are learned from.
MAX_MEASURED = 4096


class SupervisedWorker(BackendWorker):
    """Rank of a model that learns by an objective."""

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
        """Load the model. `rank` and `num_ranks` count data-parallel ranks."""
        super().__init__(model, options, trust_remote_code)
        self._objective = objective
        self._items = items
        self._held_out = held_out
        self._batch_size = batch_size
        self._cut = cut
        self._order = PromptOrder(len(items), seed, digest_of(items))
        self._rank = rank
        self._num_ranks = num_ranks
        self._evaluation: tuple[int, dict[str, float]] | None = None  # version of the weights, and its metrics

    def step(self) -> UpdateReport:
        """Make an optimizer step on the next items. Collective."""
        chosen = [self._items[index] for _, index in self._order.next(self._batch_size)]
        _, report = self._cutter.run(
            "train",
            self._cut,
            lambda cut: self._mine(chosen, cut),
            lambda pieces: self._backend.update(pieces, self._objective.loss, 1.0),
        )
        return report

    def step_and_budget(self) -> tuple[UpdateReport, dict[Use, int]]:
        """Make a `step`; return its report and the budgets that were lowered. Collective."""
        return self.step(), self.lowered()

    def use_budget(self, max_tokens: int) -> None:
        """Cut micro-batches of at most `max_tokens` tokens from now on."""
        self._cut = replace(self._cut, max_tokens=max_tokens)

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the held-out items, or of some that are learned from if none are held out. Collective."""
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
        """Write the model, or its moving average, as a Hugging Face checkpoint. Collective."""
        with self._backend.averaged() if is_averaged else nullcontext():
            facts = self._objective.model_facts(self._measure if is_averaged else self.evaluate)
            self._backend.export(Path(directory), facts=facts)

    def share(self, fact: Any, what: str) -> list[Any]:
        """Gather a small fact of every rank, in rank order. `what` for: an error says it. Collective."""
        return self._backend.gather_facts(fact, what, of_every_rank=True)

    def state(self) -> dict[str, Any]:
        """Return the position in the order of items; the same on every rank."""
        return {"order": self._order.state()}

    def resume(self, directory: str, state: Mapping[str, Any]) -> None:
        """Continue from what `save` wrote and `state` returned. Collective."""
        self._order = self._order.at(state["order"])
        self._backend.load(directory)
        self._evaluation = None

    def _mine(self, items: Sequence[Any], cut: BatchSettings) -> list[MicroBatch]:
        """Cut this rank's part of a step into micro-batches; a token budget balances the parts by tokens."""
        if cut.max_tokens is not None:
            chosen = balance([self._objective.num_tokens(item) for item in items], self._num_ranks)[self._rank]
            return self._objective.batches([items[index] for index in sorted(chosen)], items, cut)
        first = len(items) * self._rank // self._num_ranks
        last = len(items) * (self._rank + 1) // self._num_ranks
        return self._objective.batches(items[first:last], items, cut)
