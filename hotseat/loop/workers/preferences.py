"""Objective of preference optimisation: losses of pairs of answers, with or without a reference.

The log-probs of a reference reach the loss as a field of micro-batches: `ScoredPair`s bring them along, and for other
pairs the worker adds them by `with_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hotseat.algorithms.supervised_loss import PreferenceLoss, answer_nll, episode_log_probs
from hotseat.config.schema.algorithm_options import DpoConfig
from hotseat.data import Pair
from hotseat.extensions import load
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.objectives import PairObjective, batch_of_pairs, cut_pairs
from hotseat.registry.preference_losses import preference_loss_entry
from hotseat.train.backend import Backend, Outputs, UpdateReport
from hotseat.types import MicroBatch, TokenLayout

# Fields of a micro-batch of pairs, [num_segments] each.
REFERENCE_SUMS = "reference_sums"  # float64: log-prob of the answer under the reference
PAIR_WEIGHTS = "pair_weights"  # weight of the answer's pair in the step's loss


@dataclass(frozen=True, eq=False)
class ScoredPair(Pair):
    """A pair whose answers the reference has scored: the sums of its log-probs over the tokens of each."""

    reference: tuple[float, float] = (0.0, 0.0)  # of the better answer, and of the other


@dataclass(frozen=True)
class Answers:
    """Log-probs summed over the answers of pairs, and their lengths. [num_pairs, 2] each, the better answer first."""

    log_probs: Tensor
    lengths: Tensor
    reference: Tensor | None = None


def with_reference(batch: MicroBatch, log_probs: Tensor) -> MicroBatch:
    """Add a reference's log-probs, [num_tokens], to a micro-batch of pairs."""
    return replace(batch, fields={**batch.fields, REFERENCE_SUMS: _sums(log_probs, _each_by_itself(batch))})


def sums_of_items(batches: Sequence[MicroBatch]) -> dict[int, tuple[float, float]]:
    """Return the sums that `with_reference` added, by the index of each pair in the list that was cut."""
    sums: dict[int, tuple[float, float]] = {}
    for batch in batches:
        for name, (chosen, rejected) in zip(
            batch.sample_ids[::2], batch.fields[REFERENCE_SUMS].view(-1, 2).tolist(), strict=True
        ):
            sums[int(name.partition(":")[0])] = (chosen, rejected)
    return sums


def _each_by_itself(batch: MicroBatch) -> TokenLayout:
    """Return the layout in which each segment is an episode: the two of a pair have one sample id."""
    count = batch.num_segments
    return TokenLayout(batch.mask, batch.offsets, torch.arange(count, device=batch.mask.device), count)


def _sums(log_probs: Tensor, layout: TokenLayout) -> Tensor:
    """Sum log-probs over each answer. In float64 the order in which a device adds does not show in the result."""
    return episode_log_probs(log_probs.double(), layout)


def _answers(log_probs: Tensor, batch: MicroBatch) -> Answers:
    layout, reference = _each_by_itself(batch), batch.fields.get(REFERENCE_SUMS)
    return Answers(
        _sums(log_probs, layout).view(-1, 2),
        layout.sampled_per_episode.view(-1, 2),
        None if reference is None else reference.view(-1, 2),
    )


def _loss_options(dpo: DpoConfig, chosen_lengths: Tensor, rejected_lengths: Tensor) -> dict[str, Any]:
    """Return the arguments of the config's loss that are no log-probs."""
    takes = preference_loss_entry(dpo.loss).options
    options: dict[str, Any] = {"beta": dpo.beta}
    if "label_smoothing" in takes:
        options["label_smoothing"] = dpo.label_smoothing
    if "gamma" in takes:
        options["gamma"] = dpo.gamma
    if "length_normalised" in takes and dpo.length_normalised:
        options |= {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    return options


@dataclass(frozen=True)
class PreferenceObjective(PairObjective):
    """Preference optimisation: every pair counts the same. See `hotseat.algorithms.supervised_loss` for the losses."""

    dpo: DpoConfig

    means: ClassVar[tuple[str, ...]] = (*PairObjective.means, "chosen_nll")
    columns: ClassVar[Mapping[str, str]] = {
        "accuracy": "right {:.1%}",
        "margin": "margin {:.3f}",
        "eval/accuracy": "(held out {:.1%})",
    }

    @property
    def needs_reference(self) -> bool:
        return preference_loss_entry(self.dpo.loss).has_reference

    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Compute the weighted sum of the losses of pairs, the better answer of each first."""
        assert outputs.log_probs is not None
        answers = _answers(outputs.log_probs, batch)
        result = self.loss_of_pairs(answers)
        sums: dict[str, Tensor | float] = {
            "num_pairs": float(len(result.loss)),
            "accuracy": (result.chosen_rewards > result.rejected_rewards).sum(),
            "chosen_reward": result.chosen_rewards.sum(),
            "rejected_reward": result.rejected_rewards.sum(),
            "chosen_nll": answer_nll(answers.log_probs[:, 0], answers.lengths[:, 0]).detach().sum(),
        }
        return (batch.fields[PAIR_WEIGHTS][::2] * result.loss).sum(), sums

    def loss_of_pairs(self, answers: Answers) -> PreferenceLoss:
        """Compute the loss of each pair, the NLL term included, and the rewards of its answers."""
        entry, reference = preference_loss_entry(self.dpo.loss), answers.reference
        log_probs, lengths = answers.log_probs.unbind(-1), answers.lengths.unbind(-1)
        inputs = [*log_probs]
        if entry.has_reference:
            assert reference is not None, "no log-probs of the reference"
            inputs += reference.unbind(-1)
        if entry.takes_lengths:
            inputs += lengths
        result: PreferenceLoss = load(entry.function)(*inputs, **_loss_options(self.dpo, *lengths))
        if not self.dpo.nll_coef or "nll_coef" not in entry.options:
            return result
        return replace(result, loss=result.loss + self.dpo.nll_coef * answer_nll(log_probs[0], lengths[0]))

    def batches(self, items: Sequence[Pair], step: Sequence[Pair], cut: BatchSettings) -> list[MicroBatch]:
        if not items:
            return []
        whole, weight = batch_of_pairs(items), 1 / len(step)
        fields = {PAIR_WEIGHTS: torch.full((whole.num_segments,), weight, dtype=torch.float64)}
        scored = [pair.reference for pair in items if isinstance(pair, ScoredPair)]
        if scored:
            assert len(scored) == len(items), "some pairs have no log-probs of the reference"
            fields[REFERENCE_SUMS] = torch.tensor(scored, dtype=torch.float64).flatten()
        return cut_pairs(replace(whole, weights=whole.mask * weight, fields=fields), cut)

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        means = super().metrics(report)
        return {**means, "margin": means["chosen_reward"] - means["rejected_reward"]}

    def measure(self, backend: Backend, batches: Sequence[MicroBatch]) -> list[list[float]]:
        """Return, for each pair: log-probs and lengths of both answers, and their log-probs under the reference."""
        measured: list[list[float]] = []
        for batch, log_probs in zip(batches, backend.log_probs(batches, 1.0), strict=True):
            answers = _answers(log_probs, batch)
            columns = [answers.log_probs, answers.lengths.double()]
            if answers.reference is not None:
                columns.append(answers.reference)
            measured += torch.cat(columns, dim=-1).tolist()
        return measured

    def evaluation(self, measured: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
        every = torch.tensor([pair for rank in measured for pair in rank], dtype=torch.float64).view(
            -1, 6 if self.needs_reference else 4
        )
        reference = every[:, 4:] if self.needs_reference else None
        result = self.loss_of_pairs(Answers(every[:, :2], every[:, 2:4], reference))
        return {
            "eval/accuracy": float((result.chosen_rewards > result.rejected_rewards).double().mean()),
            "eval/loss": float(result.loss.mean()),
            "eval/margin": float((result.chosen_rewards - result.rejected_rewards).mean()),
            "eval/chosen_reward": float(result.chosen_rewards.mean()),
            "eval/rejected_reward": float(result.rejected_rewards.mean()),
        }
