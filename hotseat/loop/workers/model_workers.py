"""Workers that hold models: one plain class per role. `cluster` makes a group of each, or calls it in process.

A method marked as collective waits for the other ranks of its role: all of them have to call it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotseat.algorithms.adapters import WeightForm, merge_apart
from hotseat.algorithms.advantages import Moments
from hotseat.algorithms.aggregation import Aggregation, StepTotals
from hotseat.algorithms.corrections import WeightTotals
from hotseat.algorithms.distillation import Divergence
from hotseat.cluster.activity import activity
from hotseat.errors import DeviceMemoryError, RunError
from hotseat.loop.devices.held_memory import DeviceWorker, device_of_process, release_cache_here
from hotseat.loop.workers import experience
from hotseat.loop.workers.by_sample import BySample, TeacherScores, by_sample, given_by_teacher, in_order
from hotseat.loop.workers.cutting import BatchSettings, MicroBatcher, too_large
from hotseat.loop.workers.experience import AdvantageSettings, Share
from hotseat.loop.workers.exports import Origin, begin_export, finish_export
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.loop.workers.losses import CORRECTION_SCALES, OLD_LOG_PROBS, REFERENCE_LOG_PROBS, RETURNS, PolicyObjective
from hotseat.loop.workers.records import RecordedObjective, Recorder, TokenRecord
from hotseat.loop.workers.weight_check import Canary, TakesWeights, WeightCheck
from hotseat.model_source import ModelSource
from hotseat.planning.budgets import Use
from hotseat.train.backend import Loss, TrainOptions, UpdateReport
from hotseat.train.divergence import TEACHER_FIELDS
from hotseat.train.exact import NO_FP8, ExactScores, Fp8Parts, exact_log_probs, missing_bytes
from hotseat.train.make import make_backend
from hotseat.train.packing import split_by_tokens, take
from hotseat.train.teacher_head import load_head
from hotseat.types import MicroBatch, Moved, PromptGroup
from hotseat.weights.broadcast import BroadcastGroup
from hotseat.weights.bucket import Bucket
from hotseat.weights.transfer import BUCKET_BYTES, Receiver, Sender
from hotseat.weights.transports import Transport

_CANARY_TOKENS = 4096  # in one forward, unless a single sequence is longer


@dataclass(frozen=True)
class PolicySettings:
    """Settings by which the actor prepares a rollout and learns from it."""

    objective: PolicyObjective
    advantages: AdvantageSettings
    aggregation: Aggregation
    max_epochs: int
    needs_old_log_probs: bool
    temperature: float
    score: BatchSettings
    train: BatchSettings
    learns_from_every_sample: bool = False  # also from samples whose loss has no gradient
    mask_truncated: bool = False  # leave truncated episodes out of the loss
    normalises_corrections: bool = False  # to mean 1 over each optimizer step
    version: int | None = None  # of the weights that learn, to measure how old samples are; None: they are not


class BackendWorker(DeviceWorker):
    """One rank of a model behind a training backend, which can be saved."""

    def __init__(self, model: ModelSource, options: TrainOptions, *, folder_proof: FolderProof | None = None):
        """Load the model. folder_proof: what this rank proves first, if checkpoints are made of it."""
        if folder_proof is not None:
            with activity.doing("looking for the folder of checkpoints"):
                folder_proof.give(int(os.environ.get("RANK", "0")))
        with activity.doing("loading weights"):
            self._backend = make_backend(model, options, device=device_of_process())
        self._cutter = MicroBatcher(self._backend)
        self._sequence_parallel_size = options.sequence_parallel_size

    def device_type(self) -> str:
        return device_of_process().type

    def fits(self, num_tokens: int, max_length: int, is_update: bool, with_entropy: bool = False) -> bool:
        """Tell whether micro-batches of `num_tokens` tokens fit in memory; see `Backend.fits`. Collective."""
        try:
            return self._backend.fits(num_tokens, max_length, is_update=is_update, with_entropy=with_entropy)
        except DeviceMemoryError as error:
            use: Use = "train" if is_update else "rollout"
            what = "out of device memory in a trial"
            raise too_large(use, what, num_tokens, self._sequence_parallel_size, error) from error

    def warm_up(self, max_length: int) -> None:
        """Compile on a GPU what the first step needs, while other processes start. Collective."""
        if device_of_process().type == "cuda":
            self._backend.warm_up(max_length)

    def lowered(self) -> dict[Use, int]:
        """Return the token budgets per device that this rank lowered because memory ran out."""
        return self._cutter.lowered(self._sequence_parallel_size)

    def save(self, directory: str) -> None:
        """Write this rank's share of weights and optimizer state. Collective."""
        self._backend.save(directory)

    def snapshot(self, directory: str) -> None:
        """Copy what `save` would write, and write it in the background while other calls run. Collective."""
        self._backend.snapshot(directory)

    def is_written(self) -> bool:
        """Tell whether this rank's share of the last snapshot is on disk."""
        return self._backend.is_written()

    def saved_bytes(self) -> int:
        """Return the size of what `save` would write on this rank."""
        return self._backend.saved_bytes()

    def begin_export(self, folder: str) -> str:
        """Make and return the folder to write a model into, which moves to `folder` later. On the rank that writes."""
        return str(begin_export(Path(folder)))

    def finish_export(self, writing: str, folder: str, more: Mapping[str, bytes], origin: Origin) -> None:
        """Move a model from `writing` to `folder`, with further files. On the rank that wrote it."""
        finish_export(Path(writing), Path(folder), more, origin)

    def drop_export(self, writing: str) -> None:
        """Remove a model that could not be written to its end."""
        shutil.rmtree(writing, ignore_errors=True)

    def close(self) -> None:
        self._backend.close()


class ModelWorker(BackendWorker):
    """One rank of a model that computes log-probs and can be offloaded."""

    def score(self, shares: Sequence[Share], cut: BatchSettings, temperature: float) -> BySample:
        """Return log-probs of each segment of each sample, by sample id. Collective."""
        return self._score(experience.flatten(experience.groups_of(shares)), cut, temperature)

    def teach(self, shares: Sequence[Share], cut: BatchSettings, temperature: float, how: Divergence) -> TeacherScores:
        """Return log-probs as `score` does, and what a policy that learns by `how` needs. Collective."""
        return self._teach(experience.groups_of(shares), cut, temperature, how)

    def _teach(
        self, groups: Sequence[PromptGroup], cut: BatchSettings, temperature: float, how: Divergence
    ) -> TeacherScores:
        batch = experience.for_teacher(groups, experience.flatten(groups))
        pieces, outputs = self._cutter.run(
            "rollout",
            cut,
            lambda settings: settings.cut(batch),
            lambda pieces: self._backend.teach(pieces, temperature, how),
        )
        names = [name for name in TEACHER_FIELDS if outputs and name in outputs[0]]
        every = {name: [each[name] for each in outputs] for name in ("log_probs", *names)}
        return experience.teacher_scores(groups, pieces, every)

    def _score(self, batch: MicroBatch, cut: BatchSettings, temperature: float) -> BySample:
        pieces, scores = self._cutter.run(
            "rollout",
            cut,
            lambda settings: settings.cut(batch),
            lambda pieces: self._backend.log_probs(pieces, temperature),
        )
        return by_sample(pieces, scores)

    def _optimizer_step(
        self, whole: MicroBatch | None, cut: BatchSettings, loss: Loss, temperature: float
    ) -> tuple[list[MicroBatch], UpdateReport]:
        """Make an optimizer step; return the micro-batches of this rank's part, and the report. Collective."""
        return self._cutter.run(
            "train",
            cut,
            lambda settings: [] if whole is None else settings.cut(whole),
            lambda pieces: self._backend.update(pieces, loss, temperature),
        )

    def _add_totals(self, steps: Sequence[MicroBatch | None]) -> list[StepTotals]:
        """Return the totals of each optimizer step, summed over all ranks. Collective."""
        return self._sum_over_ranks(experience.totals_of(steps), "count the tokens of each optimizer step")

    def _sum_over_ranks(self, local: Sequence[Any], what: str) -> list[Any]:
        """Return the sum over all ranks of each fact. what: the purpose, for an error message. Collective."""
        everyone = self._backend.gather_facts(local, what)
        return [functools.reduce(operator.add, parts) for parts in zip(*everyone, strict=True)]

    def score_canary(self, canary: Canary) -> list[float]:
        """Return log-probs of the canary's sampled tokens. Collective; every rank scores all of them."""
        # One large tensor of each kind is split: making a thousand small ones takes noticeable time in every push.
        lengths = [len(sequence) for sequence in canary.sequences]
        token_ids = torch.tensor([token for sequence in canary.sequences for token in sequence])
        mask = torch.ones(len(token_ids), dtype=torch.bool)
        for end, length, start in zip(itertools.accumulate(lengths), lengths, canary.num_prompt, strict=True):
            mask.numpy()[end - length : end - length + start] = False
        names = [f"canary {index}" for index in range(len(lengths))]
        batch = MicroBatch.from_segments(token_ids.split(lengths), mask.split(lengths), names, images=canary.images)
        max_tokens = min(_CANARY_TOKENS, self._cutter.lowered().get("rollout", _CANARY_TOKENS))
        pieces = split_by_tokens(batch, max([max_tokens, *map(len, canary.sequences)]))
        scored = by_sample(pieces, self._backend.log_probs(pieces, canary.temperature))
        return canary.sampled([scored[name][0].tolist() for name in batch.sample_ids])

    def load(self, directory: str) -> None:
        """Read what the ranks of a run saved. Collective."""
        self._backend.load(directory)

    def export(self, directory: str, is_averaged: bool = False) -> None:
        """Write the model, or its moving average, as a Hugging Face checkpoint. Collective."""
        with self._backend.averaged() if is_averaged else nullcontext():
            self._backend.export(Path(directory))

    def offload(self, parts: Sequence[Any], keep_weights: bool = True) -> Moved:
        return self._backend.offload(parts)

    def onload(self, parts: Sequence[Any]) -> Moved:
        return self._backend.onload(parts)


class InferenceWorker(ModelWorker, TakesWeights):
    """One rank of a copy of the policy: computes old log-probs on its own devices, and gets weights as engines do."""

    def __init__(self, model: ModelSource, options: TrainOptions, engine_dtype: str):
        super().__init__(model, options)
        self._receiver = Receiver(
            self._backend.take_weights, lambda names: self._backend.digest(dtype=getattr(torch, engine_dtype))
        )

    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        """Return the proof of what was loaded. Collective."""
        digests = self._receiver.finish(version)
        return WeightCheck(digests, None if canary is None else self.score_canary(canary))


class ActorWorker(ModelWorker):
    """One rank of the policy: it prepares experience, learns from it, and sends its weights.

    engine_dtype: the dtype in which engines hold weights, in which they are sent and their digests computed.
    """

    def __init__(
        self,
        model: ModelSource,
        options: TrainOptions,
        engine_dtype: str,
        folder_proof: FolderProof | None = None,
        teacher: ModelSource | None = None,
    ):
        """Load the model. teacher: whose distributions of the whole vocabulary the policy learns."""
        super().__init__(model, options, folder_proof=folder_proof)
        if teacher is not None:
            self._backend.learn_from(load_head(teacher, getattr(torch, engine_dtype)))
        self._steps: list[MicroBatch | None] = []
        self._totals: list[StepTotals] = []
        self._returns = BySample()
        self._recorder: Recorder | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self._model = model
        self._dtype = getattr(torch, engine_dtype)
        self._form: WeightForm = "merged"  # of the last push to engines
        self._sender = Sender(self._outgoing, device_of_process())

    # --- learning from a rollout ------------------------------------------------------------------------------------

    def prepare(
        self,
        shares: Sequence[Share],
        num_steps: int,
        settings: PolicySettings,
        reference: Sequence[BySample],
        record: Sequence[str] = (),
        critic: Sequence[BySample] = (),
        old: Sequence[BySample] = (),
    ) -> None:
        """Turn this rank's groups into the batches of the optimizer steps to come. Collective.

        reference, critic: log-probs and values of all samples from the ranks of these roles; empty: there is no such
        role. old: log-probs of the policy before the update; empty: computed here if the settings need them.
        record: ids of samples, on any rank, whose tokens `recorded` will return.
        """
        groups = experience.groups_of(shares)
        batch = experience.flatten(groups)
        if settings.version is not None:
            batch = experience.with_lags(groups, batch, settings.version)
        if reference:
            batch = experience.with_fields(batch, {REFERENCE_LOG_PROBS: in_order(batch, reference)})
            batch = experience.with_fields(batch, given_by_teacher(batch, reference))
        if settings.needs_old_log_probs:
            old = old or [self.score(shares, settings.score, settings.temperature)]
            batch = experience.with_fields(batch, {OLD_LOG_PROBS: in_order(batch, old)})
        values = in_order(batch, critic) if critic else None

        def add_moments(local: Moments) -> Moments:
            return self._sum_over_ranks([local], "add up the moments of the advantages")[0]

        batch = experience.with_advantages(groups, batch, settings.advantages, add_moments, values)
        if RETURNS in batch.fields:
            self._returns = by_sample([batch], [batch.fields[RETURNS]])
            batch = replace(batch, fields={name: field for name, field in batch.fields.items() if name != RETURNS})
        batch = experience.without_bootstraps(groups, batch)
        self._recorder = self._start_recording(batch, settings, record) if record else None
        if settings.mask_truncated:
            batch = experience.without_truncated(groups, batch)
        self._steps = experience.cut_into_steps(batch, experience.steps_of(shares), num_steps)
        self._totals = self._add_totals(self._steps)
        if settings.normalises_corrections:
            self._steps = self._with_correction_scales(settings.objective)

    def returns(self) -> BySample:
        """Return the critic's targets for the prepared samples of this rank, by sample id, and drop them here."""
        returns, self._returns = self._returns, BySample()
        return returns

    def update(self, settings: PolicySettings) -> list[UpdateReport]:
        """Make every optimizer step of the prepared rollout. Collective."""
        reports = []
        loss: Loss = settings.objective
        if self._recorder is not None:
            loss = RecordedObjective(settings.objective, self._recorder)
        for _ in range(settings.max_epochs):
            for batch, totals in zip(self._steps, self._totals, strict=True):
                whole = None
                if batch is not None:
                    whole = experience.weighted(batch, settings.aggregation, totals, settings.advantages.max_sampled)
                    if not settings.learns_from_every_sample:
                        whole = _with_gradient(whole, settings.objective)
                pieces, report = self._optimizer_step(whole, settings.train, loss, settings.temperature)
                reports.append(report)
                if self._recorder is not None and reports[-1].is_skipped:
                    self._recorder.mark_skipped(pieces)
        self._steps, self._totals = [], []
        return reports

    def recorded(self) -> dict[str, list[TokenRecord]]:
        """Return token records of the samples of this rank that `prepare` was asked to record, one per segment."""
        return {} if self._recorder is None else self._recorder.tokens

    def _start_recording(self, batch: MicroBatch, settings: PolicySettings, record: Sequence[str]) -> Recorder:
        """Score samples before the update: the weights are those that sampled them, so engine and trainer compare."""
        segments = [index for index, name in enumerate(batch.sample_ids) if name in record]
        chosen = take(batch, segments)
        if OLD_LOG_PROBS in batch.fields:
            scored = by_sample([chosen], [chosen.fields[OLD_LOG_PROBS]])
        else:
            scored = self._score(chosen, settings.score, settings.temperature)
        return Recorder(chosen, scored)

    # --- weights -----------------------------------------------------------------------------------------------------

    def begin_push(
        self, version: int, receivers: BroadcastGroup | None = None, form: WeightForm = "merged"
    ) -> int | None:
        """Gather the first bucket: return its bytes, or None if there is none. Collective."""
        self._form = form
        self._sender.begin(version, receivers)
        return self._sender.pack_next()

    def pack_next(self) -> int | None:
        """Gather the next bucket: return its bytes, or None if there is none. Collective."""
        return self._sender.pack_next()

    def packed(self, transport: Transport) -> Bucket:
        """Return the gathered bucket, for engines on this transport."""
        return self._sender.packed(transport)

    def broadcast(self) -> None:
        """Send the gathered bucket to all engines that receive broadcasts. Only the first rank does."""
        self._sender.broadcast()

    def finish_push(self, canary: Canary | None) -> WeightCheck:
        """Return the proof of what was sent. Collective."""
        self._sender.finish()
        log_probs = None if canary is None else self.score_canary(canary)
        return WeightCheck(self._backend.digest(dtype=self._dtype, form=self._form), log_probs)

    def _outgoing(self) -> Iterator[tuple[str, Tensor]]:
        return self._backend.weights(dtype=self._dtype, bucket_bytes=BUCKET_BYTES, form=self._form)

    def lacks_bytes_for_exact(self, longest: int) -> int:
        """Return the bytes of device memory that `score_exactly` lacks for sequences of up to `longest` tokens."""
        return missing_bytes(self._model, device_of_process(), longest)

    def score_exactly(self, canary: Canary, is_merged: bool = True, fp8: Fp8Parts = NO_FP8) -> ExactScores | str | None:
        """Score with a float32 forward of the weights that engines got. Collective; only the first rank returns scores.

        is_merged: False if engines got adapters apart from their weights: the sum of the two has not been rounded.
        fp8: what engines have in FP8.

        If the forward fails the first rank returns why: a run can continue without this yardstick.
        """
        form: WeightForm = "merged" if is_merged else "apart"
        weights = self._backend.weights(dtype=self._dtype, bucket_bytes=BUCKET_BYTES, form=form)
        whole = weights if is_merged else merge_apart(weights)
        scores: ExactScores | str | None = None
        if self._rank == 0:
            try:
                scores = exact_log_probs(
                    self._model,
                    whole,
                    canary.sequences,
                    canary.num_prompt,
                    canary.temperature,
                    dtype=self._dtype,
                    device=device_of_process(),
                    images=canary.images,
                    fp8=fp8,
                )
            except (torch.OutOfMemoryError, RunError) as error:
                scores = str(error).partition("\n")[0]
        for _ in weights:  # Gathering is collective: every rank takes part until the last weight.
            pass
        release_cache_here()
        return scores

    def close(self) -> None:
        self._sender.close()
        super().close()

    def _with_correction_scales(self, objective: PolicyObjective) -> list[MicroBatch | None]:
        """Return the steps with the factor that brings each one's correction weights to mean 1. Collective."""
        local = [WeightTotals(0.0, 0) if batch is None else objective.correction_totals(batch) for batch in self._steps]
        totals = self._sum_over_ranks(local, "add up the correction weights of each optimizer step")
        return [
            None
            if batch is None
            else experience.with_fields(batch, {CORRECTION_SCALES: torch.full([batch.num_tokens], of.scale)})
            for batch, of in zip(self._steps, totals, strict=True)
        ]


def _with_gradient(batch: MicroBatch, objective: PolicyObjective) -> MicroBatch:
    """Leave out samples whose loss has no gradient. One sample stays in any case, since the optimizer steps anyway."""
    chosen = objective.samples_with_gradient(batch)
    if chosen is None:
        return batch
    if not chosen:
        chosen = [index for index, name in enumerate(batch.sample_ids) if name == batch.sample_ids[0]]
    return take(batch, chosen)
