"""Worker of supervised training, on examples or pairs.

Every rank has the data and knows its order, so a step needs no input from a driver: the same class runs as a group on
Ray and as one rank per process under a launcher. A method marked as collective waits for the other ranks: all of them
have to call it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hotseat.data import PromptOrder, digest_of
from hotseat.loop.devices.held_memory import Held
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.loop.workers.model_workers import BackendWorker
from hotseat.loop.workers.objectives import Objective
from hotseat.loop.workers.preferences import ScoredPair, sums_of_items, with_reference
from hotseat.loop.workers.reference import (
    Reference,
    ReferenceSettings,
    load_reference,
    read_scores,
    reference_file,
    scored_pairs,
    write_scores,
)
from hotseat.model_source import ModelSource
from hotseat.planning.budgets import Use
from hotseat.train.backend import TrainOptions, UpdateReport
from hotseat.train.packing import balance
from hotseat.types import MicroBatch

Result = TypeVar("Result")

# Items to evaluate on where none are held out, taken from those that are learned from.
MAX_MEASURED = 4096
# Pairs that the reference scores in one call, which has a deadline.
SCORED_AT_ONCE = 1024


@dataclass(frozen=True)
class StepResult:
    """An optimizer step of one rank. lowered: budgets of tokens that did not fit into memory; held: at its peak."""

    report: UpdateReport
    lowered: Mapping[Use, int]
    held: Held


@dataclass(frozen=True)
class SupervisedTask:
    """Data and objective of supervised training, the same on every rank. reference: of an objective that has one."""

    objective: Objective[Any]
    items: Sequence[Any]
    held_out: Sequence[Any]
    batch_size: int
    cut: BatchSettings
    seed: int
    reference: ReferenceSettings | None = None


class SupervisedWorker(BackendWorker):
    """Rank of a model that learns by an objective. rank, num_ranks: count data-parallel ranks."""

    def __init__(
        self,
        model: ModelSource,
        options: TrainOptions,
        task: SupervisedTask,
        *,
        rank: int,
        num_ranks: int,
        folder_proof: FolderProof | None = None,
    ):
        super().__init__(model, options, folder_proof=folder_proof)
        self._task = task
        self._reference: Reference | None = None  # that scores in every step
        if task.reference is not None and task.reference.folder is None:
            self._reference = load_reference(task.reference, self._backend)
        self._preparation: Iterator[tuple[str, ...] | None] | None = None
        self._items, self._held_out = task.items, task.held_out
        self._cut = task.cut
        self._order = PromptOrder(len(task.items), task.seed, digest_of(task.items))
        self._rank, self._num_ranks = rank, num_ranks
        self._evaluation: tuple[int, dict[str, float]] | None = None  # version of the weights, and its metrics

    def step(self) -> UpdateReport:
        """Make an optimizer step on the next items. Collective."""
        chosen = [self._items[index] for _, index in self._order.next(self._task.batch_size)]
        _, report = self._cutter.run(
            "train",
            self._cut,
            lambda cut: self._mine(chosen, cut),
            lambda pieces: self._backend.update(self._compared(pieces, chosen), self._task.objective.loss, 1.0),
        )
        return report

    def prepare(self) -> tuple[str, ...] | None:
        """Have the reference score a part of the pairs that it scores beforehand. Collective.

        Returns notes for the user once it is done, and None before. These pairs are the held-out ones, which are
        measured again and again, and with a folder also those to learn from.
        """
        if self._preparation is None:
            self._preparation = self._prepare()
        return next(self._preparation)

    def _prepare(self) -> Iterator[tuple[str, ...] | None]:
        settings = self._task.reference
        assert settings is not None
        notes: list[str] = []
        todo = {"held-out pairs": self._held_out} if self._held_out else {}
        if settings.folder is not None:
            todo["pairs"] = self._items
        scores: dict[str, list[tuple[float, float]] | None] = dict.fromkeys(todo)
        for what, items in todo.items() if settings.folder is not None else ():
            scores[what] = self._on_first(partial(_read, settings, items), "read log-probs of the reference")
        missing = {what: items for what, items in todo.items() if scores[what] is None}
        num_left = sum(map(len, missing.values()))
        reference = self._reference
        if missing and reference is None:
            reference = load_reference(settings, self._backend)
        for what, items in missing.items():
            assert reference is not None
            made: list[tuple[float, float]] = []
            for first in range(0, len(items), SCORED_AT_ONCE):
                made += self._scores(reference, items[first : first + SCORED_AT_ONCE])
                if len(made) < num_left:
                    yield None
            num_left -= len(made)
            scores[what] = made
            if settings.folder is not None:
                path = self._on_first(partial(_write, settings, items, made), "write log-probs of the reference")
                notes.append(f"log-probs of the reference for {len(items):,} {what} are kept in {path}")
        for what in (what for what in todo if what not in missing):
            notes.append(f"log-probs of the reference for {len(todo[what]):,} {what} were there already")
        if reference is not None and self._reference is None:
            reference.close()
        if (held_out := scores.get("held-out pairs")) is not None:
            self._held_out = scored_pairs(self._held_out, held_out)
        if (learned := scores.get("pairs")) is not None:
            self._items = scored_pairs(self._items, learned)
        while True:
            yield tuple(notes)

    def _scores(self, reference: Reference, items: Sequence[Any]) -> list[tuple[float, float]]:
        mine: list[int] = []

        def cut_mine(cut: BatchSettings) -> list[MicroBatch]:
            mine[:] = self._my_indices(items, cut)
            return self._task.objective.batches([items[index] for index in mine], items, cut)

        def score(pieces: list[MicroBatch]) -> dict[int, tuple[float, float]]:
            scored = zip(pieces, reference.log_probs(pieces), strict=True)
            return sums_of_items([with_reference(piece, log_probs) for piece, log_probs in scored])

        _, sums = self._cutter.run("train", self._cut, cut_mine, score)
        everyone = self._backend.gather_facts(
            {mine[index]: both for index, both in sums.items()}, "gather what the reference has scored"
        )
        by_index = {index: both for part in everyone for index, both in part.items()}
        return [by_index[index] for index in range(len(items))]

    def _on_first(self, do: Callable[[], Result], what: str) -> Result:
        """Return what a call returns on the first of all ranks, which alone makes it. Collective."""
        result: Any = do() if os.environ.get("RANK", "0") == "0" else None
        return self._backend.gather_facts(result, what, of_every_rank=True)[0]

    def _compared(self, pieces: list[MicroBatch], items: Sequence[Any]) -> list[MicroBatch]:
        """Add the reference's log-probs to micro-batches of items that it has not scored before."""
        if self._reference is None or isinstance(items[0], ScoredPair):
            return pieces
        scored = zip(pieces, self._reference.log_probs(pieces), strict=True)
        return [with_reference(piece, log_probs) for piece, log_probs in scored]

    def measured_step(self) -> StepResult:
        """Make a `step`; return its report, the budgets that were lowered, and the memory it took. Collective."""
        self.held()  # forgets the peak of what came before, such as an evaluation
        return StepResult(self.step(), self.lowered(), self.held())

    def use_budget(self, max_tokens: int | None) -> None:
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
            lambda pieces: self._task.objective.measure(self._backend, self._compared(pieces, items)),
        )
        everyone = self._backend.gather_facts(measured, "add up what was measured on held-out items")
        return self._task.objective.evaluation(everyone)

    def export(self, directory: str, is_averaged: bool = False) -> None:
        """Write the model, or its moving average, as a Hugging Face checkpoint. Collective."""
        with self._backend.averaged() if is_averaged else nullcontext():
            facts = self._task.objective.model_facts(self._measure if is_averaged else self.evaluate)
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
        return self._task.objective.batches([items[index] for index in self._my_indices(items, cut)], items, cut)

    def _my_indices(self, items: Sequence[Any], cut: BatchSettings) -> list[int]:
        """Return the items of a step that are this rank's; a token budget balances the ranks' parts by tokens."""
        if cut.max_tokens is not None:
            return sorted(
                balance([self._task.objective.num_tokens(item) for item in items], self._num_ranks)[self._rank]
            )
        first = len(items) * self._rank // self._num_ranks
        last = len(items) * (self._rank + 1) // self._num_ranks
        return list(range(first, last))

    def close(self) -> None:
        if self._reference is not None:
            self._reference.close()
        super().close()


def _read(settings: ReferenceSettings, items: Sequence[Any]) -> list[tuple[float, float]] | None:
    return read_scores(reference_file(settings, items), len(items))


def _write(settings: ReferenceSettings, items: Sequence[Any], scores: Sequence[tuple[float, float]]) -> Path:
    path = reference_file(settings, items)
    write_scores(path, scores)
    return path
