"""A teacher behind a rollout engine instead of a training backend: it says which tokens it finds likely."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hotseat.algorithms.distillation import Divergence, classes_of_top
from hotseat.cluster.activity import activity
from hotseat.loop.devices.held_memory import DeviceWorker
from hotseat.loop.workers import experience
from hotseat.loop.workers.by_sample import BySample, TeacherScores, by_sample
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.engine_worker import make_engine
from hotseat.loop.workers.experience import Share
from hotseat.planning.budgets import Use
from hotseat.rollout.kinds import EngineSettings
from hotseat.types import MicroBatch, Moved

if TYPE_CHECKING:
    from hotseat.rollout.vllm_engine import VllmEngine


class TeacherEngineWorker(DeviceWorker):
    """One rank of the role reference, with the calls of `ModelWorker` that a run makes to it.

    The engine cuts what it gets by itself, so token budgets do not concern it. Its weights never change.
    """

    def __init__(self, settings: EngineSettings):
        with activity.doing(f"loading {settings.entry.title}"):
            made = make_engine(settings, int(os.environ.get("RANK", "0")), activity.becomes)
        self._engine = cast("VllmEngine", made)  # `EngineEntry.teaches`
        self._vocab_size = settings.model.config().get_text_config().vocab_size

    def score(self, shares: Sequence[Share], cut: BatchSettings, temperature: float) -> BySample:
        """Return log-probs of each segment of each sample, by sample id."""
        batch = experience.flatten(experience.groups_of(shares))
        return by_sample([batch], [self._log_probs(batch, temperature)])

    def teach(self, shares: Sequence[Share], cut: BatchSettings, temperature: float, how: Divergence) -> TeacherScores:
        """Return log-probs as `score` does, and what a policy that learns by `how` needs."""
        assert how.top_k is not None, "an engine gives no hidden states"
        groups = experience.groups_of(shares)
        batch = experience.for_teacher(groups, experience.flatten(groups))
        parts = self._engine.likely_tokens(_sequences(batch), how.temperature, how.top_k, how.vocab_size)
        # Nothing precedes the first token of a segment, so nothing is said of it; it is never learned from.
        nothing = torch.zeros(1, how.top_k + 1)
        ids = _joined(nothing.int(), [part and part.ids for part in parts])
        log_probs = _joined(nothing, [part and part.log_probs for part in parts])
        is_same = how.temperature == temperature and how.vocab_size in (None, self._vocab_size)
        outputs = {
            "log_probs": log_probs[:, 0] if is_same else self._log_probs(batch, temperature),
            "teacher_ids": ids[:, 1:],
            "teacher_log_probs": classes_of_top(log_probs[:, 1:], how.tail),
        }
        return experience.teacher_scores(groups, [batch], {name: [each] for name, each in outputs.items()})

    def _log_probs(self, batch: MicroBatch, temperature: float) -> Tensor:
        scores = self._engine.score(_sequences(batch), temperature)
        return torch.tensor([log_prob for each in scores for log_prob in each])

    def fits(self, num_tokens: int, max_length: int, is_update: bool, with_entropy: bool = False) -> bool:
        return True

    def lowered(self) -> Mapping[Use, int]:
        return {}

    def warm_up(self, max_length: int) -> None:
        """Do nothing: an engine has compiled when it is there."""

    def offload(self, parts: Sequence[Any], keep_weights: bool = True) -> Moved:
        """Take all parts off the device: the cache holds nothing between two calls."""
        return self._engine.offload(self._engine.parts, keep_weights=keep_weights)

    def onload(self, parts: Sequence[Any]) -> Moved:
        return self._engine.onload(self._engine.parts)

    def close(self) -> None:
        self._engine.close()


def _sequences(batch: MicroBatch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.token_ids.split((batch.offsets[1:] - batch.offsets[:-1]).tolist())]


def _joined(first: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
    """Join the rows of all segments, each behind one row for its first token."""
    rows = [first[:0]]
    for part in parts:
        rows += [first] if part is None else [first, part.to(first)]
    return torch.cat(rows)
