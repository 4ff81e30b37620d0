"""Objectives of supervised training: one per task, all optimised by the worker of `supervised`.

A reward is read where sequence classification in transformers reads it: at the last token of the sequence, which
`make_pairs` makes the end-of-sequence token. Our value at token t is that of the tokens before t, so the reward is the
value at one more token, appended to the sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from hotseat.algorithms.aggregation import StepTotals, loss_weights, step_totals, weighted_sum
from hotseat.algorithms.supervised_loss import PairwiseKind, pairwise_loss, sft_loss
from hotseat.data import Example, Pair
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.train.backend import Backend, Head, Outputs, UpdateReport
from hotseat.train.packing import with_ends
from hotseat.types import MicroBatch

Item = TypeVar("Item")

MARGINS = "margins"  # field of a micro-batch of pairs, [num_segments]
_LEAST_STD = 1e-8  # lower bound of the deviation that rewards are divided by, as OpenRLHF's


class Objective(ABC, Generic[Item]):
    """Parts of supervised training that differ from task to task.

    head: of the model that learns. columns: formats of the metrics to print at each step besides the loss, by name.
    """

    head: ClassVar[Head] = "policy"
    columns: ClassVar[Mapping[str, str]] = {}

    @property
    def needs_reference(self) -> bool:
        """Tell whether the loss takes log-probs of a reference."""
        return False

    @abstractmethod
    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Compute the loss of a micro-batch, and metrics that add up over micro-batches."""

    @abstractmethod
    def num_tokens(self, item: Item) -> int: ...

    @abstractmethod
    def batches(self, items: Sequence[Item], step: Sequence[Item], cut: BatchSettings) -> list[MicroBatch]:
        """Return micro-batches of some items, weighted for the whole step that they are part of."""

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        """Return the metrics of an update besides its loss."""
        return {}

    @abstractmethod
    def measure(self, backend: Backend, batches: Sequence[MicroBatch]) -> Any:
        """Measure this rank's held-out items. Collective: all ranks call it."""

    @abstractmethod
    def evaluation(self, measured: Sequence[Any]) -> dict[str, float]:
        """Return metrics of all held-out items, from the results of `measure` on every rank."""

    def model_facts(self, evaluate: Callable[[], Mapping[str, float]]) -> dict[str, Any]:
        """Return entries to add to the exported config. `evaluate`: returns `evaluation` of the weights. Collective."""
        return {}


def batch_of(sequences: Sequence[Example], sample_ids: Sequence[str]) -> MicroBatch:
    """Lay sequences flat. Weights are 0: they are set for the whole step."""
    return MicroBatch.from_segments(
        [sequence.token_ids for sequence in sequences],
        [sequence.mask for sequence in sequences],
        sample_ids,
        images=[sequence.images for sequence in sequences],
    )


def batch_of_pairs(pairs: Sequence[Pair]) -> MicroBatch:
    """Lay the answers of pairs flat, the better one of each first. Both have one sample id, so they stay together."""
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    return batch_of(answers, [f"{index}: {pair.chosen.where}" for index, pair in enumerate(pairs) for _ in range(2)])


def cut_pairs(batch: MicroBatch, cut: BatchSettings) -> list[MicroBatch]:
    """Cut a batch of pairs into micro-batches; `micro_batch_size` counts pairs."""
    if cut.micro_batch_size is not None:
        cut = replace(cut, micro_batch_size=2 * cut.micro_batch_size)
    return cut.cut(batch)


# --- examples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SftObjective(Objective[Example]):
    """Supervised fine-tuning: cross-entropy of each token, and every token counts the same."""

    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        loss = sft_loss(outputs.log_probs, batch.mask)
        return weighted_sum(loss, batch.weights), {"nll": loss.detach().sum()}

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

    def measure(self, backend: Backend, batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """Return the negative log-likelihood of this rank's tokens, and their number."""
        nll = -float(sum(values.sum() for values in backend.log_probs(batches, 1.0)))
        return nll, sum(int(batch.mask.sum()) for batch in batches)

    def evaluation(self, measured: Sequence[tuple[float, int]]) -> dict[str, float]:
        return {"eval/loss": sum(nll for nll, _ in measured) / max(1, sum(count for _, count in measured))}


# --- pairs ------------------------------------------------------------------------------------------------------------


class PairObjective(Objective[Pair]):
    """Objective of pairs of answers. means: metrics that its loss adds up over pairs."""

    means: ClassVar[tuple[str, ...]] = ("accuracy", "chosen_reward", "rejected_reward")

    def num_tokens(self, item: Pair) -> int:
        return len(item.chosen.token_ids) + len(item.rejected.token_ids)

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        return {name: report.metrics[name] / report.metrics["num_pairs"] for name in self.means}


@dataclass(frozen=True)
class RewardModelObjective(PairObjective):
    """Reward modelling: the better answer of each pair is to score higher than the other; every pair counts the same.

    use_margin: the rewards of a pair are to differ by its margin.
    pad_token_id: the padding token that transformers uses when it scores a batch.
    """

    kind: PairwiseKind
    use_margin: bool
    pad_token_id: int

    head: ClassVar[Head] = "value"
    columns: ClassVar[Mapping[str, str]] = {"accuracy": "right {:.1%}", "eval/accuracy": "(held out {:.1%})"}

    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Compute the loss from the values at the last tokens of segments, the better answer of each pair first."""
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

    def batches(self, items: Sequence[Pair], step: Sequence[Pair], cut: BatchSettings) -> list[MicroBatch]:
        if not items:
            return []
        margins = torch.tensor([pair.margin if self.use_margin else 0.0 for pair in items]).repeat_interleave(2)
        whole = replace(batch_of_pairs(items), fields={MARGINS: margins})
        return [_with_reward_tokens(batch, 1 / len(step)) for batch in cut_pairs(whole, cut)]

    def measure(self, backend: Backend, batches: Sequence[MicroBatch]) -> list[tuple[float, float, float]]:
        """Return (reward of the better answer, reward of the other, margin) of each pair."""
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
        """Return mean and deviation of rewards, under OpenRLHF's names: users of the model can normalise by them."""
        metrics = evaluate()
        return {
            "mean": metrics["eval/reward_mean"],
            "std": metrics["eval/reward_std"],
            "pad_token_id": self.pad_token_id,
        }


def at_ends(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the values at the last token of each segment: [num_tokens] to [num_pairs, 2]."""
    return values[batch.offsets[1:] - 1].view(-1, 2)


def _with_reward_tokens(batch: MicroBatch, weight: float) -> MicroBatch:
    """Append to each segment the token at which its reward is read; `weight`: that of a pair in the step's loss."""
    ended = with_ends(batch)
    # Answers stay in the mask, although their values have no weight: a pair can share the prompt before it.
    mask = ended.mask.clone()
    mask[~ended.mask] = batch.mask
    return replace(ended, mask=mask, weights=ended.mask * (weight / 2), fields=batch.fields)
