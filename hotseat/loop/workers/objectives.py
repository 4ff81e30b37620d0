"""Objectives of supervised training: one per task, all optimised by the worker of `supervised`.

A reward is read where sequence classification in transformers reads it: at the last token of the sequence, which
`make_pairs` makes the end-of-sequence token. The value of a token is for what precedes it, so in a batch that is the
value of one token more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from hotseat.algorithms import PairwiseKind, StepTotals, loss_weights, pairwise_loss, step_totals
from hotseat.data import Example, Pair
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.losses import SupervisedObjective
from hotseat.train.backend import Backend, Head, Loss, Outputs, UpdateReport
from hotseat.train.packing import with_ends
from hotseat.types import MicroBatch

Item = TypeVar("Item", contravariant=True)

MARGINS = "margins"  # field of a micro-batch of pairs, [num_segments]
_LEAST_STD = 1e-8  # OpenRLHF's: rewards are divided by it


class Objective(Protocol[Item]):
    """What differs from task to task."""

    @property
    def head(self) -> Head:
        """Of the model that learns."""

    @property
    def columns(self) -> Mapping[str, str]:
        """What of the metrics is shown while it runs, and how, besides the loss."""

    @property
    def loss(self) -> Loss: ...

    def num_tokens(self, item: Item) -> int: ...

    def batches(self, items: Sequence[Item], step: Sequence[Item], cut: BatchSettings) -> list[MicroBatch]:
        """Micro-batches of some items, weighted for the whole step that they are part of."""

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        """Of an update, besides its loss."""

    def measure(self, backend: Backend, batches: Sequence[MicroBatch]) -> Any:
        """Together. Facts about this rank's held-out items."""

    def evaluation(self, measured: Sequence[Any]) -> dict[str, float]:
        """Metrics of all held-out items, from what every rank measured."""

    def model_facts(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, Any]:
        """Together. What the exported config is to say besides; `evaluate` gives the `evaluation` of the weights."""


def batch_of(sequences: Sequence[Example], sample_ids: Sequence[str]) -> MicroBatch:
    """Sequences, flat. Weights are 0: they are set for the whole step."""
    return MicroBatch.from_segments(
        [sequence.token_ids for sequence in sequences], [sequence.mask for sequence in sequences], sample_ids
    )


# --- examples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SftObjective:
    """Examples are learned token by token, and every token counts the same."""

    head: ClassVar[Head] = "policy"
    columns: ClassVar[Mapping[str, str]] = {}
    loss: Loss = field(default_factory=SupervisedObjective)

    def num_tokens(self, item: Example) -> int:
        return len(item.token_ids)

    def batches(self, items: Sequence[Example], step: Sequence[Example], cut: BatchSettings) -> list[MicroBatch]:
        if not items:
            return []
        totals = sum((step_totals(self._batch([example]).layout) for example in step), start=StepTotals(0, 0))
        batch = self._batch(items)
        return cut.cut(replace(batch, weights=loss_weights(batch.layout, "token_mean", totals=totals)))

    def _batch(self, items: Sequence[Example]) -> MicroBatch:
        return batch_of(items, [f"{index}: {example.where}" for index, example in enumerate(items)])

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        return {}

    def measure(self, backend: Backend, batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """Negative log-likelihood, and of how many tokens."""
        nll = -float(sum(values.sum() for values in backend.log_probs(batches, 1.0)))
        return nll, sum(int(batch.mask.sum()) for batch in batches)

    def evaluation(self, measured: Sequence[tuple[float, int]]) -> dict[str, float]:
        return {"eval/loss": sum(nll for nll, _ in measured) / max(1, sum(count for _, count in measured))}

    def model_facts(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, Any]:
        return {}


# --- pairs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairwiseObjective:
    """The loss of pairs of segments, the better answer first, by the values at their last tokens."""

    kind: PairwiseKind

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        assert outputs.values is not None
        chosen, rejected = at_ends(outputs.values, batch).unbind(-1)
        loss = pairwise_loss(chosen, rejected, margin=batch.fields[MARGINS][::2], kind=self.kind)
        weights = at_ends(batch.weights, batch).sum(-1)
        return (weights * loss).sum(), {
            "num_pairs": float(len(loss)),
            "accuracy": (chosen > rejected).sum(),
            "chosen_reward": chosen.detach().sum(),
            "rejected_reward": rejected.detach().sum(),
        }


@dataclass(frozen=True)
class RewardModelObjective:
    """A reward model learns to put the better answer of each pair above the other, and every pair counts the same.

    use_margin: by as much as the pair says.
    pad_token_id: what transformers is to take for filling when it scores a batch.
    """

    kind: PairwiseKind
    use_margin: bool
    pad_token_id: int

    head: ClassVar[Head] = "value"
    columns: ClassVar[Mapping[str, str]] = {"accuracy": "right {:.1%}", "eval/accuracy": "(held out {:.1%})"}

    @property
    def loss(self) -> PairwiseObjective:
        return PairwiseObjective(self.kind)

    def num_tokens(self, item: Pair) -> int:
        return len(item.chosen.token_ids) + len(item.rejected.token_ids)

    def batches(self, items: Sequence[Pair], step: Sequence[Pair], cut: BatchSettings) -> list[MicroBatch]:
        if not items:
            return []
        sequences = [sequence for pair in items for sequence in (pair.chosen, pair.rejected)]
        # Two sequences with one id are never parted.
        names = [f"{index}: {pair.chosen.where}" for index, pair in enumerate(items) for _ in range(2)]
        margins = torch.tensor([pair.margin if self.use_margin else 0.0 for pair in items]).repeat_interleave(2)
        whole = replace(batch_of(sequences, names), fields={MARGINS: margins})
        if cut.micro_batch_size is not None:
            cut = replace(cut, micro_batch_size=2 * cut.micro_batch_size)  # which counts pairs
        return [_ended(batch, 1 / len(step)) for batch in cut.cut(whole)]

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        names = ("accuracy", "chosen_reward", "rejected_reward")
        return {name: report.metrics[name] / report.metrics["num_pairs"] for name in names}

    def measure(self, backend: Backend, batches: Sequence[MicroBatch]) -> list[tuple[float, float, float]]:
        """(reward of the better answer, of the other, margin) of each pair."""
        measured = []
        for batch, values in zip(batches, backend.values(batches), strict=True):
            rewards = at_ends(values, batch)
            measured += torch.cat([rewards, batch.fields[MARGINS][::2, None]], dim=-1).tolist()
        return measured

    def evaluation(self, measured: Sequence[Sequence[tuple[float, float, float]]]) -> dict[str, float]:
        every = torch.tensor([pair for rank in measured for pair in rank], dtype=torch.float64)
        chosen, rejected, margin = every.unbind(-1)
        rewards = every[:, :2]
        return {
            "eval/accuracy": float((chosen > rejected).double().mean()),
            "eval/loss": float(pairwise_loss(chosen, rejected, margin=margin, kind=self.kind).mean()),
            "eval/margin": float((chosen - rejected).mean()),
            "eval/reward_mean": float(rewards.mean()),
            "eval/reward_std": max(_LEAST_STD, float(rewards.std())),
        }

    def model_facts(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, Any]:
        """`mean` and `std` of rewards are OpenRLHF's names; who uses the model to reward can normalise by them."""
        found = evaluate()
        return {
            "mean": found["eval/reward_mean"],
            "std": found["eval/reward_std"],
            "pad_token_id": self.pad_token_id,
        }


def at_ends(values: Tensor, batch: MicroBatch) -> Tensor:
    """[num_pairs, 2] of [num_tokens]: what stands at the last token of each segment."""
    return values[batch.offsets[1:] - 1].view(-1, 2)


def _ended(batch: MicroBatch, weight: float) -> MicroBatch:
    """Each segment with the token more at which its value is; `weight`: of each pair in the step's loss."""
    ended = with_ends(batch)
    # Answers stay under the mask, where nothing is made of their values: what precedes it can be shared by a pair.
    mask = ended.mask.clone()
    mask[~ended.mask] = batch.mask
    return replace(ended, mask=mask, weights=ended.mask * (weight / 2), fields=batch.fields)
