"""What training backends have in common: rounds of micro-batches, the guard against updates that are not finite, what
is aside, and snapshots. `FSDPBackend` and `ZeroBackend` add how weights are sharded, stepped, streamed and stored.
"""

from __future__ import annotations

import copy
import json
import math
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hotseat import faults
from hotseat.errors import BatchError, DeviceMemoryError, NonFiniteError, NotBuiltError, RunError
from hotseat.observe.noise import without_deepspeeds_greeting
from hotseat.train.average import MovingAverage
from hotseat.train.backend import (
    PARTS,
    Loss,
    Outputs,
    Part,
    TrainOptions,
    UpdateReport,
    check_parts,
    check_temperature,
    needs_entropy,
)
from hotseat.train.experts import balancing_loss
from hotseat.train.fragments import Fragment
from hotseat.train.headroom import Meter, is_out_of_memory, release_memory, trial_batch
from hotseat.train.lora import Adapter, dropouts, find_adapters, save_adapter
from hotseat.train.models import exported_name
from hotseat.train.packing import LayoutKind, model_input
from hotseat.train.ranks import Ranks
from hotseat.train.residency import Shelf
from hotseat.train.sequence import SequenceGroup
from hotseat.types import MicroBatch, Moved

Result = TypeVar("Result")

# Rows of a weight as they leave, from its name, the live rows and the index of the first of them.
Merge = Callable[[str, Tensor, int], Tensor]

_MAX_NAMED = 16  # samples in an error message
_LAST_WRITE_S = 5.0  # for a snapshot that is being written when the backend is closed
_FORMAT = 1  # of checkpoints, the same for every backend: each weight and its optimizer state, whole, by name


class Trainer(ABC):
    """One rank. See `Backend` for the contract."""

    name: ClassVar[str]

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
            raise NotBuiltError(
                f"{type(model).__name__} cannot run packed, and only packed sequences can be cut over several ranks:"
                " set train.sequence_parallel_size to 1"
            )
        self._options = options
        self._ranks = ranks
        self._sequence = SequenceGroup(options.sequence_parallel_size, options.timeout_s)
        self._device = device
        self._model = model
        self._layout: LayoutKind = layout
        self._has_flash = has_flash
        self._version = 0
        self._num_skipped = 0
        self._skipped_samples: list[tuple[str, ...]] = []  # of the last updates in a row that were not finite
        self._shelves: dict[Part, Shelf] = {part: Shelf(device) for part in PARTS}
        self._aside: set[Part] = set()
        self._adapters: dict[str, Adapter] = {} if options.lora is None else find_adapters(model)
        self._dropouts = [] if options.lora is None else dropouts(model)
        self._base: dict[str, int] | None = None  # digests of what is frozen, when they are known
        self._average: MovingAverage | None = None
        if options.lora is not None and options.lora.dropout > 0:
            torch.manual_seed(options.lora.seed + ranks.rank)  # so that the same run drops the same
        self._is_halfway = False  # an update failed while it summed gradients
        self._num_begun = 0  # micro-batches of the call under way
        self._writing: Future[None] | None = None  # of a snapshot
        self._is_closed = False

    @classmethod
    @abstractmethod
    def check(cls, options: TrainOptions) -> None:
        """Before a model is loaded: raise if this backend does not have what is asked of it."""

    # --- what a backend adds ------------------------------------------------------------------------------------------

    @abstractmethod
    def _module(self) -> nn.Module:
        """What is called for a forward."""

    def _given(self, batch: MicroBatch) -> MicroBatch:
        """What the model gets for a micro-batch, whose tokens come first in it."""
        return batch

    @abstractmethod
    def _before_forward(self, is_last: bool) -> None:
        """Of a micro-batch to learn from; `is_last` of this update."""

    @abstractmethod
    def _backward(self, total: Tensor, is_last: bool) -> None:
        """Add the gradients of a loss; `is_last` of this update."""

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """This rank's share, when all of them are summed; all, where they are not sharded."""

    def _counted(self) -> list[float] | None:
        """How much of the square of each of them counts, where other ranks have the same; None: all of it."""
        return None

    @abstractmethod
    def _gradient_unit(self) -> float:
        """What they are multiples of."""

    @abstractmethod
    def _are_gradients_sharded(self) -> bool: ...

    @abstractmethod
    def _step(self, grad_norm: float, learning_rate: float) -> None:
        """Clip, and change the weights."""

    @abstractmethod
    def _forget_gradients(self) -> None: ...

    @abstractmethod
    def _lower_loss_scale(self) -> bool:
        """After gradients that are not finite: whether a scale of the loss may have been too high, and is lower now."""

    @abstractmethod
    def _can_go_on(self) -> bool:
        """Whether the rank can still be used after an update failed while it summed gradients."""

    @abstractmethod
    def _abandon(self) -> None:
        """Clear what a forward or backward that failed on a rank without others has left behind, but gradients."""

    @abstractmethod
    def _tensors(self, part: Part) -> list[Tensor]:
        """What `put_aside` takes off the device."""

    @abstractmethod
    def _stream(self, dtype: torch.dtype | None, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """As `weights`."""

    @abstractmethod
    def _take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As `take_weights`."""

    @abstractmethod
    def _stored(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint holds of this rank."""

    @abstractmethod
    def _after_loading(self) -> None:
        """Make everything follow from the tensors that were filled."""

    @abstractmethod
    def _after_scoring(self) -> None:
        """After forwards without a backward."""

    @abstractmethod
    def _whole(self, names: Collection[str]) -> dict[str, Tensor]:
        """Together. Trained weights by the model's own names, gathered."""

    @abstractmethod
    def _base_digest(self) -> dict[str, int]:
        """Together. As `digest`, of what is not trained."""

    @abstractmethod
    def _shards(self) -> dict[str, Tensor]:
        """What this rank holds of the trained weights: the tensors that are stepped, by the model's own names."""

    @abstractmethod
    def _drop(self) -> None:
        """Let go of what holds memory."""

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def movable(self) -> frozenset[Part]:
        return frozenset(PARTS) if self._device.type == "cuda" else frozenset()

    @property
    def is_padded(self) -> bool:
        return self._layout == "padded"

    def gather_facts(self, fact: Any, what: str, *, of_every_rank: bool = False) -> list[Any]:
        facts = self._ranks.gather(fact, what)
        return facts if of_every_rank else facts[:: self._options.num_sharing]

    # --- forward and backward -----------------------------------------------------------------------------------------

    def log_probs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        check_temperature(temperature)
        self._need("log_probs", "weights")
        self._need_head("policy", "log_probs")
        return self._score(micro_batches, "log_probs", temperature)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        self._need("values", "weights")
        self._need_head("value", "values")
        return self._score(micro_batches, "values", 1.0)

    def _score(self, micro_batches: Sequence[MicroBatch], what: str, temperature: float) -> list[Tensor]:
        found: list[tuple[Tensor, MicroBatch]] = []
        self._drop_out(False)
        work = self._in_step(micro_batches)

        @torch.no_grad()
        def score() -> None:
            try:
                for index, batch in enumerate(work):
                    self._num_begun = index + 1
                    faults.reach("score.forward")
                    scores = getattr(self._forward(batch or company(), temperature), what)
                    if batch is not None:
                        found.append((scores, batch))
            finally:
                self._after_scoring()

        self._within_memory(score, found.clear)
        # Only now: each copy waits until the device is done.
        each = iter([scores.to(batch.token_ids.device) for scores, batch in found])
        return [next(each) if batch.num_tokens > 0 else torch.zeros(0) for batch in micro_batches]

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> UpdateReport:
        check_temperature(temperature)
        self._need("update", "weights", "gradients", "optimizer")
        if self._options.optimizer is None:
            raise RunError("update of a model that was loaded without an optimizer, only to be scored")
        work = self._in_step(micro_batches)
        if not work:
            raise BatchError("update without a micro-batch on any rank: nothing to learn from")
        losses, metrics = self._within_memory(lambda: self._sum_gradients(work, loss, temperature))
        grad_norm = self._grad_norm()
        mine: list[float] = torch.stack(losses).tolist() if losses else []
        facts = self.gather_facts(
            {
                "loss": sum(mine),
                "metrics": _sum_metrics(metrics),
                "tokens": sum(batch.num_tokens for batch in micro_batches),
                "sampled": sum(int(batch.mask.sum()) for batch in micro_batches),
                "suspects": () if math.isfinite(sum(mine)) else _suspects(micro_batches, mine),
                "samples": () if math.isfinite(grad_norm) else _first_samples(micro_batches),
            },
            "add up the losses of an update",
        )
        step_loss = sum(fact["loss"] for fact in facts)
        learning_rate = self._options.schedule.learning_rate(self._version)
        faults.reach("update.middle")
        is_finite = math.isfinite(step_loss) and math.isfinite(grad_norm)
        is_scale = not is_finite and math.isfinite(step_loss) and self._lower_loss_scale()
        if is_finite:
            self._step(grad_norm, learning_rate)
            self._version += 1
            if self._average is not None:
                self._average.update(self._shards())
        self._forget_gradients()
        self._count(is_finite, is_scale, step_loss, grad_norm, facts)
        return UpdateReport(
            version=self._version,
            loss=step_loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            is_skipped=not is_finite,
            num_skipped=self._num_skipped,
            num_tokens=sum(fact["tokens"] for fact in facts),
            num_sampled=sum(fact["sampled"] for fact in facts),
            metrics=_add_up([fact["metrics"] for fact in facts]),
        )

    def _sum_gradients(
        self, work: Sequence[MicroBatch | None], loss: Loss, temperature: float
    ) -> tuple[list[Tensor], list[Mapping[str, Tensor | float]]]:
        """Gradients summed over `work` and all ranks; the loss and metrics of each micro-batch of this rank."""
        losses, metrics = [], []
        self._drop_out(True)
        coefficient, num_tokens = self._options.aux_loss_coefficient, 0
        if coefficient:
            mine = sum(batch.num_tokens for batch in work if batch is not None)
            num_tokens = sum(self.gather_facts(mine, "count the tokens of an update"))
        # Until the last micro-batch gradients are kept where a failure would leave them for the next update.
        self._is_halfway = True
        for index, batch in enumerate(work):
            if index:
                faults.reach("update.micro-batch")
            is_last = index == len(work) - 1
            self._num_begun = index + 1
            self._before_forward(is_last)
            faults.reach("update.forward")
            if batch is None:
                outputs = self._forward(company(), temperature, needs_entropy(loss), coefficient > 0)
                self._backward(sum((value * 0.0).sum() for value in outputs.tensors()), is_last)
                continue
            there = batch.to(self._device)  # before the forward, so that nothing waits for the forward's end
            outputs = self._forward(batch, temperature, needs_entropy(loss), coefficient > 0)
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
        self._is_halfway = False
        return losses, metrics

    def _within_memory(self, do: Callable[[], Result], forget: Callable[[], object] = lambda: None) -> Result:
        """Return what `do` returns. If the device runs out of memory, undo it where that can be, and say so.

        `forget`: lets go of what `do` has kept elsewhere.
        """
        random = self._random_states() if self._dropouts else {}
        try:
            return do()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        # Not while the error is being handled: its frames hold the activations of what failed.
        forget()
        is_undone = self._ranks.size == 1 and self._can_go_on()
        if is_undone:
            self._undo()
            self._set_random_states(random)
        release_memory(self._device)
        raise DeviceMemoryError(reason, index=self._num_begun - 1, is_undone=is_undone)

    def _undo(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # nothing is let go that a kernel still reads
        self._abandon()
        self._forget_gradients()
        self._is_halfway = False

    def _random_states(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _set_random_states(self, states: Mapping[str, Tensor]) -> None:
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self._device)

    def fits(self, num_tokens: int, max_length: int, *, is_update: bool, with_entropy: bool = False) -> bool:
        parts: tuple[Part, ...] = ("weights", "gradients", "optimizer") if is_update else ("weights",)
        self._need("a trial of micro-batches", *parts)
        random = self._random_states()

        def has_room(count: int, times: float) -> bool:
            """Tell whether a micro-batch with `times` as many tokens as this one fits on every rank."""
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

        # A rank that runs out of memory alone leaves the others waiting: they find out with less what it would take.
        is_small = self._ranks.size > 1 and num_tokens >= 2 * max_length
        fit = (not is_small or has_room(num_tokens // 2, num_tokens / (num_tokens // 2))) and has_room(num_tokens, 1.0)
        self._set_random_states(random)
        release_memory(self._device)
        return fit

    def _try_out(self, batch: MicroBatch, is_update: bool, with_entropy: bool) -> None:
        """A forward of made-up tokens, and a backward that adds nothing to any gradient."""
        self._drop_out(is_update)
        self._num_begun = 1
        if not is_update:
            faults.reach("trial.forward")
            with torch.no_grad():
                self._forward(batch, 1.0, with_entropy)
            self._after_scoring()
            return
        self._is_halfway = True
        # Among several ranks gradients stay whole on each of them until the last micro-batch.
        for is_last in (False, True) if self._ranks.size > 1 else (True,):
            self._before_forward(is_last)
            faults.reach("trial.forward")
            outputs = self._forward(batch, 1.0, with_entropy, self._options.aux_loss_coefficient > 0)
            self._backward(sum((value * 0.0).sum() for value in outputs.tensors()), is_last)
        self._forget_gradients()
        self._is_halfway = False

    def _grad_norm(self) -> float:
        """Of all gradients of all ranks together."""
        norms = torch.stack([norm.to(self._device) for norm in _norms(self._gradients())])
        squares, counted = norms.square_(), self._counted()
        total = squares.sum() if counted is None else squares @ squares.new_tensor(counted)
        if self._ranks.size > 1 and self._are_gradients_sharded():
            dist.all_reduce(total)
        return float(total.sqrt_()) * self._gradient_unit()

    def _clip_factor(self, grad_norm: float) -> float:
        """With the same small term as torch's own clipping, so that a reference loop agrees to the last bits."""
        limit = self._options.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))

    def _in_step(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch | None]:
        """This rank's micro-batches, then None until it has as many as the rank that has most."""
        real = [batch for batch in micro_batches if batch.num_tokens > 0]
        most = self._ranks.max(len(real), "agree on the number of micro-batches")
        return [*real, *[None] * (most - len(real))]

    def _forward(
        self, batch: MicroBatch, temperature: float, with_entropy: bool = False, with_routing: bool = False
    ) -> Outputs:
        given = self._given(batch)
        inputs = model_input(
            given,
            self._layout,
            device=self._device,
            has_flash=self._has_flash,
            group=self._sequence,
            with_counts=with_routing,
        )
        found: dict[str, Tensor] = self._module()(inputs, temperature, with_entropy)
        routing = found.pop("routing", None)
        aux_loss = None if routing is None else balancing_loss(self._sequence.add_up(routing))

        def flat(values: Tensor) -> Tensor:
            mine = values.new_zeros(given.num_tokens).index_copy(0, inputs.tokens, values)
            return self._sequence.add_up(mine)[: batch.num_tokens]

        return Outputs(**{name: flat(values) for name, values in found.items()}, aux_loss=aux_loss)

    def _drop_out(self, is_on: bool) -> None:
        for dropout in self._dropouts:
            dropout.train(is_on)

    def _count(
        self, is_finite: bool, is_scale: bool, loss: float, grad_norm: float, facts: list[dict[str, Any]]
    ) -> None:
        if is_finite:
            self._skipped_samples = []
            return
        self._num_skipped += 1
        if is_scale:  # no sample is to blame
            return
        suspects = tuple(sample for fact in facts for sample in fact["suspects"])
        self._skipped_samples.append(suspects or tuple(sample for fact in facts for sample in fact["samples"]))
        if len(self._skipped_samples) < self._options.max_non_finite:
            return
        named = list(dict.fromkeys(sample for samples in self._skipped_samples for sample in samples))
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        raise NonFiniteError(
            f"{len(self._skipped_samples)} updates in a row were not finite (last: loss {loss}, gradient norm"
            f" {grad_norm}), after version {self._version}; samples: {', '.join(named[:_MAX_NAMED])}{more}. Look at"
            " their rewards and advantages, or lower the learning rate"
        )

    # --- residency ----------------------------------------------------------------------------------------------------

    def put_aside(self, parts: Collection[Part]) -> Moved:
        self._need("put_aside")
        check_parts(parts)
        moved = Moved(0, 0, 0.0)
        for part in (part for part in PARTS if part in parts and part not in self._aside):
            if part in self.movable:
                moved += self._shelves[part].put_aside(self._tensors(part))
            self._aside.add(part)
        return moved

    def bring_back(self, parts: Collection[Part]) -> Moved:
        self._need("bring_back")
        check_parts(parts)
        moved = Moved(0, 0, 0.0)
        for part in (part for part in PARTS if part in parts and part in self._aside):
            if part in self.movable:
                moved += self._shelves[part].bring_back()
            self._aside.remove(part)
        return moved

    def _need(self, what: str, *parts: Part) -> None:
        if self._is_closed:
            raise RunError(f"{what} of a backend that is closed")
        if self._is_halfway and not self._can_go_on():
            raise RunError(f"{what} after an update that failed halfway: load the last checkpoint in a new process")
        if self._is_halfway:
            self._undo()
        missing = [part for part in parts if part in self._aside]
        if missing:
            raise RunError(f"{what} needs {' and '.join(missing)} on the device: bring them back first")

    def _need_head(self, head: str, what: str) -> None:
        if self._options.head != head:
            raise RunError(f"{what} of a {self._options.head} model, which has a head of another kind")

    # --- weights out, and on disk -------------------------------------------------------------------------------------

    def weights(self, *, dtype: torch.dtype | None = None, bucket_bytes: int = 2**28) -> Iterator[tuple[str, Tensor]]:
        self._need("weights", "weights")
        return self._stream(dtype, bucket_bytes)

    def _outward(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """The type in which weights leave if nobody asks for one: their own. A frozen base may have fewer bits than
        what is trained, and than the two merged."""
        if dtype is not None or not self._adapters:
            return dtype
        return torch.bfloat16 if self._options.precision == "bf16" else torch.float32

    def _type_of(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        """The type in which a buffer leaves: `dtype`, unless transformers keeps it in 32 bits wherever it is loaded."""
        kept = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        return None if set(name.split(".")) & set(kept) else dtype

    def _factor_names(self) -> list[str]:
        return [name for each in self._adapters.values() for name in (each.a, each.b)]

    def _merging(self, factors: Mapping[str, Tensor]) -> Merge:
        """What merges adapters into weights that leave, from all their factors, whole."""

        def merged(name: str, rows: Tensor, first_row: int) -> Tensor:
            adapter = self._adapters.get(name)
            return rows if adapter is None else adapter.merge(rows, first_row, factors[adapter.a], factors[adapter.b])

        return merged

    def take_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._need("take_weights", "weights")
        if self._options.optimizer is not None:
            raise RunError("take_weights of a model that is trained: what it has learned would be lost")
        self._take(named_tensors)

    def save(self, directory: str | Path) -> None:
        self._write(Path(directory), self._to_save("save"))

    def snapshot(self, directory: str | Path) -> None:
        state = self._to_save("snapshot")
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        writing: Future[None] = Future()

        def write() -> None:
            try:
                self._write(Path(directory), copied)
            except BaseException as error:  # torch's own is no `Exception`
                writing.set_exception(error)
            else:
                writing.set_result(None)
            finally:
                copied.clear()  # who keeps the future must not keep the memory

        self._writing = writing
        # Not a pool: its threads would be waited for when the interpreter ends, and a disk may hang.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    def is_written(self) -> bool:
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def _to_save(self, what: str) -> dict[str, Tensor]:
        """All that `save` writes: the live tensors, counters and random states."""
        self._need(what, "weights", "optimizer")
        if self._writing is not None:
            raise RunError(f"{what} while the snapshot before is being written: wait until `is_written` says it is")
        if self._adapters and self._base is None:
            self._base = self._base_digest()
        counters = {"version": self._version, "num_skipped": self._num_skipped}
        state = self._stored() | {f"counter.{name}": torch.tensor(value) for name, value in counters.items()}
        return state | {f"random.{kind}.{self._ranks.rank}": value for kind, value in self._random_states().items()}

    def _write(self, directory: Path, state: dict[str, Tensor]) -> None:
        """Together, perhaps in a thread. Put what `_to_save` gave, or a copy of it, on disk."""
        if self._ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            kind: dict[str, Any] = {"backend": self.name, "format": _FORMAT, "num_ranks": self._ranks.size}
            if self._base is not None:
                kind["base"] = {"model": self._model.name_or_path, "digests": self._base}
            (directory / "backend.json").write_text(json.dumps(kind) + "\n")
        self._ranks.wait_to_save("create the folder of a checkpoint")
        faults.reach("save.during")
        _alone_is_fine()
        dcp.save(state, checkpoint_id=directory, process_group=self._ranks.saving, no_dist=self._ranks.size == 1)

    def _read(self, directory: Path, state: dict[str, Tensor]) -> None:
        """Together. Fill tensors, such as `_to_save` gives, from disk."""
        _alone_is_fine()
        try:
            dcp.load(state, checkpoint_id=directory, process_group=self._ranks.saving, no_dist=self._ranks.size == 1)
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items())
            raise RunError(f"{directory} does not fit this model and optimizer: {reasons}") from error

    def saved_bytes(self) -> int:
        return sum(local(tensor).nbytes for tensor in self._stored().values())

    def load(self, directory: str | Path) -> None:
        self._need("load", "weights", "optimizer")
        directory = Path(directory)
        kind = _read_kind(directory)
        self._check_base(directory, kind.get("base"))
        counters = {name: torch.tensor(0) for name in ("version", "num_skipped")}
        state = self._stored() | {f"counter.{name}": value for name, value in counters.items()}
        random: dict[str, Tensor] = {}
        # With another number of ranks nothing says which random state continues which: each rank goes on with its own.
        if kind["num_ranks"] == self._ranks.size:
            random = self._random_states()
            state |= {f"random.{kind}.{self._ranks.rank}": value for kind, value in random.items()}
        self._read(directory, state)
        self._after_loading()
        self._version, self._num_skipped = int(counters["version"]), int(counters["num_skipped"])
        self._skipped_samples = []
        self._set_random_states(random)

    def _check_base(self, directory: Path, base: dict[str, Any] | None) -> None:
        """Together. A checkpoint of adapters is worth nothing on another model."""
        if (base is not None) != bool(self._adapters):
            had, has = ("adapters", "all weights") if base is not None else ("all weights", "adapters")
            raise RunError(f"{directory} was saved when {had} were trained, and now {has} are: set LoRA as it was then")
        if base is None:
            return
        if self._base is None:
            self._base = self._base_digest()
        other = [name for name in self._base | base["digests"] if self._base.get(name) != base["digests"].get(name)]
        if other:
            raise RunError(
                f"{directory} holds adapters of {base['model'] or 'a model'}, which was another than"
                f" {self._model.name_or_path or 'this one'} is now: {other[0]} differs, {len(other)} weights in all; go"
                " on with the model that they were trained on"
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._need("the average of the weights", "weights")
        if self._average is None:
            raise RunError("a moving average that was not asked for when training began")
        shards = self._shards()
        try:
            with self._average.in_place_of(shards):
                self._after_loading()
                yield
        finally:
            self._after_loading()

    def export(
        self,
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._need("export", "weights")
        directory, whole = Path(directory), {}
        for name, tensor in self.weights(dtype=self._outward(dtype)):
            if self._ranks.rank == 0:
                whole[exported_name(name, self._options)] = tensor.to("cpu", copy=True)
        if self._ranks.rank == 0:
            # Without weights of its own, and unsharded: only what it knows about names and files is wanted.
            with torch.device("meta"):
                shell = type(self._model)(copy.deepcopy(self._model.config)).to(next(iter(whole.values())).dtype)
            if self._options.head == "policy":
                shell.generation_config = self._model.generation_config
            else:
                shell.config.value_head_prefix = self._options.value_head_prefix
            for name, fact in facts.items():
                setattr(shell.config, name, fact)
            with without_deepspeeds_greeting():
                shell.save_pretrained(directory, state_dict=whole)
        if self._adapters:
            trained = self._whole([name for name, weight in self._model.named_parameters() if weight.requires_grad])
            if self._ranks.rank == 0:
                save_adapter(directory / "adapter", self._model, trained)
        self._ranks.wait("export the model")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._writing is not None:
            wait([self._writing], timeout=_LAST_WRITE_S)  # its folder may be removed next
        del self._model, self._shelves, self._dropouts, self._average
        self._drop()
        self._sequence.close()
        self._ranks.close()


def company() -> MicroBatch:
    """What a rank without work runs, so that the others are not alone in a collective.

    Of all that is counted, nothing is one and no two are equal: a compiler would take either for a rule.
    """
    return MicroBatch(
        token_ids=torch.zeros(13, dtype=torch.int64),
        offsets=torch.tensor([0, 4, 13]),
        mask=torch.arange(13) >= 11,
        weights=torch.zeros(13),
        sample_ids=("", ""),
    )


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """[1] each, in float32."""
    found: Sequence[Tensor] = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    return found


def _sum_metrics(metrics: Sequence[Mapping[str, Tensor | float]]) -> dict[str, Any]:
    """Each metric's sum over micro-batches, with one transfer from the device."""
    values = [(name, value) for sums in metrics for name, value in sums.items()]
    tensors = [value.detach().double().reshape(-1) for _, value in values if isinstance(value, Tensor)]
    numbers = iter(torch.cat(tensors).tolist() if tensors else [])

    def number(value: Tensor | float) -> Any:
        if not isinstance(value, Tensor):
            return value
        return next(numbers) if value.ndim == 0 else [next(numbers) for _ in range(value.numel())]

    return _add_up([{name: number(value)} for name, value in values])


def _add_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in totals:
                totals[name] = value
            elif isinstance(value, list):
                totals[name] = [a + b for a, b in zip(totals[name], value, strict=True)]
            else:
                totals[name] = max(totals[name], value) if name.endswith("_max") else totals[name] + value
    return totals


def _suspects(micro_batches: Sequence[MicroBatch], losses: Sequence[float]) -> tuple[str, ...]:
    """Samples of the micro-batches whose loss is not finite: those with a value that is not, or else all."""
    found: list[str] = []
    real = [batch for batch in micro_batches if batch.num_tokens > 0]
    for batch, loss in zip(real, losses, strict=True):
        if math.isfinite(loss):
            continue
        is_bad = torch.zeros(batch.num_segments, dtype=torch.bool)
        segment = batch.layout.token_segment.cpu()
        for values in (batch.weights, *batch.fields.values()):
            bad = ~values.detach().cpu().double().isfinite().reshape(values.shape[0], -1).all(-1)
            is_bad[segment[bad] if values.shape[0] == batch.num_tokens else bad] = True
        chosen = is_bad.nonzero().squeeze(-1).tolist() or range(batch.num_segments)
        found += [batch.sample_ids[place] for place in chosen]
    return tuple(dict.fromkeys(found))


def _first_samples(micro_batches: Sequence[MicroBatch]) -> tuple[str, ...]:
    """All samples of this rank."""
    return tuple(dict.fromkeys(sample for batch in micro_batches for sample in batch.sample_ids))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is sharded, or all of one that is not."""
    if isinstance(tensor, Fragment):
        return tensor.flat
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def convert(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _read_kind(directory: Path) -> dict[str, Any]:
    try:
        kind: dict[str, Any] = json.loads((directory / "backend.json").read_text())
    except FileNotFoundError:
        raise RunError(f"{directory} holds no state of a training backend: it has no backend.json") from None
    if kind.get("format") != _FORMAT:
        raise RunError(
            f"{directory} was saved in format {kind.get('format')}, and this version reads format {_FORMAT}: go on with"
            " the version of Hotseat that wrote it"
        )
    return kind


def _alone_is_fine() -> None:
    """torch warns that one rank saves alone, which it was told.

    For good: `catch_warnings` changes what every thread sees, and a checkpoint may be written by one of several.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
