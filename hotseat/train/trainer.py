"""`Trainer`, the common part of training backends: scoring, updates, residency and checkpoints over all ranks.

`FSDPBackend` (`fsdp`) and `ZeroBackend` (`zero`) implement `TrainerHooks`: how weights are sharded, stepped, streamed
and stored. `Trainer.update` computes gradients and calls the hook `_step`, which steps the optimizer.
Separate tasks have their own modules: `forward`, `update_facts`, `offload`, `outgoing`, `checkpoint_files`, `export`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hotseat import faults
from hotseat.algorithms.adapters import WeightForm
from hotseat.algorithms.distillation import Divergence
from hotseat.algorithms.nf4 import nf4_layers
from hotseat.errors import BatchError, DeviceMemoryError, RunError, UnsupportedError
from hotseat.placement.role_names import Part
from hotseat.train.average import MovingAverage
from hotseat.train.backend import (
    NO_FACTS,
    PARTS,
    Facts,
    Head,
    Loss,
    Outputs,
    TrainOptions,
    UpdateReport,
    check_parts,
    check_temperature,
    divergence_of,
    needs_entropy,
)
from hotseat.train.checkpoint_files import (
    CheckpointFiles,
    FrozenBase,
    check_adapters,
    check_base,
    random_states,
    read_header,
    set_random_states,
)
from hotseat.train.divergence import TEACHER_FIELDS, Teaching
from hotseat.train.divergence import Head as TeacherHead
from hotseat.train.export import write_model
from hotseat.train.forward import ForwardPass
from hotseat.train.fragments import local
from hotseat.train.headroom import Meter, is_out_of_memory, release_memory, trial_batch
from hotseat.train.hooks import TrainerHooks
from hotseat.train.linear_attention import num_seen
from hotseat.train.lora import adapters_off, base_names, dropouts, find_adapters, save_adapter
from hotseat.train.offload import PartResidency
from hotseat.train.outgoing import OutgoingWeights
from hotseat.train.packing import LayoutKind, filler_batch, image_filler
from hotseat.train.policy_models import exported_name
from hotseat.train.ranks import Ranks
from hotseat.train.sequence import SequenceGroup
from hotseat.train.update_facts import UpdateFacts, UpdateHistory
from hotseat.types import MicroBatch, Moved
from hotseat.vision import Vision

Result = TypeVar("Result")


@dataclass
class _Progress:
    """State of the current call, and whether further calls are possible."""

    num_begun: int = 0  # micro-batches
    is_halfway: bool = False  # an update sums gradients, or failed while it did
    is_closed: bool = False


class Trainer(TrainerHooks):
    """One rank of a model under training. See `Backend` for the contract, `TrainerHooks` for what a backend adds."""

    def __init__(
        self,
        options: TrainOptions,
        ranks: Ranks,
        device: torch.device,
        model: PreTrainedModel,
        layout: LayoutKind,
        has_flash: bool,
    ):
        if options.sequence_parallel_size > 1 and layout == "padded":
            raise UnsupportedError(
                f"{type(model).__name__} cannot run packed, and only packed sequences can be cut over several ranks:"
                " set train.sequence_parallel_size to 1"
            )
        self._options = options
        self._ranks = ranks
        self._device = device
        self._model = model
        sequence = SequenceGroup(options.sequence_parallel_size, options.timeout_s)
        has_adapters = options.lora is not None
        self._forward_pass = ForwardPass(
            layout,
            has_flash,
            device,
            sequence,
            dropouts(model) if has_adapters else [],
            Vision.of(model),
            num_seen(model),
            options.replays_routing,
        )
        if options.filler_image is not None and ranks.size > 1:
            self._forward_pass.filler = image_filler(options.filler_image)
        adapters = find_adapters(model) if has_adapters else {}
        in_nf4 = nf4_layers(model)
        weights = dict(zip(base_names([f"{name}.weight" for name in in_nf4]).values(), in_nf4.values(), strict=True))
        self._outgoing = OutgoingWeights(model, adapters, options.precision, frozenset(model.state_dict()), weights)
        self._residency = PartResidency(device)
        self._history = UpdateHistory(options.max_non_finite)
        self._checkpoint_files = CheckpointFiles(self.name, ranks)
        self._base: FrozenBase | None = None  # of adapters, once it is known
        self._average: MovingAverage | None = None
        self._teacher_head: TeacherHead | None = None  # in host memory; on the device during an update
        self._progress = _Progress()
        if options.lora is not None and options.lora.dropout > 0:
            torch.manual_seed(options.lora.seed + ranks.rank)  # so that dropout repeats in the same run

    @property
    def version(self) -> int:
        return self._history.version

    @property
    def movable(self) -> frozenset[Part]:
        return self._residency.movable

    @property
    def is_padded(self) -> bool:
        return self._forward_pass.layout == "padded"

    def gather_facts(self, fact: Any, what: str, *, of_every_rank: bool = False) -> list[Any]:
        facts = self._ranks.gather(fact, what)
        return facts if of_every_rank else facts[:: self._options.model_parallel_size]

    # --- forward and backward -----------------------------------------------------------------------------------------

    def log_probs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        check_temperature(temperature)
        return self._one_score(micro_batches, "log_probs", "policy", temperature)

    def teach(
        self, micro_batches: Sequence[MicroBatch], temperature: float, how: Divergence
    ) -> list[dict[str, Tensor]]:
        check_temperature(temperature)
        return self._score(micro_batches, "log_probs", "policy", temperature, Teaching(how, gives=True))

    def learn_from(self, head: TeacherHead | None) -> None:
        self._teacher_head = head

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return self._one_score(micro_batches, "values", "value", 1.0)

    def _one_score(
        self, micro_batches: Sequence[MicroBatch], what: str, head: Head, temperature: float
    ) -> list[Tensor]:
        return [scores[what] for scores in self._score(micro_batches, what, head, temperature)]

    def _score(
        self,
        micro_batches: Sequence[MicroBatch],
        what: str,
        head: Head,
        temperature: float,
        teaching: Teaching | None = None,
    ) -> list[dict[str, Tensor]]:
        """Return `what` the model computes of each micro-batch, on its device, and what it gives as a teacher."""
        self._need(what, Part.WEIGHTS)
        if self._options.head != head:
            raise RunError(f"{what} of a {self._options.head} model, which has a head of another kind")
        scored: list[tuple[dict[str, Tensor], MicroBatch]] = []
        self._forward_pass.set_dropout(False)
        work = self._as_many_as_other_ranks(micro_batches)

        @torch.no_grad()
        def score() -> None:
            try:
                for index, batch in enumerate(work):
                    self._progress.num_begun = index + 1
                    faults.reach("score.forward")
                    outputs = self._forward(batch or filler_batch(), temperature, teaching=teaching)
                    if batch is not None:
                        fields = ((name, getattr(outputs, name)) for name in (what, *TEACHER_FIELDS))
                        scored.append(({name: values for name, values in fields if values is not None}, batch))
            finally:
                self._after_scoring()

        self._within_memory(score, scored.clear)
        # Copied only now, because each copy waits until the device is done.
        each = iter([{name: of.to(batch.token_ids.device) for name, of in scores.items()} for scores, batch in scored])
        return [next(each) if batch.num_tokens > 0 else {what: torch.zeros(0)} for batch in micro_batches]

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> UpdateReport:
        check_temperature(temperature)
        self._need("update", Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER)
        if self._options.optimizer is None:
            raise RunError("update of a model that was loaded without an optimizer, only to be scored")
        work = self._as_many_as_other_ranks(micro_batches)
        if not work:
            raise BatchError("update without a micro-batch on any rank: nothing to learn from")
        losses, metrics = self._within_memory(lambda: self._sum_gradients(work, loss, temperature))
        grad_norm = self._grad_norm()
        mine = UpdateFacts.of(micro_batches, losses, metrics, grad_norm)
        facts = UpdateFacts.total(self.gather_facts(mine, "add up the losses of an update"))
        learning_rate = self._options.schedule.learning_rate(self.version)
        faults.reach("update.middle")
        is_finite = math.isfinite(facts.loss) and math.isfinite(grad_norm)
        is_overflow = not is_finite and math.isfinite(facts.loss) and self._lower_loss_scale()
        if is_finite:
            self._step(grad_norm, learning_rate)  # the backend's: clips, then steps the optimizer
            self._history.record_step()
            if self._average is not None:
                self._average.update(self._shards())
        self._forget_gradients()
        if is_overflow:
            self._history.record_overflow()
        elif not is_finite:
            self._history.record_skip(facts.suspects or facts.samples, loss=facts.loss, grad_norm=grad_norm)
        return UpdateReport(
            version=self.version,
            loss=facts.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            is_skipped=not is_finite,
            num_skipped=self._history.num_skipped,
            num_tokens=facts.num_tokens,
            num_sampled=facts.num_sampled,
            metrics=facts.metrics,
        )

    def _sum_gradients(
        self, work: Sequence[MicroBatch | None], loss: Loss, temperature: float
    ) -> tuple[list[Tensor], list[Mapping[str, Tensor | float]]]:
        """Sum gradients over `work` and all ranks; return the loss and metrics of each micro-batch of this rank."""
        losses, metrics = [], []
        self._forward_pass.set_dropout(True)
        coefficient, num_tokens = self._options.aux_loss_coefficient, 0
        if coefficient:
            mine = sum(batch.num_tokens for batch in work if batch is not None)
            num_tokens = sum(self.gather_facts(mine, "count the tokens of an update"))
        teaching = self._teaching(loss)
        # Gradients of a failed update would stay where the next update adds to them.
        self._progress.is_halfway = True
        for index, batch in enumerate(work):
            if index:
                faults.reach("update.micro-batch")
            is_last = index == len(work) - 1
            self._progress.num_begun = index + 1
            self._before_forward(is_last)
            faults.reach("update.forward")
            if batch is None:
                filler = filler_batch() if teaching is None else teaching.filler(filler_batch())
                outputs = self._forward(filler, temperature, needs_entropy(loss), coefficient > 0, teaching)
                self._backward(sum((value * 0.0).sum() for value in outputs.tensors()), is_last)
                continue
            there = batch.to(self._device)  # before the forward, so that nothing waits for the forward's end
            outputs = self._forward(batch, temperature, needs_entropy(loss), coefficient > 0, teaching)
            total, sums = loss(outputs, there)
            if not total.requires_grad:
                raise RunError(
                    f"the loss {type(loss).__name__} has no gradient: compute it from what its first argument"
                    " holds, without detach"
                )
            if outputs.aux_loss is not None:
                aux_loss = outputs.aux_loss * (batch.num_tokens / num_tokens)
                total, sums = total + coefficient * aux_loss, {**sums, "aux_loss": aux_loss.detach()}
            faults.reach("update.backward")
            self._backward(total, is_last)
            losses.append(total.detach())
            metrics.append(sums)
        self._progress.is_halfway = False
        return losses, metrics

    def _within_memory(self, do: Callable[[], Result], forget: Callable[[], object] = lambda: None) -> Result:
        """Return what `do` returns. If the device runs out of memory, undo `do` where that is possible, and raise.

        `forget`: drops results of `do` that are referenced from outside of it.
        """
        random = random_states(self._device) if self._forward_pass.dropouts else {}
        try:
            return do()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        # Memory is released after the error was handled: its frames hold the activations of what failed.
        forget()
        is_undone = self._ranks.size == 1 and self._can_continue()
        if is_undone:
            self._undo()
            set_random_states(random, self._device)
        release_memory(self._device)
        raise DeviceMemoryError(reason, index=self._progress.num_begun - 1, is_undone=is_undone)

    def _undo(self) -> None:
        """Forget an update that failed halfway, on a single rank."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels may still read what is released next
        self._abandon()
        self._forget_gradients()
        self._progress.is_halfway = False

    def fits(self, num_tokens: int, max_length: int, *, is_update: bool, with_entropy: bool = False) -> bool:
        parts: tuple[Part, ...] = PARTS if is_update else (Part.WEIGHTS,)
        self._need("a trial of micro-batches", *parts)
        random = random_states(self._device)

        def has_room(count: int, times: float) -> bool:
            """Run a micro-batch of `count` tokens; tell whether one of `times` as many tokens fits on every rank."""
            batch = trial_batch(
                count, max_length, self._model.config.get_text_config().vocab_size, is_padded=self.is_padded
            )
            release_memory(self._device)
            meter = Meter(self._device)
            try:
                self._within_memory(lambda: self._try_out(batch, is_update, with_entropy))
                is_enough = meter.peak().has_headroom(times)
            except DeviceMemoryError as error:
                if not error.is_undone:
                    raise
                is_enough = False
            return not self._ranks.max(int(not is_enough), "agree on the size of micro-batches")

        # A rank that runs out of memory alone leaves the others waiting, so ranks first try half and extrapolate.
        is_small = self._ranks.size > 1 and num_tokens >= 2 * max_length
        fit = (not is_small or has_room(num_tokens // 2, num_tokens / (num_tokens // 2))) and has_room(num_tokens, 1.0)
        set_random_states(random, self._device)
        release_memory(self._device)
        return fit

    def warm_up(self, max_length: int) -> None:
        random = random_states(self._device)
        vocab_size = self._model.config.get_text_config().vocab_size
        for is_shared in (False, True):
            batch = trial_batch(4 * max_length, max_length, vocab_size, is_padded=self.is_padded, is_shared=is_shared)
            for is_update in (False, True) if self._options.optimizer is not None else (False,):
                self._within_memory(partial(self._try_out, batch, is_update, False))
        set_random_states(random, self._device)
        release_memory(self._device)

    def _try_out(self, batch: MicroBatch, is_update: bool, with_entropy: bool) -> None:
        """Run a forward of made-up tokens, and for an update a backward that adds nothing to any gradient."""
        self._forward_pass.set_dropout(is_update)
        self._progress.num_begun = 1
        if not is_update:
            faults.reach("trial.forward")
            with torch.no_grad():
                self._forward(batch, 1.0, with_entropy)
            self._after_scoring()
            return
        self._progress.is_halfway = True
        # With several ranks, each holds whole gradients until the last micro-batch: try one before it, too.
        for is_last in (False, True) if self._ranks.size > 1 else (True,):
            self._before_forward(is_last)
            faults.reach("trial.forward")
            outputs = self._forward(batch, 1.0, with_entropy, self._options.aux_loss_coefficient > 0)
            self._backward(sum((value * 0.0).sum() for value in outputs.tensors()), is_last)
        self._forget_gradients()
        self._progress.is_halfway = False

    def _grad_norm(self) -> float:
        gradients = self._gradients()
        each = torch._foreach_norm(gradients.tensors, 2, dtype=torch.float32)
        squares = torch.stack([norm.to(self._device) for norm in each]).square_()
        total = squares.sum() if gradients.shares is None else squares @ squares.new_tensor(gradients.shares)
        if self._ranks.size > 1 and gradients.is_sharded:
            dist.all_reduce(total)
        return float(total.sqrt_()) * gradients.unit

    def _clip_factor(self, grad_norm: float) -> float:
        """Return the factor that clips gradients of this norm.

        The small term is that of torch's own clipping, so that a reference loop agrees to the last bits.
        """
        limit = self._options.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))

    def _muon_rate(self) -> float:
        """Return the learning rate of the matrices that Muon steps, in the update to come."""
        options = self._options
        peak = 0.0 if options.muon is None else options.muon.learning_rate
        return replace(options.schedule, peak=peak).learning_rate(self.version)

    def _as_many_as_other_ranks(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch | None]:
        """Extend this rank's micro-batches by None until it has as many as any other: forwards are collective."""
        real = [batch for batch in micro_batches if batch.num_tokens > 0]
        most = self._ranks.max(len(real), "agree on the number of micro-batches")
        return [*real, *[None] * (most - len(real))]

    def _teaching(self, loss: Loss) -> Teaching | None:
        """Return how a loss compares the policy with its teacher, whose head is on the device for as long."""
        how = divergence_of(loss)
        if how is None:
            return None
        return Teaching(how, head=None if self._teacher_head is None else self._teacher_head.to(self._device))

    def _forward(
        self,
        batch: MicroBatch,
        temperature: float,
        with_entropy: bool = False,
        with_routing: bool = False,
        teaching: Teaching | None = None,
    ) -> Outputs:
        module, model_batch = self._module(), self._model_batch(batch)
        asked = (temperature, with_entropy, with_routing, teaching)
        return self._forward_pass.run(module, model_batch, batch.num_tokens, *asked)

    # --- residency ----------------------------------------------------------------------------------------------------

    def offload(self, parts: Collection[Part]) -> Moved:
        self._need("offload")
        check_parts(parts)
        return self._residency.offload(parts, self._tensors)

    def onload(self, parts: Collection[Part]) -> Moved:
        self._need("onload")
        check_parts(parts)
        return self._residency.onload(parts)

    def _need(self, what: str, *parts: Part) -> None:
        """Raise unless the call `what` can be made now. parts: those that it needs on the device."""
        if self._progress.is_closed:
            raise RunError(f"{what} of a backend that is closed")
        if self._progress.is_halfway and not self._can_continue():
            raise RunError(f"{what} after an update that failed halfway: load the last checkpoint in a new process")
        if self._progress.is_halfway:
            self._undo()
        missing = [part for part in parts if part in self._residency.offloaded]
        if missing:
            raise RunError(f"{what} needs {' and '.join(missing)} on the device: onload them first")

    # --- weights out, and on disk -------------------------------------------------------------------------------------

    def weights(
        self, *, dtype: torch.dtype | None = None, bucket_bytes: int = 2**28, form: WeightForm = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        self._need("weights", Part.WEIGHTS)
        return self._stream(dtype, bucket_bytes, form)

    def take_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._need("take_weights", Part.WEIGHTS)
        if self._options.optimizer is not None:
            raise RunError("take_weights of a model that is trained: what it has learned would be lost")
        self._take(named_tensors)

    def save(self, directory: str | Path) -> None:
        self._checkpoint_files.write(Path(directory), self._to_save("save"), self._base)

    def snapshot(self, directory: str | Path) -> None:
        self._checkpoint_files.write_in_background(Path(directory), self._to_save("snapshot"), self._base)

    def is_written(self) -> bool:
        return self._checkpoint_files.is_written()

    def _to_save(self, what: str) -> dict[str, Tensor]:
        """Return all that `save` writes: live tensors, counters and random states."""
        self._need(what, Part.WEIGHTS, Part.OPTIMIZER)
        self._checkpoint_files.check_idle(what)
        if self._outgoing.adapters:
            self._find_base()
        return self._stored() | self._history.counters() | self._named(random_states(self._device))

    def _named(self, random: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name random states after this rank, which they belong to."""
        return {f"random.{kind}.{self._ranks.rank}": state for kind, state in random.items()}

    def _find_base(self) -> FrozenBase:
        """Return the model that adapters are trained on; its digests are computed once. All ranks together."""
        if self._base is None:
            self._base = FrozenBase(self._model.name_or_path, self._base_digest())
        return self._base

    def saved_bytes(self) -> int:
        return sum(local(tensor).nbytes for tensor in self._stored().values())

    def load(self, directory: str | Path) -> None:
        self._need("load", Part.WEIGHTS, Part.OPTIMIZER)
        directory = Path(directory)
        header = read_header(directory)
        check_adapters(directory, header.base, has_adapters=bool(self._outgoing.adapters))
        if header.base is not None:
            check_base(directory, header.base, self._find_base())
        counters = self._history.counters()
        # With another number of ranks each one keeps its own random states.
        random = random_states(self._device) if header.num_ranks == self._ranks.size else {}
        state = self._stored() | counters | self._named(random)
        self._restore(self._checkpoint_files.read(directory, state, self.optional_state))
        self._after_loading()
        self._history.restore(counters)
        set_random_states(random, self._device)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._need("the average of the weights", Part.WEIGHTS)
        if self._average is None:
            raise RunError("a moving average that was not asked for when training began")
        shards = self._shards()
        try:
            with self._average.in_place_of(shards):
                self._after_loading()
                yield
        finally:
            self._after_loading()

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        self._need("the model without adapters", Part.WEIGHTS)
        if not self._outgoing.adapters:
            raise RunError("a model without adapters was asked for, and this one has none")
        with adapters_off(self._model):
            yield

    def export(self, directory: str | Path, *, dtype: torch.dtype | None = None, facts: Facts = NO_FACTS) -> None:
        self._need("export", Part.WEIGHTS)
        directory, whole = Path(directory), {}
        for name, tensor in self.weights(dtype=self._outgoing.dtype(dtype)):
            if self._ranks.rank == 0:
                whole[exported_name(name, self._options)] = tensor.to("cpu", copy=True)
        if self._ranks.rank == 0:
            write_model(directory, self._model, whole, self._options, facts)
        if self._outgoing.adapters:
            trained = self._whole([name for name, weight in self._model.named_parameters() if weight.requires_grad])
            if self._ranks.rank == 0:
                save_adapter(directory / "adapter", self._model, trained)
        self._ranks.wait("export the model")

    def close(self) -> None:
        if self._progress.is_closed:
            return
        self._progress.is_closed = True
        self._checkpoint_files.close()
        del self._model, self._outgoing, self._average
        self._forward_pass.dropouts = ()
        self._residency.release()
        self._drop()
        self._forward_pass.sequence.close()
        self._ranks.close()
