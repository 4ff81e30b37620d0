"""Workers of models that return values instead of log-probs: the critic and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hotseat.algorithms.shaping import normalise_rewards
from hotseat.loop.workers import experience
from hotseat.loop.workers.by_sample import BySample, by_sample, in_order
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.loop.workers.losses import OLD_VALUES, RETURNS, ValueObjective
from hotseat.loop.workers.model_workers import ModelWorker
from hotseat.model_source import ModelSource
from hotseat.train.backend import TrainOptions, UpdateReport
from hotseat.train.packing import with_ends
from hotseat.types import MicroBatch


@dataclass(frozen=True)
class CriticSettings:
    """Settings by which the critic values a rollout and learns from it."""

    objective: ValueObjective
    max_epochs: int
    score: BatchSettings
    train: BatchSettings
    time_step: str = "token"


class CriticWorker(ModelWorker):
    """One rank of the critic: it computes values of a rollout, and learns from the returns that the actor computed."""

    def __init__(self, model: ModelSource, options: TrainOptions, folder_proof: FolderProof | None = None):
        super().__init__(model, options, folder_proof=folder_proof)
        self._batch: MicroBatch | None = None  # the rollout whose values were computed last
        self._starts: Tensor | None = None  # first tokens of its steps of time; None: each token is one
        self._sample_steps: dict[str, int] = {}

    def values(self, shares: Sequence[Share], settings: CriticSettings) -> BySample:
        """Return values of all tokens by sample id: of sampled ones, and after episodes that were cut off. Collective.

        They are 0 elsewhere.
        """
        groups = experience.groups_of(shares)
        batch = experience.flatten(groups)
        valued = experience.with_bootstraps(groups, batch)
        pieces, scores = self._cutter.run("rollout", settings.score, lambda cut: cut.cut(valued), self._backend.values)
        values = by_sample(pieces, scores)
        self._batch = replace(batch, fields={OLD_VALUES: in_order(batch, [values])})
        self._starts = experience.starts_of_steps(groups, batch, settings.time_step)
        self._sample_steps = experience.steps_of(shares)
        return values

    def update(self, returns: Sequence[BySample], num_steps: int, settings: CriticSettings) -> list[UpdateReport]:
        """Make every optimizer step of the rollout of the last `values`. `returns`: of all actor ranks. Collective."""
        assert self._batch is not None, "update before values"
        batch, self._batch = self._batch, None
        if self._starts is not None:
            batch = replace(batch, mask=self._starts)  # a step of time has one value, at its first token
        steps = experience.cut_into_steps(
            experience.with_fields(batch, {RETURNS: in_order(batch, returns)}), self._sample_steps, num_steps
        )
        step_totals = self._add_totals(steps)
        reports = []
        for _ in range(settings.max_epochs):
            for part, totals in zip(steps, step_totals, strict=True):
                whole = None if part is None else experience.weighted(part, "token_mean", totals)
                reports.append(self._optimizer_step(whole, settings.train, settings.objective, 1.0)[1])
        return reports


@dataclass(frozen=True)
class RewardSettings:
    """Settings by which a reward model scores."""

    score: BatchSettings
    scale: tuple[float, float] | None  # mean and deviation stored with the model; None: no normalisation


class RewardWorker(ModelWorker):
    """One rank of a reward model."""

    def rewards(self, batches: Sequence[MicroBatch], settings: RewardSettings) -> dict[str, float]:
        """Return the reward at the last token of each segment, by sample id; one segment per sample. Collective."""

        def cut(score: BatchSettings) -> list[MicroBatch]:
            return [with_ends(piece) for batch in batches for piece in score.cut(batch)]

        by_id: dict[str, float] = {}
        for piece, values in zip(*self._cutter.run("rollout", settings.score, cut, self._backend.values), strict=True):
            rewards = values[piece.offsets[1:] - 1]
            if settings.scale is not None:
                rewards = normalise_rewards(rewards, *settings.scale)
            by_id |= zip(piece.sample_ids, rewards.tolist(), strict=True)
        return by_id
