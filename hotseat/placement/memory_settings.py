"""Settings that a role's memory depends on: what it keeps, in which types, and how it is divided over devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hotseat.placement.shapes import ModelShape
from hotseat.registry.backends import DEFAULT_BACKEND, BackendEntry, backend_entry


@dataclass(frozen=True, slots=True)
class TrainMemory:
    """Memory settings of a model that is trained: dtypes and sharding of parameters, gradients and optimizer state.

    FSDP with fp32 weights that are computed in bf16 is `weight_bytes=4, master_bytes=0`; bf16 weights with an fp32 copy
    in the optimizer is `weight_bytes=2, master_bytes=4`; pure bf16 is `weight_bytes=2, master_bytes=0, moment_bytes=2`.
    `zero_stage` holds for FSDP too: 3 gathers layer by layer, 1 and 2 the whole model for each step, 0 copies it.
    With `adapter_rank` only adapters beside every linear layer are trained, and these sizes are theirs: the frozen base
    is in the type of the computation, but for `layer_bytes`.
    """

    max_tokens: int  # of the longest sequence, prompt and answer together
    micro_batch: int = 1  # sequences per forward and backward
    forward_micro_batch: int | None = None  # sequences per forward without backward; None: micro_batch
    backend: str = DEFAULT_BACKEND
    zero_stage: int = 3
    sequence_parallel: int = 1
    weight_bytes: int = 2
    compute_bytes: int = 2
    gradient_bytes: int = 4
    master_bytes: int = 4
    moment_bytes: int = 4
    has_muon: bool = False  # Muon, with one moment, steps the matrices inside the layers
    optimizer_offload: bool = False  # moments and master weights live on the host, always
    gradient_checkpointing: bool = True
    checkpointed_layers: int | None = None  # layers that recompute their activations; None: all
    is_compiled: bool = True
    is_whole: bool = False  # compiled by DeepSpeed, all of it: micro-batches are added up in a copy of the gradients
    packing: bool = True
    sends_weights: bool = False  # sends weights to engines, and keeps the blocks for it between pushes
    adapter_rank: int = 0  # 0: all weights are trained
    layer_bytes: float | None = (
        None  # bytes of a frozen weight of linear layers, which each rank has whole; None: plain
    )
    batch_tokens: int | None = None  # most tokens of an optimizer step on all ranks; None: it is one micro-batch
    group_tokens: int = 0  # tokens by which a rank's share of a step may exceed an even share
    has_average: bool = False  # a moving average of the trained weights is kept on the host, in fp32
    image_share: float = 0.0  # most of a sequence's tokens that may stand for images
    has_frozen_encoder: bool = False  # the visual encoder is not trained
    teacher_token_bytes: int = 0  # of what a teacher says of the distribution of one token; 0: it says nothing
    has_snapshots: bool = False  # copies of the state are kept in host memory, to restart from
    teacher_head: int = 0  # parameters of its head, which is there during an update; 0: only likely tokens are compared

    def num_trained(self, model: ModelShape) -> int:
        """Count the parameters that have gradients and optimizer state."""
        if self.has_frozen_encoder and model.vision is not None:
            model = replace(model, vision=None)
        return model.num_adapter_parameters(self.adapter_rank) if self.adapter_rank else model.num_parameters

    def num_muon(self, model: ModelShape) -> int:
        """Count the parameters that Muon steps: matrices inside the layers, or adapters, all of which are matrices."""
        if not self.has_muon:
            return 0
        if not self.adapter_rank:
            return model.num_matrix_parameters
        return self.num_trained(model) - (model.hidden_size if model.head == "scalar" else 0)

    def accumulates(self, num_ranks: int) -> bool:
        """Return whether an optimizer step may take several micro-batches. num_ranks: those with different samples."""
        if self.batch_tokens is None:
            return False
        share = self.batch_tokens if num_ranks == 1 else -(-self.batch_tokens // num_ranks) + self.group_tokens
        return share > self.micro_batch * self.max_tokens

    @property
    def is_sharded(self) -> bool:
        """A rank keeps only its shard of the weights."""
        return self.zero_stage == 3 or (self.facts.shards_by_layer and self.zero_stage > 0)

    @property
    def is_cast(self) -> bool:
        """The computation is in another type than the weights."""
        return self.weight_bytes != self.compute_bytes

    @property
    def facts(self) -> BackendEntry:
        return backend_entry(self.backend)


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Memory settings of a model that only scores: reference, reward, inference."""

    max_tokens: int
    micro_batch: int = 1
    weight_bytes: int = 2
    layer_bytes: float | None = None  # bytes of a weight of linear layers, which each rank has whole; None: plain
    is_sharded: bool = False  # each rank keeps a shard and gathers layer by layer
    packing: bool = True
    sequence_parallel: int = 1
    is_guest: bool = False  # in the processes of another role, whose context it shares
    num_waiting: int = 0  # parameters of further models, which wait in host memory for their turn on the device
    image_share: float = 0.0  # most of a sequence's tokens that may stand for images


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory settings of a rollout engine.

    Its cache fills the memory share, up to twice what slots need; without a share, it is what slots need.
    """

    max_tokens: int
    slots: int  # sequences at once
    weight_bytes: int = 2
    kv_bytes: int = 2
    layer_bytes: float | None = None  # bytes of a weight of linear layers; None: `weight_bytes`
    is_nf4: bool = False  # these weights are in NF4, and become 16-bit ones when they are computed with
    cuda_graphs: bool = True
    image_share: float = 0.0  # most of a sequence's tokens that may stand for images
    kept_prompts: int = 0  # of full length, whose KV cache is kept beside the slots
    encodes_by_prompt: bool = False  # images of one prompt, or of small ones, at a time; else of all that a step begins
    expands_latent: bool = False  # it makes keys and values of all latent values in its cache, layer by layer
    logit_rows: int | None = None  # tokens whose logits it has at once; None: one of each slot


@dataclass(frozen=True, slots=True)
class SimulatorMemory:
    """Memory of a simulator process on its device. source: where the number is from."""

    gib: float
    source: str = "as given"


@dataclass(frozen=True, slots=True)
class ComponentMemory:
    """Memory of one process of a custom component on its device; 0: it has nothing there."""

    gib: float


Memory = TrainMemory | ForwardMemory | EngineMemory | SimulatorMemory | ComponentMemory


@dataclass(frozen=True, slots=True)
class Layout:
    """Distribution of a role over processes and devices, as far as its memory depends on it."""

    num_procs: int  # of the whole role
    tensor_parallel: int = 1
    procs_per_device: int = 1
    share: float | None = None  # of the device's memory, per process
    device_gib: float | None = None  # the device's memory; None: not known
    has_device: bool = True  # False: everything is on the host
