"""The contract of every training backend, and its types.

A backend is one rank of a model under training. All ranks call the same methods in the same order, and a method marked
"all ranks together" waits for the others. Ranks may bring different micro-batches to such a call, in number and size,
down to none at all. Only model-parallel ranks, which share sequences (`sequence`) or layers (`tensor`), bring the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from hotseat.algorithms.adapters import WeightForm
from hotseat.algorithms.distillation import Divergence
from hotseat.errors import UnsupportedError, UserError
from hotseat.placement.role_names import Part
from hotseat.registry.backends import DEFAULT_BACKEND
from hotseat.train.divergence import Head as TeacherHead
from hotseat.train.packing import LayoutKind
from hotseat.train.schedule import Schedule
from hotseat.types import MicroBatch, Moved

PARTS: tuple[Part, ...] = (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER)

Precision = Literal["fp32", "bf16_master", "bf16", "fp16"]
GradDtype = Literal["fp32", "bf16", "fp16"]
Facts = Mapping[str, Any]  # further entries of config.json
NO_FACTS: Facts = MappingProxyType({})
Head = Literal["policy", "value"]  # log-probs over the vocabulary, or one number per token (critic, reward model)


@dataclass(frozen=True)
class AdamW:
    """The optimizer's settings: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, as in torch.

    Weights decay only if they have two dimensions or more: matrices and embeddings, not norms and biases.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Muon:
    """Settings of Muon, which steps the matrices inside a model while AdamW steps all else; see `muon`."""

    learning_rate: float = 0.02  # at its peak; the schedule has AdamW's
    momentum: float = 0.95


@dataclass(frozen=True)
class LoraOptions:
    """Settings of adapters, which are trained instead of weights; see `lora`.

    The only dropout is that in front of adapters, and only in the forwards of `update`: `log_probs` and `values` never
    drop, so that they score the policy that engines sample from. In rl the ratio to old log-probs then scatters around
    one from the first step of a rollout, which is why the default is 0.
    """

    rank: int
    alpha: float = 16
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = "all-linear"  # ends of names; or a pattern for whole names
    seed: int = 0  # of the initial values, and of dropout


@dataclass(frozen=True)
class ZeroOptions:
    """Settings of the DeepSpeed backend alone."""

    stage: int = 2  # of ZeRO: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also weights
    adam_offload: bool = False  # optimizer state stays in host memory, and is stepped there
    zpg: int = 1  # ranks that keep a second copy of the weights among them (ZeRO++)
    overlap_comm: bool = False  # gradients are summed over ranks during the backward pass
    grad_accum_dtype: GradDtype | None = None  # None: DeepSpeed's choice, the type of the computation
    deepcompile: bool = False  # DeepSpeed compiles the model as a whole; see `deepcompile`
    tensor_parallel_size: int = 1  # ranks that share each layer, and each micro-batch; see `tensor`

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise UserError(f"ZeRO stage {self.stage}: choose 0, 1, 2 or 3")
        if self.zpg < 1 or (self.zpg > 1 and self.stage < 3):
            raise UserError(
                f"zpg {self.zpg} with ZeRO stage {self.stage}: only stage 3 shards weights, of which ZeRO++ keeps a"
                " second copy; set zpg to 1 or the stage to 3"
            )
        if self.adam_offload and self.stage == 0:
            raise UserError(
                "adam_offload with ZeRO stage 0: DeepSpeed offloads what it shards; set the stage to 1 or more"
            )
        if self.grad_accum_dtype is not None and self.grad_accum_dtype not in get_args(GradDtype):
            raise UserError(
                f"grad_accum_dtype {self.grad_accum_dtype!r}: choose one of {', '.join(get_args(GradDtype))}"
            )
        if self.tensor_parallel_size > 1 and self.stage == 3:
            raise UnsupportedError(
                f"tensor_parallel_size {self.tensor_parallel_size} with ZeRO stage 3: layers that are cut are not"
                " sharded as well; set the stage to 0, 1 or 2, or tensor_parallel_size to 1"
            )


@dataclass(frozen=True)
class TrainOptions:
    """Settings of every backend."""

    head: Head = "policy"
    value_head_prefix: str = "score"  # of the names of a value model's head in checkpoints
    # bf16_master: 16-bit compute from 32-bit weights, gradients summed in 32 bits. bf16: everything in 16 bits.
    # fp16: as bf16_master, and the loss is scaled; DeepSpeed only. `grad_accum_dtype` says how it sums gradients.
    precision: Precision = "fp32"
    optimizer: AdamW | None = field(default_factory=AdamW)  # None: the model is only scored, never updated
    muon: Muon | None = None  # None: AdamW steps every weight
    schedule: Schedule = field(default_factory=Schedule)
    aux_loss_coefficient: float = 0.0  # of the balancing loss of a mixture of experts; see `experts`
    replays_routing: bool = False  # tokens take the experts that the engine recorded; see `algorithms.routing`
    max_grad_norm: float | None = 1.0  # of all gradients together; None: not clipped
    lora: LoraOptions | None = None  # None: all weights are trained
    has_nf4: bool = False  # frozen weights of linear layers are in NF4; see `algorithms.nf4`
    average_decay: float | None = None  # beta of the moving average of what is trained; None: there is none
    gradient_checkpointing: bool = False
    checkpointed_layers: int | None = None  # how many layers recompute their activations; None: all
    compile: bool | None = False  # torch.compile of the layers; None: on a CUDA device, if kernels can be built there
    liger_kernel: bool = False  # Liger's kernels in the layers instead; see `liger`
    freeze_visual_encoder: bool = False  # of a VLM
    filler_image: str | None = None  # prepared, for ranks without images; None: the model is no VLM
    layout: LayoutKind = "auto"  # see `packing`
    attention: str | None = None  # an implementation of transformers, for padded rows; None: see `attention`
    is_deterministic: bool = False  # deterministic kernels only
    sequence_parallel_size: int = 1  # ranks that share the sequences of each micro-batch; see `sequence`
    max_non_finite: int = 3  # the run ends after this many updates in a row whose loss or gradient is not finite
    timeout_s: float = 600.0  # for one rank to wait for the others
    backend: str = DEFAULT_BACKEND  # its name in the registry
    zero: ZeroOptions | None = None  # None: a backend without them, or with their defaults

    def __post_init__(self) -> None:
        for name, kind in (("precision", Precision), ("head", Head), ("layout", LayoutKind)):
            if vars(self)[name] not in get_args(kind):
                raise UserError(f"{name} {vars(self)[name]!r}: choose one of {', '.join(get_args(kind))}")
        if self.attention is not None and self.layout != "padded":
            raise UserError(
                f"train.attention is {self.attention}, which does not keep packed sequences apart: set train.packing to"
                " false, or leave train.attention unset"
            )
        if self.muon is not None:
            self._check_muon(self.muon)
        if self.sequence_parallel_size > 1 and self.layout == "padded":
            raise UserError(
                f"train.sequence_parallel_size is {self.sequence_parallel_size}, and only packed sequences can be cut"
                " over several ranks: set train.packing to true"
            )
        if self.liger_kernel and self.compile:
            raise UserError(
                "train.liger_kernel and train.compile are both true, and both fuse what is in a layer: leave"
                " train.compile unset, or set train.liger_kernel to false"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise UserError(f"gradients clipped to norm {self.max_grad_norm}: set it above 0, or to none to not clip")
        if self.lora is not None and (self.lora.rank < 1 or not 0 <= self.lora.dropout < 1):
            raise UserError(
                f"adapters of rank {self.lora.rank} with dropout {self.lora.dropout}: the rank must be 1 or more, the"
                " dropout at least 0 and below 1"
            )
        if self.average_decay is not None and not 0 <= self.average_decay <= 1:
            raise UserError(f"a moving average that keeps {self.average_decay} of itself: set it to 0 to 1")
        if self.max_non_finite < 1:
            raise UserError(f"stop after {self.max_non_finite} updates that are not finite: set it to 1 or more")
        if not self.timeout_s > 0:
            raise UserError(f"ranks wait {self.timeout_s} s for each other: set it above 0")

    def _check_muon(self, muon: Muon) -> None:
        if not (muon.learning_rate >= 0 and math.isfinite(muon.learning_rate)) or not 0 <= muon.momentum < 1:
            raise UserError(
                f"Muon with learning rate {muon.learning_rate} and momentum {muon.momentum}: the rate must be finite, 0"
                " or more, the momentum at least 0 and below 1"
            )
        if self.precision == "bf16" and self.optimizer is not None:
            raise UserError(
                "Muon on weights in pure bf16: its steps are of one size for all entries of a matrix, and large entries"
                " would round them away; set train.fp32_master to true, or the optimizer's kind to adamw"
            )
        if self.tensor_parallel_size > 1:
            raise UnsupportedError(
                f"Muon with train.deepspeed.tensor_parallel_size {self.tensor_parallel_size}: it needs whole matrices,"
                " and layers are cut; set the size to 1, or the optimizer's kind to adamw"
            )
        if self.zero is not None and self.zero.adam_offload:
            raise UnsupportedError(
                "Muon with train.deepspeed.adam_offload: matrices would be orthogonalised on the CPU; set adam_offload"
                " to false, or the optimizer's kind to adamw"
            )
        if self.zero is not None and self.zero.deepcompile:
            raise UnsupportedError(
                "Muon with train.deepspeed.deepcompile: set deepcompile to false, or the optimizer's kind to adamw"
            )

    @property
    def tensor_parallel_size(self) -> int:
        return 1 if self.zero is None else self.zero.tensor_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Return the number of neighbouring ranks that share each micro-batch, by sequences or by layers."""
        return self.sequence_parallel_size * self.tensor_parallel_size


@dataclass(frozen=True)
class Outputs:
    """The model's outputs for a micro-batch, with gradient. [num_tokens] each, 0 where `MicroBatch.mask` is not set.

    Entry t belongs to token t, given what precedes it in its segment. A policy has log-probs, a value model has values.
    """

    log_probs: Tensor | None = None  # at the temperature
    entropy: Tensor | None = None  # of the distribution the token was drawn from; only if asked for
    values: Tensor | None = None
    divergence: Tensor | None = None  # from the teacher's distribution; only where a teacher gave one
    # Of a teacher, what a policy is to learn from: see `divergence.TeacherRows`. [num_tokens, ...] each.
    teacher_ids: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    teacher_hidden: Tensor | None = None
    aux_loss: Tensor | None = None  # one number: the balancing loss of a mixture of experts; only if it is learned from

    def tensors(self) -> list[Tensor]:
        return [value for value in vars(self).values() if value is not None]


class Loss(Protocol):
    """A loss: returns Σ weights · loss per token of one micro-batch, and metrics that are summed over its tokens.

    A metric may be a vector, whose entries are summed one by one. If a metric's name ends in `_max`, its largest value
    is kept instead of the sum. If the loss has a true attribute `needs_entropy`, `outputs.entropy` is computed for it.
    If it has an attribute `divergence`, an `algorithms.distillation.Divergence`, `outputs.divergence` is computed for
    micro-batches that have what a teacher gave (`divergence.TEACHER_FIELDS`).
    """

    def __call__(self, outputs: Outputs, micro_batch: MicroBatch, /) -> tuple[Tensor, Mapping[str, Tensor | float]]: ...


@dataclass(frozen=True)
class UpdateReport:
    """The result of one update, the same on every rank."""

    version: int  # of the weights now: how many updates they have had
    loss: float  # summed over all micro-batches of all ranks
    grad_norm: float  # of all gradients together, before clipping
    learning_rate: float
    is_skipped: bool  # loss or gradient was not finite: weights and optimizer are as before
    num_skipped: int  # updates skipped so far
    num_tokens: int
    num_sampled: int  # tokens under the mask
    metrics: Mapping[str, Any]  # the loss's own sums, over all micro-batches of all ranks: numbers, lists for vectors


class Backend(Protocol):
    """One rank of a model under training."""

    @property
    def version(self) -> int:
        """Count the updates that the weights have had, those before a `load` included. A skipped update is not one."""

    @property
    def movable(self) -> frozenset[Part]:
        """List the parts that `offload` really takes off the device: none where device and host memory are the same."""

    @property
    def is_padded(self) -> bool:
        """Tell whether every micro-batch is padded, so that padding costs as much as tokens."""

    def gather_facts(self, fact: Any, what: str, *, of_every_rank: bool = False) -> list[Any]:
        """Gather one small fact from every rank, in rank order. All ranks together.

        what: the purpose, for the error message if a rank is missing. of_every_rank: also from each of the
        model-parallel ranks that share the same micro-batches; by default only from the first of them.
        """

    def log_probs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Score each micro-batch: [num_tokens] float32, on its device, without gradient. All ranks together.

        Entry t is the log-prob of token t given what precedes it in its segment, of the distribution at the
        temperature. 0 for the first token of a segment and where the mask is not set: those are not computed.
        """

    def teach(
        self, micro_batches: Sequence[MicroBatch], temperature: float, how: Divergence
    ) -> list[dict[str, Tensor]]:
        """Score as `log_probs` does, and return with the `log_probs` what a policy that learns by `how` needs of this
        model's distributions: the fields of its micro-batches, by name. All ranks together.
        """

    def learn_from(self, head: TeacherHead | None) -> None:
        """Take the head of a teacher whose hidden states micro-batches will have; None: none any more."""

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Score as `log_probs` does, with a value model: entry t is its number for what precedes token t."""

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> UpdateReport:
        """Take one optimizer step from the micro-batches of all ranks. All ranks together.

        Gradients are summed over micro-batches and ranks, never averaged: the weights of `MicroBatch` contain every
        factor. A rank with fewer micro-batches than another runs filler batches meanwhile. A step whose loss or
        gradient norm is not finite changes nothing and is counted; `NonFiniteError` names the samples after too many
        in a row. All ranks decide alike. The balancing loss of a mixture of experts, if it has a coefficient, is
        added here, and is the metric `aux_loss`.

        Raises `DeviceMemoryError` if the device runs out of memory, as `log_probs` and `values` do. A single rank has
        then undone the whole call, gradients and random numbers included, and can be called again.
        """

    def fits(self, num_tokens: int, max_length: int, *, is_update: bool, with_entropy: bool = False) -> bool:
        """Tell whether every rank has memory for a micro-batch of `num_tokens`, and a margin. All ranks together.

        Made-up sequences of `max_length` go forward, and for `is_update` also backward. Weights, optimizer,
        version and random numbers stay as they are, and no memory is kept.
        """

    def warm_up(self, max_length: int) -> None:
        """Run small made-up micro-batches, so that what has to be compiled for scores and updates is. All ranks.

        Weights, optimizer, version and random numbers stay as they are, and no memory is kept.
        """

    def offload(self, parts: Collection[Part]) -> Moved:
        """Take these parts off the device into pinned host memory and give the device memory back.

        Parts that are offloaded already stay there. Gradients exist only during `update`, so between updates they are
        0 bytes. Until `onload`, a call that needs an offloaded part raises `RunError`, also where nothing moved.
        """

    def onload(self, parts: Collection[Part]) -> Moved:
        """Undo `offload`, bit for bit. Parts that are resident are left as they are."""

    def weights(
        self, *, dtype: torch.dtype | None = None, bucket_bytes: int = 2**28, form: WeightForm = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight once, whole, under its Hugging Face name; tied ones under the first.

        All ranks together, and to the end.

        form: of a model with adapters, merged or not; see `algorithms.adapters`.

        Sharded weights are gathered a bucket at a time, after conversion to `dtype`. A tensor may be the live weight or
        a piece of the bucket: it is to be read, not kept, and only until the next one is asked for.
        """

    def take_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights of a model that is only scored, by whole ones as `weights` yields them. Ranks do not wait."""

    def digest(self, *, dtype: torch.dtype | None = None, form: WeightForm = "merged") -> dict[str, int]:
        """Hash every weight that `weights` would yield, by name: 64 bits, equal for equal bits. All ranks together."""

    def save(self, directory: str | Path) -> None:
        """Write weights, optimizer, version and random state, each rank its share, into a folder that all ranks see.

        All ranks together. With adapters only trained weights are written: `load` makes sure that the others are the
        same. Files are neither hashed nor made current: the caller makes a checkpoint of the folder.
        """

    def snapshot(self, directory: str | Path) -> None:
        """Save in the background: return when everything is copied to host memory; a thread writes the copy.

        All ranks together. The files hold the state at the time of the call. Until `is_written` is true, another `save`
        or `snapshot` raises `RunError`.
        """

    def is_written(self) -> bool:
        """Tell whether this rank's share of the last `snapshot` is on disk. Raises once if writing it has failed."""

    def saved_bytes(self) -> int:
        """Estimate the bytes that this rank's share takes: of `save` on disk, of `snapshot` in host memory."""

    def load(self, directory: str | Path) -> None:
        """Load what `save` wrote, also with another number of ranks. All ranks together.

        The caller has checked the manifest.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Put the moving average in place of the weights inside the context. All ranks together."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Switch adapters off inside the context, in which the model scores as the one that they are trained on."""

    def export(self, directory: str | Path, *, dtype: torch.dtype | None = None, facts: Facts = NO_FACTS) -> None:
        """Write a Hugging Face model in safetensors, by the first rank. All ranks together.

        The caller writes the tokenizer. Adapters are merged, and also written to `adapter/` in PEFT's format.
        """

    def close(self) -> None:
        """Give memory and connections back. Nothing can be called afterwards but `close`."""


def check_parts(parts: Collection[str]) -> None:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise UserError(
            f"no part is called {', '.join(repr(str(part)) for part in unknown)}: choose among {', '.join(PARTS)}"
        )


def check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise UserError(
            f"log-probs at temperature {temperature}: the distribution needs one above 0; to learn from greedy samples,"
            " set the temperature of training apart from the engine's"
        )


def needs_entropy(loss: Any) -> bool:
    return bool(getattr(loss, "needs_entropy", False))


def divergence_of(loss: Any) -> Divergence | None:
    """Return how a loss compares a policy with its teacher; None if it does not."""
    how: Divergence | None = getattr(loss, "divergence", None)
    return how
