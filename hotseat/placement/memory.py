"""Estimates of a role's memory: named terms, each with its arithmetic, per device unless said otherwise.

The constants below are the assumptions; a calibration against real devices changes them and nothing else. Those marked
"measured" come from a model of 1.5B parameters beside vLLM 0.25 on an H200 (bench/hybrid_engine.py). N is the number of
parameters of the model, GiB are 2^30 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hotseat.placement.role_names import Part
from hotseat.placement.shapes import ModelShape, VisionShape
from hotseat.registry.backends import DEFAULT_BACKEND, BackendEntry, backend_entry
from hotseat.registry.roles import role_entry

GIB = 2**30

# --- assumptions ------------------------------------------------------------------------------------------------------
CONTEXT_GIB = 1.0  # driver context, library handles and kernels that a process keeps on every device; measured
COMMUNICATOR_GIB = 0.4  # collective buffers of a process that talks to others of its role
WEIGHT_BLOCK_GIB = 0.5  # size of each of the two blocks in which weights are sent, unless one weight is larger
ALLOCATOR_SLACK = 0.08  # share of a trainer's working memory lost in fragments that the caching allocator cannot use
LOGITS_CHUNK_ELEMENTS = 2**27  # logits that exist at once where log-probs are chunked (compiled: twice, in fewer bytes)
FP32 = 4  # bytes; losses, norms and log-softmax are in fp32 whatever the model's dtype
EAGER_ACTIVATIONS = 1.15  # factor on a layer's graph: without fusion some values are kept twice; measured
COMPILED_ACTIVATIONS = 0.77  # the same for compiled layers, which recompute some values; measured
RECOMPUTE_PEAK = 1.5  # a recomputed layer: its activations and the gradients on the way back through it
COPIED_PARAMETERS = 4_000_000_000  # FSDP on one rank keeps 16-bit copies of the fp32 weights of models up to this size
FSDP_LIVE_LAYERS = 2  # gathered at once: the one at work and the one prefetched
DEEPSPEED_LIVE_PARAMETERS = 1_000_000_000  # ZeRO-3 keeps at most this many gathered (stage3_max_live_parameters)
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000  # gradients reduced at once (reduce_bucket_size)
STEP_BYTES = 4  # per parameter of a rank's optimizer shard: fp32 gradients that exist in DeepSpeed's optimizer step
NUM_MOMENTS = 2  # of AdamW, for each parameter
MUON_BUCKET_ENTRIES = 2**26  # of matrices that Muon orthogonalises between two messages, as in `train/muon.py`
MUON_COPIES = 6  # of a matrix in bf16 that exist while it is orthogonalised
ENGINE_BATCH_TOKENS = 8192  # tokens of one engine step at most (max_num_batched_tokens)
SHARED_FORWARD_TOKENS = 1024  # tokens of prompts that share a forward of the transformers engine at most
SEEN_FORWARD_TOKENS = 32768  # the same for prompts of LLaVA with images on a CUDA device
USEFUL_CACHE = 2  # times what an engine's sequences need at their full length: as much again for cached prefixes
ENGINE_BUFFERS_GIB = 1.0  # attention workspace, sampler and input buffers that an engine keeps; measured
CUDA_GRAPH_GIB_PER_LAYER = 0.015  # captured graphs of an engine, outside of its memory share; measured
HOST_PROCESS_GIB = 2.0  # host memory of a process before it holds any weights
FITS_BELOW = 0.9  # share of a device's memory up to which the verdict is "fits"
# ----------------------------------------------------------------------------------------------------------------------

_ENCODER = "visual encoder"  # in the names of terms
UNSHARDED_GRADIENTS = "unsharded fp32 gradients, until the last micro-batch"

Activity = Literal["forward", "train", "generate", "simulate", "push", "receive"]


@dataclass(frozen=True, slots=True)
class Term:
    """One named amount of memory. part: the part that it belongs to; None for fixed and working memory."""

    role: str
    name: str
    gib: float
    formula: str
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class TrainMemory:
    """Memory settings of a model that is trained: dtypes and sharding of parameters, gradients and optimizer state.

    FSDP with fp32 weights that are computed in bf16 is `weight_bytes=4, master_bytes=0`; bf16 weights with an fp32 copy
    in the optimizer is `weight_bytes=2, master_bytes=4`; pure bf16 is `weight_bytes=2, master_bytes=0, moment_bytes=2`.
    `zero_stage` holds for FSDP too: 3 gathers layer by layer, 1 and 2 the whole model for each step, 0 copies it.
    With `adapter_rank` only adapters beside every linear layer are trained, and these sizes are theirs: the frozen base
    is in the type of the computation.
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
    batch_tokens: int | None = None  # most tokens of an optimizer step on all ranks; None: it is one micro-batch
    group_tokens: int = 0  # tokens by which a rank's share of a step may exceed an even share
    has_average: bool = False  # a moving average of the trained weights is kept on the host, in fp32
    image_share: float = 0.0  # most of a sequence's tokens that may stand for images
    has_frozen_encoder: bool = False  # the visual encoder is not trained

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
    def facts(self) -> BackendEntry:
        return backend_entry(self.backend)


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Memory settings of a model that only scores: reference, reward, inference."""

    max_tokens: int
    micro_batch: int = 1
    weight_bytes: int = 2
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
    layer_bytes: int | None = None  # bytes of a weight of linear layers; None: `weight_bytes`
    cuda_graphs: bool = True
    image_share: float = 0.0  # most of a sequence's tokens that may stand for images
    kept_prompts: int = 0  # of full length, whose KV cache is kept beside the slots
    encodes_by_prompt: bool = False  # images of one prompt, or of small ones, at a time; else of all that a step begins


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoleMemory:
    """Memory of a role on one device. host: per process. min_share: the least share that an engine can start with."""

    fixed: tuple[Term, ...]  # from the start of its processes to their end
    parts: dict[Part, tuple[Term, ...]]
    working: dict[Activity, tuple[Term, ...]]
    host: tuple[Term, ...]
    min_share: float | None = None

    def part_gib(self, part: Part) -> float:
        return total(self.parts.get(part, ()))


def total(terms: Iterable[Term]) -> float:
    return sum(term.gib for term in terms)


def estimate(role: str, memory: Memory | None, model: ModelShape | None, layout: Layout) -> RoleMemory | None:
    """Estimate a role's memory on one of its devices; None where its settings are not known."""
    role_memory: RoleMemory | None
    if isinstance(memory, SimulatorMemory) or (memory is None and role_entry(role).kind == "simulator"):
        role_memory = _simulator(role, memory, layout)
    elif isinstance(memory, ComponentMemory):
        role_memory = _component(role, memory, layout)
    elif memory is None or model is None:
        role_memory = None
    elif isinstance(memory, TrainMemory):
        role_memory = _train(role, memory, model, layout)
    elif isinstance(memory, ForwardMemory):
        role_memory = _forward(role, memory, model, layout)
    else:
        role_memory = _engine(role, memory, model, layout)
    if role_memory is None or layout.procs_per_device == 1:
        return role_memory
    return _times(role_memory, layout.procs_per_device)


def _times(memory: RoleMemory, count: int) -> RoleMemory:
    def each(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return tuple(replace(t, gib=t.gib * count, formula=f"{count} processes x ({t.formula})") for t in terms)

    return RoleMemory(
        each(memory.fixed),
        {part: each(terms) for part, terms in memory.parts.items()},
        {activity: each(terms) for activity, terms in memory.working.items()},
        memory.host,
        memory.min_share,
    )


def _n(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.3f}"


def _fixed(role: str, layout: Layout, is_group: bool) -> tuple[Term, ...]:
    if not layout.has_device:
        return ()
    terms = [Term(role, "device context", CONTEXT_GIB, "constant, per process")]
    if is_group:
        terms.append(Term(role, "communicator", COMMUNICATOR_GIB, "constant, per process in a group"))
    return tuple(terms)


def process_on_host(role: str) -> Term:
    return Term(role, "process", HOST_PROCESS_GIB, "constant, per process")


def _bytes(role: str, name: str, count: float, formula: str, part: Part | None = None) -> Term:
    return Term(role, name, count / GIB, formula, part)


def _slack(role: str, terms: list[Term]) -> tuple[Term, ...]:
    working = total(terms)
    slack = Term(role, "allocator slack", ALLOCATOR_SLACK * working, f"{ALLOCATOR_SLACK:.0%} of {working:.2f} GiB")
    return (*terms, slack)


def _blocks(role: str, name: str, model: ModelShape, count: int, num_bytes: int) -> Term:
    """Return the memory of the blocks through which weights are sent or received."""
    largest = model.vocab_size * model.hidden_size * num_bytes / GIB
    return Term(
        role,
        name,
        count * max(WEIGHT_BLOCK_GIB, largest),
        f"{count} x the larger of {WEIGHT_BLOCK_GIB} GiB and {_n(model.vocab_size)} x {_n(model.hidden_size)} x"
        f" {num_bytes} B",
    )


def _per(divisor: int, what: str) -> str:
    return f" / {divisor} {what}" if divisor > 1 else ""


def _train(role: str, memory: TrainMemory, model: ModelShape, layout: Layout) -> RoleMemory:
    tp = layout.tensor_parallel
    shards = max(1, layout.num_procs // tp)
    held = _held(model, tp)
    trained = held
    if memory.adapter_rank or (memory.has_frozen_encoder and model.vision is not None):
        trained = memory.num_trained(model) / tp, f"{_n(memory.num_trained(model))} parameters"
    copied = trained if memory.adapter_rank else held
    weight_cut = shards if memory.is_sharded else 1
    is_layer_cut = memory.facts.shards_by_layer and memory.zero_stage > 0
    gradient_cut = shards if memory.zero_stage >= 2 or is_layer_cut else 1
    optimizer_cut = shards if memory.zero_stage >= 1 else 1

    def share(name: str, num_bytes: int, cut: int, part: Part, of: tuple[float, str] = trained) -> Term:
        count, what = of
        return _bytes(role, name, count * num_bytes / cut, f"{what} x {num_bytes} B{_per(cut, 'ranks')}", part)

    def all_weights(num_bytes: int) -> list[Term]:
        text, encoder = _held_apart(model, tp)
        terms = [share("weights", num_bytes, weight_cut, Part.WEIGHTS, text)]
        return terms if encoder is None else [*terms, share(_ENCODER, num_bytes, weight_cut, Part.WEIGHTS, encoder)]

    weights = all_weights(memory.compute_bytes if memory.adapter_rank else memory.weight_bytes)
    if memory.adapter_rank:
        weights.append(share("adapters", memory.weight_bytes, weight_cut, Part.WEIGHTS))
    if _has_copies(memory, model, shards):
        weights.append(share("16-bit copy of the weights", memory.compute_bytes, 1, Part.WEIGHTS, copied))
    gradients = share("gradients", memory.gradient_bytes, gradient_cut, Part.GRADIENTS)
    moments = share("optimizer moments", NUM_MOMENTS * memory.moment_bytes, optimizer_cut, Part.OPTIMIZER)
    num_muon = memory.num_muon(model)
    if num_muon:
        entries = NUM_MOMENTS * (memory.num_trained(model) - num_muon) + num_muon
        formula = f"({_n(num_muon)} + {NUM_MOMENTS} x {_n(memory.num_trained(model) - num_muon)} of AdamW)"
        moments = share("optimizer moments", memory.moment_bytes, optimizer_cut, Part.OPTIMIZER, (entries, formula))
    state = [moments]
    if memory.master_bytes:
        state.append(share("master weights", memory.master_bytes, optimizer_cut, Part.OPTIMIZER))
    host = [process_on_host(role)]
    if memory.has_average:
        host.append(share("moving average (pinned)", FP32, optimizer_cut, Part.WEIGHTS))
    parts: dict[Part, tuple[Term, ...]] = {
        Part.WEIGHTS: tuple(weights),
        Part.GRADIENTS: (gradients,),
        Part.OPTIMIZER: tuple(state),
    }
    if memory.optimizer_offload:
        host += [replace(term, name=f"{term.name} (pinned)") for term in state]
        parts[Part.OPTIMIZER] = tuple(replace(term, gib=0.0, formula="on the host") for term in state)
        if memory.facts.keeps_gradients and gradient_cut > 1:
            # ZeRO-Offload sends each reduced bucket to the host and keeps no gradient shard on the device.
            host.append(replace(gradients, name="gradients (pinned)"))
            parts[Part.GRADIENTS] = (replace(gradients, gib=0.0, formula="on the host"),)
    training: tuple[Term, ...] = ()
    if not memory.facts.keeps_gradients:
        # Gradients exist only during an update, so they are working memory and no part.
        training = (replace(gradients, part=None),)
        if gradient_cut > 1 and memory.accumulates(shards // memory.sequence_parallel):
            # Only the last micro-batch sums them over ranks and shards them; until then they add up whole, in fp32.
            training = (_bytes(role, UNSHARDED_GRADIENTS, trained[0] * FP32, f"{trained[1]} x {FP32} B"),)
        parts[Part.GRADIENTS] = (replace(gradients, gib=0.0, formula="only during an update"),)
    gathered = _gathered(role, memory, model, shards, tp)
    back = [*gathered, *_reduce(role, memory, model, shards, tp), *_activations(role, memory, model, tp)]
    back += _encoder_terms(role, memory, model)
    if memory.is_whole:
        back.append(replace(gradients, name="gradients so far", part=None))
    tokens = _tokens(memory, memory.micro_batch)
    back += _logits(role, model, tokens, memory.compute_bytes, 2)
    step: list[Term] = []
    if memory.facts.steps_at_once and not memory.optimizer_offload:  # a fused AdamW needs nothing but its state
        step = [
            _bytes(
                role,
                "optimizer step",
                trained[0] * STEP_BYTES / optimizer_cut,
                f"{trained[1]} x {STEP_BYTES} B{_per(optimizer_cut, 'ranks')}",
            )
        ]
    if num_muon:
        bucket = min(num_muon, max(MUON_BUCKET_ENTRIES, 0 if memory.adapter_rank else model.num_largest_matrix))
        largest = min(bucket, model.num_largest_matrix)
        formula = f"{_n(bucket)} entries x (2 + {FP32}) B + {_n(largest)} of the largest matrix x {MUON_COPIES} x 2 B"
        step.append(_bytes(role, "orthogonalisation", bucket * (2 + FP32) + largest * MUON_COPIES * 2, formula))
    forward_batch = memory.forward_micro_batch or memory.micro_batch
    forward = [*gathered, *_forward_terms(role, model, memory, forward_batch, memory.compute_bytes, tp)]
    working: dict[Activity, tuple[Term, ...]] = {
        # Activations are freed before the optimizer steps, so the peak is the larger of the two.
        "train": (*training, *_slack(role, back if total(back) >= total(step) else step)),
        "forward": _slack(role, forward),
        "push": (*gathered, *_merging(role, memory, model, tp)),
        "receive": (_blocks(role, "weight block, receiving", model, 1, memory.compute_bytes),),
    }
    fixed = _fixed(role, layout, layout.num_procs > 1)
    if memory.sends_weights and layout.has_device:
        fixed += (_blocks(role, "weight blocks, sending", model, 2, memory.compute_bytes),)
    return RoleMemory(fixed, parts, working, tuple(host))


def _held(model: ModelShape, tp: int) -> tuple[float, str]:
    """Count the parameters of one tensor-parallel rank, with the formula: layers are cut, the rest is not."""
    n, rest = model.num_parameters, model.num_embedding_parameters
    if tp == 1:
        return n, f"{_n(n)} parameters"
    return rest + (n - rest) / tp, f"({_n(rest)} parameters outside the layers + {_n(n - rest)} / {tp} tensor parallel)"


def _held_apart(model: ModelShape, tp: int) -> tuple[tuple[float, str], tuple[float, str] | None]:
    """Count as `_held` does, the decoder and the visual encoder each by itself; None: it takes text alone."""
    if model.vision is None:
        return _held(model, tp), None
    num_encoder = model.num_vision_parameters
    return _held(replace(model, vision=None), tp), (num_encoder, f"{_n(num_encoder)} parameters")


def _pixels(role: str, model: ModelShape, num_tokens: float) -> list[Term]:
    """Return the memory of the pixels of images that so many tokens stand for; they come in fp32."""
    vision = model.vision
    if vision is None or not num_tokens:
        return []
    patches = num_tokens * vision.patches_per_token
    formula = f"{_n(round(patches))} patches x {_n(vision.patch_values)} values x {FP32} B"
    return [_bytes(role, "pixels", patches * vision.patch_values * FP32, formula)]


def _encoder_forward(role: str, model: ModelShape, num_tokens: float, compute_bytes: int) -> list[Term]:
    """Return the memory of pixels, and of a forward of the visual encoder that keeps nothing."""
    vision = model.vision
    if vision is None or not num_tokens:
        return []
    patches = num_tokens * vision.patches_per_token
    width = (2 * vision.hidden_size + 3 * vision.hidden_size + 2 * vision.intermediate_size) * compute_bytes
    formula = f"{_n(round(patches))} patches x {_n(width)} B"
    return [*_pixels(role, model, num_tokens), _bytes(role, f"{_ENCODER} activations", patches * width, formula)]


def _patch_activations(memory: TrainMemory, vision: VisionShape) -> tuple[float, str]:
    """Count the bytes that the visual encoder keeps of one patch for the backward pass, with the formula."""
    c, h = memory.compute_bytes, vision.hidden_size
    layer = 2 * (FP32 + c) * h + 4 * c * h + (4 if vision.is_gated else 2) * c * vision.intermediate_size
    if memory.gradient_checkpointing:
        each = vision.num_layers * h * c + layer * RECOMPUTE_PEAK
        return each, f"({vision.num_layers} layers x {_n(h * c)} B + {_n(layer)} B x {RECOMPUTE_PEAK})"
    return (
        vision.num_layers * layer * EAGER_ACTIVATIONS,
        f"{vision.num_layers} layers x {_n(layer)} B x {EAGER_ACTIVATIONS}",
    )


def _encoder_terms(role: str, memory: TrainMemory, model: ModelShape) -> list[Term]:
    """Return the memory of pixels, and of what the visual encoder keeps for the backward pass. It is not compiled."""
    vision, num_tokens = model.vision, memory.image_share * _tokens(memory, memory.micro_batch)
    if vision is None or not num_tokens:
        return []
    if memory.has_frozen_encoder:
        return _encoder_forward(role, model, num_tokens, memory.compute_bytes)
    patches = num_tokens * vision.patches_per_token
    each, how = _patch_activations(memory, vision)
    kept = _bytes(role, f"{_ENCODER} activations", patches * each, f"{_n(round(patches))} patches x {how}")
    return [*_pixels(role, model, num_tokens), kept]


def _tokens(memory: TrainMemory | ForwardMemory, micro_batch: int) -> int:
    return -(-micro_batch * memory.max_tokens // memory.sequence_parallel)


def _has_copies(memory: TrainMemory, model: ModelShape, shards: int) -> bool:
    """Tell whether fp32 weights have copies to compute with: FSDP on a single rank keeps them, see `train.masters`."""
    is_small = memory.num_trained(model) <= COPIED_PARAMETERS
    is_cast = memory.weight_bytes != memory.compute_bytes
    return memory.facts.copies_weights and shards == 1 and is_cast and is_small


def _gathered(role: str, memory: TrainMemory, model: ModelShape, shards: int, tp: int) -> list[Term]:
    """Return the memory of whole weights that exist beside the shard while the role works."""
    if _has_copies(memory, model, shards):
        return []
    is_cast = memory.weight_bytes != memory.compute_bytes
    if not (memory.is_sharded and shards > 1) and not is_cast:
        return []
    n, layer, rest = model.num_parameters, model.num_layer_parameters, model.num_embedding_parameters
    if memory.zero_stage < 3:
        live, how = n, f"{_n(n)} parameters"
    elif memory.facts.shards_by_layer:
        live = min(n, rest + FSDP_LIVE_LAYERS * layer)
        how = f"({_n(rest)} outside the layers + {FSDP_LIVE_LAYERS} layers x {_n(layer)})"
    else:
        live = min(n, max(DEEPSPEED_LIVE_PARAMETERS, layer))
        how = f"{_n(live)} live parameters"
    formula = f"{how} x {memory.compute_bytes} B{_per(tp, 'tensor parallel')}"
    return [_bytes(role, "gathered weights", live * memory.compute_bytes / tp, formula)]


def _merging(role: str, memory: TrainMemory, model: ModelShape, tp: int) -> list[Term]:
    """Return the memory of merging adapters for a push: all adapters, and two copies of the largest weight, in fp32."""
    if not memory.adapter_rank:
        return []
    n, largest = memory.num_trained(model), model.hidden_size * max(model.intermediate_size, model.q_size)
    formula = f"({_n(n)} adapters + 2 x {_n(largest)} of the largest weight) x {FP32} B{_per(tp, 'tensor parallel')}"
    return [_bytes(role, "merging", (n + 2 * largest) * FP32 / tp, formula)]


def _reduce(role: str, memory: TrainMemory, model: ModelShape, shards: int, tp: int) -> list[Term]:
    """Return the memory of gradients that are being reduced to the ranks that keep them."""
    if shards == 1 and not memory.is_whole:
        return []
    if memory.adapter_rank:
        count = min(memory.num_trained(model), DEEPSPEED_BUCKET_ELEMENTS)
        how = f"{_n(count)} parameters"
    elif memory.facts.shards_by_layer and memory.zero_stage > 0:
        count = model.num_embedding_parameters + model.num_layer_parameters
        how = (
            f"({_n(model.num_embedding_parameters)} outside the layers + one layer of {_n(model.num_layer_parameters)})"
        )
    else:
        count = min(int(_held(model, tp)[0]), DEEPSPEED_BUCKET_ELEMENTS)
        how = f"bucket of {_n(count)}"
        if memory.is_whole:  # one is filled while the other is sent, by one rank too
            count, how = 2 * count, f"2 x {how}"
    return [_bytes(role, "gradient reduction", count * memory.gradient_bytes, f"{how} x {memory.gradient_bytes} B")]


def layer_activation_bytes(model: ModelShape, compute_bytes: int, tp: int = 1) -> float:
    """Count the bytes that one layer keeps of one token for backward, with an attention kernel that stores no scores.

    Two norms keep their input in fp32 and their output; attention keeps q, k, v and its output; the gated MLP keeps
    gate, up, activation and product:  2 (4 + c) h + 2 c (q + kv) / tp + 4 c m / tp  bytes. (Counted from the layer's
    graph, as Korthikanti et al. 2022 do for GPT.)
    """
    c = compute_bytes
    norms = 2 * (FP32 + c) * model.hidden_size
    return norms + (2 * c * (model.q_size + model.kv_size) + 4 * c * model.mlp_width) / tp


def token_activation_bytes(memory: TrainMemory, model: ModelShape) -> float:
    """Count the bytes that all layers keep of one token for the backward pass, without a compiler.

    Where tokens may stand for images, the visual encoder's are counted for as many as may.
    """
    num_recomputed = _num_recomputed(memory, model)
    kept = (model.num_layers - num_recomputed) * layer_activation_bytes(model, memory.compute_bytes) * EAGER_ACTIVATIONS
    if model.vision is not None and not memory.has_frozen_encoder:
        kept += memory.image_share * model.vision.patches_per_token * _patch_activations(memory, model.vision)[0]
    return num_recomputed * model.hidden_size * memory.compute_bytes + kept


def _num_recomputed(memory: TrainMemory, model: ModelShape) -> int:
    """Count the layers that keep their input alone and compute the rest again in the backward pass."""
    if not memory.gradient_checkpointing:
        return 0
    return model.num_layers if memory.checkpointed_layers is None else min(memory.checkpointed_layers, model.num_layers)


def _activations(role: str, memory: TrainMemory, model: ModelShape, tp: int) -> list[Term]:
    tokens = _tokens(memory, memory.micro_batch)
    layer = layer_activation_bytes(model, memory.compute_bytes, tp)
    num_recomputed = _num_recomputed(memory, model)
    terms = []
    if num_recomputed:
        width = model.hidden_size * memory.compute_bytes
        terms += [
            _bytes(
                role,
                "checkpointed activations",
                tokens * num_recomputed * width,
                f"{_n(tokens)} tokens x {num_recomputed} layers x {_n(width)} B",
            ),
            _bytes(
                role,
                "recomputed layer",
                tokens * layer * RECOMPUTE_PEAK,
                f"{_n(tokens)} tokens x {_n(layer)} B x {RECOMPUTE_PEAK}",
            ),
        ]
    num_kept = model.num_layers - num_recomputed
    if num_kept:
        kept = COMPILED_ACTIVATIONS if memory.is_compiled else EAGER_ACTIVATIONS
        terms.append(
            _bytes(
                role,
                "activations",
                tokens * num_kept * layer * kept,
                f"{_n(tokens)} tokens x {num_kept} layers x {_n(layer)} B x {kept}",
            )
        )
    return terms + _mask(role, memory, memory.micro_batch, memory.compute_bytes)


def _mask(role: str, memory: TrainMemory | ForwardMemory, micro_batch: int, compute_bytes: int) -> list[Term]:
    if memory.packing:
        return []
    side = memory.max_tokens
    formula = f"{micro_batch} sequences x {_n(side)}^2 x {compute_bytes} B"
    return [_bytes(role, "attention mask", micro_batch * side * side * compute_bytes, formula)]


def _logits(role: str, model: ModelShape, tokens: int, compute_bytes: int, passes: int) -> list[Term]:
    """Return the memory of logits and, with a backward pass (passes = 2), of their gradients.

    They are chunked, and fp32 from the start. The forward pass holds two copies; the backward pass holds logits,
    log-probs and gradients, and the gradients once more in the model's dtype.
    """
    if model.head == "scalar":
        return []
    rows = min(tokens, max(1, LOGITS_CHUNK_ELEMENTS // model.vocab_size))
    each = 2 * FP32 if passes == 1 else 3 * FP32 + (compute_bytes if compute_bytes < FP32 else 0)
    formula = f"{_n(rows)} tokens x {_n(model.vocab_size)} x {each} B"
    return [_bytes(role, "logits chunk", rows * model.vocab_size * each, formula)]


def _forward_terms(
    role: str, model: ModelShape, memory: TrainMemory | ForwardMemory, micro_batch: int, compute_bytes: int, tp: int
) -> list[Term]:
    tokens = _tokens(memory, micro_batch)
    width = (2 * model.hidden_size + (model.q_size + 2 * model.kv_size + 2 * model.mlp_width) / tp) * compute_bytes
    terms = [_bytes(role, "forward activations", tokens * width, f"{_n(tokens)} tokens x {_n(width)} B")]
    terms += _mask(role, memory, micro_batch, compute_bytes)
    terms += _encoder_forward(role, model, memory.image_share * tokens, compute_bytes)
    return terms + _logits(role, model, tokens, compute_bytes, 1)


def _forward(role: str, memory: ForwardMemory, model: ModelShape, layout: Layout) -> RoleMemory:
    tp = layout.tensor_parallel
    shards = max(1, layout.num_procs // tp) if memory.is_sharded else 1
    n = model.num_parameters

    def share(name: str, of: tuple[float, str]) -> Term:
        formula = f"{of[1]} x {memory.weight_bytes} B{_per(shards, 'ranks')}"
        return _bytes(role, name, of[0] * memory.weight_bytes / shards, formula, Part.WEIGHTS)

    text, encoder = _held_apart(model, tp)
    weights = [share("weights", text)] if encoder is None else [share("weights", text), share(_ENCODER, encoder)]
    host = [] if memory.is_guest else [process_on_host(role)]
    if memory.num_waiting:
        what = f"{_n(memory.num_waiting)} parameters x {memory.weight_bytes} B{_per(tp * shards, 'ranks')}"
        waiting = memory.num_waiting * memory.weight_bytes / tp / shards
        host.append(_bytes(role, "other models, waiting (pinned)", waiting, what))
    terms: list[Term] = []
    if shards > 1:
        live = min(n, model.num_embedding_parameters + FSDP_LIVE_LAYERS * model.num_layer_parameters)
        formula = f"{_n(live)} live parameters x {memory.weight_bytes} B{_per(tp, 'tensor parallel')}"
        terms.append(_bytes(role, "gathered weights", live * memory.weight_bytes / tp, formula))
    terms += _forward_terms(role, model, memory, memory.micro_batch, memory.weight_bytes, tp)
    working: dict[Activity, tuple[Term, ...]] = {
        "forward": _slack(role, terms),
        "receive": (_blocks(role, "weight block, receiving", model, 1, memory.weight_bytes),),
    }
    parts: dict[Part, tuple[Term, ...]] = {Part.WEIGHTS: tuple(weights)}
    fixed = () if memory.is_guest else _fixed(role, layout, shards > 1 or tp > 1)
    return RoleMemory(fixed, parts, working, tuple(host))


def kv_bytes_per_token(model: ModelShape, kv_bytes: int, tp: int = 1) -> float:
    """Count the bytes of one token's KV cache in all layers. With fewer heads than ranks, heads are copied."""
    heads = max(1.0, model.num_kv_heads / tp)
    return 2 * model.num_layers * heads * model.head_dim * kv_bytes


def useful_cache_gib(memory: EngineMemory, model: ModelShape, tp: int = 1) -> float:
    """Return the GiB beyond which an engine's cache is of no use."""
    return USEFUL_CACHE * memory.slots * memory.max_tokens * kv_bytes_per_token(model, memory.kv_bytes, tp) / GIB


def _image_prompt_tokens(memory: EngineMemory, model: ModelShape, layout: Layout) -> int:
    """Count the tokens of prompts with images that share a forward of the engine's own layers; 0: it has none."""
    is_llava = model.vision is not None and model.vision.tokens_per_image is not None
    if not is_llava or not memory.image_share or not memory.encodes_by_prompt or not layout.has_device:
        return 0
    return max(memory.max_tokens, min(SEEN_FORWARD_TOKENS, memory.slots * memory.max_tokens))


def _engine(role: str, memory: EngineMemory, model: ModelShape, layout: Layout) -> RoleMemory | None:
    tp = layout.tensor_parallel

    def share(name: str, count: int, num_bytes: int = memory.weight_bytes) -> Term:
        formula = f"{_n(count)} parameters x {num_bytes} B{_per(tp, 'tensor parallel')}"
        return _bytes(role, name, count * num_bytes / tp, formula, Part.WEIGHTS)

    num_encoder = model.num_vision_parameters
    in_layers = 0 if memory.layer_bytes is None else model.num_matrix_parameters
    weights = [share("weights", model.num_parameters - num_encoder - in_layers)]
    if memory.layer_bytes is not None:
        weights.append(share("weights of layers", in_layers, memory.layer_bytes))
    if num_encoder:
        weights.append(share(_ENCODER, num_encoder))
    if layout.has_device and layout.share is not None and layout.device_gib is None:
        return None  # a share of an unknown amount
    fixed = list(_fixed(role, layout, tp > 1))
    if memory.cuda_graphs and layout.has_device:
        graphs = model.num_layers * CUDA_GRAPH_GIB_PER_LAYER
        formula = f"{model.num_layers} layers x {CUDA_GRAPH_GIB_PER_LAYER} GiB"
        fixed.append(Term(role, "captured graphs", graphs, formula))
    buffers = Term(role, "engine buffers", ENGINE_BUFFERS_GIB if layout.has_device else 0.0, "constant")
    fixed.append(buffers)
    num_shared = _image_prompt_tokens(memory, model, layout)
    tokens = max(num_shared, min(ENGINE_BATCH_TOKENS, memory.slots * memory.max_tokens))
    width = (
        2 * model.hidden_size + (model.q_size + 2 * model.kv_size + 2 * model.mlp_width) / tp
    ) * memory.weight_bytes
    rows = memory.slots * model.vocab_size * (memory.weight_bytes + FP32)
    workspace = Term(
        role,
        "engine workspace",
        (tokens * width + rows / tp) / GIB,
        f"{_n(tokens)} tokens x {_n(width)} B + {memory.slots} slots x {_n(model.vocab_size)} x"
        f" {memory.weight_bytes + FP32} B{_per(tp, 'tensor parallel')}",
    )
    image_tokens = memory.image_share * memory.max_tokens
    if memory.encodes_by_prompt:
        image_tokens = memory.image_share * max(memory.max_tokens, SHARED_FORWARD_TOKENS, num_shared)
    else:
        image_tokens = max(image_tokens, min(ENGINE_BATCH_TOKENS, memory.slots * image_tokens))
    images = _encoder_forward(role, model, image_tokens, memory.weight_bytes)
    per_token = kv_bytes_per_token(model, memory.kv_bytes, tp)
    formula = f"2 x {_n(num_shared)} tokens x {_n(per_token)} B"  # as they are computed, and cut into prompts
    prefilled = [_bytes(role, "keys and values of prompts", 2 * num_shared * per_token, formula)] if num_shared else []
    one = memory.max_tokens * per_token / GIB
    # The share covers weights, cache, buffers and workspace; context and graphs come on top.
    rest = total(weights) + buffers.gib + workspace.gib + total(images)
    min_share = None
    if layout.share is not None and layout.device_gib is not None:
        left = layout.share * layout.device_gib - rest
        useful = useful_cache_gib(memory, model, tp)
        held = int(max(left, 0.0) * GIB / per_token)
        formula = (
            f"{layout.share:g} x {layout.device_gib:g} GiB - {rest:.2f} GiB (weights, buffers, workspace)"
            f" = {_n(held)} tokens of {_n(per_token)} B"
        )
        if left > useful:
            formula = (
                f"{USEFUL_CACHE} x {memory.slots} slots x {_n(memory.max_tokens)} tokens x {_n(per_token)} B, less than"
                f" the share of {layout.share:g} allows"
            )
        cache = Term(role, "kv cache", max(min(left, useful), one), formula, Part.KV_CACHE)
        min_share = (rest + one) / layout.device_gib
    else:
        kept = memory.kept_prompts
        sequences = f"({memory.slots} slots + {kept} prompts)" if kept else f"{memory.slots} slots"
        formula = f"{sequences} x {_n(memory.max_tokens)} tokens x {_n(per_token)} B"
        cache = Term(role, "kv cache", (memory.slots + kept) * one, formula, Part.KV_CACHE)
    working: dict[Activity, tuple[Term, ...]] = {
        "generate": (workspace, *images, *prefilled),
        "forward": (workspace, *images),
        "receive": (_blocks(role, "weight block, receiving", model, 1, memory.weight_bytes),),
    }
    parts: dict[Part, tuple[Term, ...]] = {Part.WEIGHTS: tuple(weights), Part.KV_CACHE: (cache,)}
    return RoleMemory(tuple(fixed), parts, working, (process_on_host(role),), min_share)


def _simulator(role: str, memory: SimulatorMemory | None, layout: Layout) -> RoleMemory | None:
    fixed = _fixed(role, layout, False)
    if memory is not None:
        state = Term(role, "simulator", memory.gib, memory.source, Part.SIMULATOR)
    elif layout.share is not None and layout.device_gib is not None:
        gib = max(0.0, layout.share * layout.device_gib - total(fixed))
        formula = f"{layout.share:g} x {layout.device_gib:g} GiB - {total(fixed):.2f} GiB (context)"
        state = Term(role, "simulator", gib, formula, Part.SIMULATOR)
    else:
        return None
    return RoleMemory(fixed, {Part.SIMULATOR: (state,)}, {}, (process_on_host(role),))


def _component(role: str, memory: ComponentMemory, layout: Layout) -> RoleMemory:
    state = (Term(role, "component", memory.gib, "as given", Part.WEIGHTS),) if memory.gib else ()
    fixed = _fixed(role, layout, False) if memory.gib else ()
    return RoleMemory(fixed, {Part.WEIGHTS: state}, {}, (process_on_host(role),))
