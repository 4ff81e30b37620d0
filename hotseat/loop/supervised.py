"""Training on examples. Every rank reads the data and knows the order, so a step needs no word from a driver: the same
class runs as a group on Ray and as one rank per process under a launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hotseat.algorithms import StepTotals, loss_weights, step_totals
from hotseat.data import Example, PromptOrder, digest_of
from hotseat.loop.losses import SupervisedObjective
from hotseat.loop.workers import BatchSettings, device_of_process
from hotseat.train.backend import TrainOptions, UpdateReport
from hotseat.train.make import make_backend
from hotseat.train.packing import spread_over_ranks
from hotseat.types import MicroBatch


@dataclass(frozen=True)
class ExampleLoss:
    """Negative log-likelihood of held-out examples."""

    nll: float  # per token
    num_tokens: int


def batch_of(examples: Sequence[Example]) -> MicroBatch:
    """Examples, flat. Weights are set for the whole step by `weigh`."""
    lengths = torch.tensor([0, *(len(example.token_ids) for example in examples)])
    mask = torch.cat([example.mask for example in examples])
    return MicroBatch(
        token_ids=torch.cat([example.token_ids for example in examples]),
        offsets=lengths.cumsum(0),
        mask=mask,
        weights=torch.zeros(len(mask)),
        sample_ids=tuple(f"{index}: {example.where}" for index, example in enumerate(examples)),
    )


def weigh(batch: MicroBatch, totals: StepTotals) -> MicroBatch:
    """Every token counts the same, over all ranks."""
    return replace(batch, weights=loss_weights(batch.layout, "token_mean", totals=totals))


class SupervisedWorker:
    """One rank of a model that learns from examples."""

    def __init__(
        self,
        model: str,
        options: TrainOptions,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        batch_size: int,
        cut: BatchSettings,
        seed: int,
        trust_remote_code: bool = False,
        *,
        rank: int,
        num_ranks: int,
    ):
        """`rank` and `num_ranks` count those that learn from different examples."""
        self._backend = make_backend(model, options, device=device_of_process(), trust_remote_code=trust_remote_code)
        self._examples = examples
        self._held_out = held_out
        self._batch_size = batch_size
        self._cut = cut
        self._order = PromptOrder(len(examples), seed, digest_of(examples))
        self._rank = rank
        self._num_ranks = num_ranks

    def step(self) -> UpdateReport:
        """Together. One optimizer step on the next examples."""
        chosen = [self._examples[index] for _, index in self._order.next(self._batch_size)]
        totals = sum((step_totals(batch_of([example]).layout) for example in chosen), start=StepTotals(0, 0))
        return self._backend.update(self._mine(chosen, totals), SupervisedObjective(), 1.0)

    def evaluate(self) -> ExampleLoss:
        """Together. The loss on the held-out examples."""
        pieces = self._mine(list(self._held_out), StepTotals(1, 1))
        total = -float(sum(values.sum() for values in self._backend.log_probs(pieces, 1.0)))
        facts = self._backend.gather_facts(
            (total, sum(int(piece.mask.sum()) for piece in pieces)), "add up the loss on held-out examples"
        )
        num_tokens = sum(count for _, count in facts)
        return ExampleLoss(sum(nll for nll, _ in facts) / max(1, num_tokens), num_tokens)

    def export(self, directory: str) -> None:
        """Together."""
        self._backend.export(Path(directory))

    def save(self, directory: str) -> None:
        """Together."""
        self._backend.save(directory)

    def snapshot(self, directory: str) -> None:
        """Together. Copy what `save` would write; it is written while other calls are answered."""
        self._backend.snapshot(directory)

    def is_written(self) -> bool:
        """Whether this rank's share of the last snapshot is."""
        return self._backend.is_written()

    def saved_bytes(self) -> int:
        return self._backend.saved_bytes()

    def share(self, fact: Any, what: str) -> list[Any]:
        """Together. Every rank's small fact, in rank order; `what` for is said if a rank is missing."""
        return self._backend.gather_facts(fact, what, of_every_rank=True)

    def state(self) -> dict[str, Any]:
        """Where the order of examples stands; the same on every rank."""
        return {"order": self._order.state()}

    def go_on(self, directory: str, state: Mapping[str, Any]) -> None:
        """Together. From what `save` and `state` gave."""
        self._order = self._order.at(state["order"])
        self._backend.load(directory)

    def close(self) -> None:
        self._backend.close()

    def _mine(self, examples: Sequence[Example], totals: StepTotals) -> list[MicroBatch]:
        """This rank's part, contiguous or as many tokens as the others', cut into micro-batches."""
        if self._cut.max_tokens is not None and examples:
            share = spread_over_ranks(weigh(batch_of(examples), totals), self._num_ranks)[self._rank]
            return self._cut.cut(share) if share is not None else []
        first = len(examples) * self._rank // self._num_ranks
        last = len(examples) * (self._rank + 1) // self._num_ranks
        mine = examples[first:last]
        return self._cut.cut(weigh(batch_of(mine), totals)) if mine else []
