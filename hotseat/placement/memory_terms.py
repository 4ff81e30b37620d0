"""Terms of memory, each with its arithmetic, and those that several kinds of roles have.

The constants below are the assumptions; a calibration against real devices changes them and nothing else. Those marked
"measured" come from a model of 1.5B parameters beside vLLM 0.25 on an H200 (bench/hybrid_engine.py). N is the number of
parameters of the model, GiB are 2^30 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hotseat.placement.memory_settings import ForwardMemory, Layout, TrainMemory
from hotseat.placement.role_names import Part
from hotseat.placement.shapes import ModelShape

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
RULE_CHUNK = 64  # tokens that linear attention computes at a time, as in `algorithms/delta_rule.py`
RULE_FORWARD = 0.75  # of the memory of linear attention in a backward; measured
COPIED_PARAMETERS = 4_000_000_000  # FSDP on one rank keeps 16-bit copies of the fp32 weights of models up to this size
FSDP_LIVE_LAYERS = 2  # gathered at once: the one at work and the one prefetched
DEEPSPEED_LIVE_PARAMETERS = 1_000_000_000  # ZeRO-3 keeps at most this many gathered (stage3_max_live_parameters)
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000  # gradients reduced at once (reduce_bucket_size)
STEP_BYTES = 4  # per parameter of a rank's optimizer shard: fp32 gradients that exist in DeepSpeed's optimizer step
NF4_BLOCK = 64  # weights of 4 bits that share a scale, as in `algorithms/nf4.py`
DEQUANTISED_BYTES = 8  # of a weight of 4 bits that is computed with: indices, and numbers in fp32 and in 16 bits
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

ENCODER = "visual encoder"  # in the names of terms
SNAPSHOTS = "memory snapshots"  # the last one, and the next while it is written
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


@dataclass(frozen=True, slots=True)
class Amount:
    """A number with its arithmetic as text, such as `24 tokens x 2 layers x 8 B`."""

    value: float
    text: str

    def __mul__(self, other: Amount | float) -> Amount:
        factor = other if isinstance(other, Amount) else Amount(other, str(other))
        return Amount(self.value * factor.value, f"{self.text} x {factor.text}")

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.value + other.value, f"({self.text} + {other.text})")

    def over(self, divisor: int, what: str) -> Amount:
        """Divide. The text shows it unless the divisor is 1."""
        return Amount(self.value / divisor, self.text + per(divisor, what))


def per(divisor: int, what: str) -> str:
    return f" / {divisor} {what}" if divisor > 1 else ""


def digits(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.3f}"


def amount(number: float, unit: str = "") -> Amount:
    return Amount(number, f"{digits(number)} {unit}".rstrip())


def num_bytes(number: float) -> Amount:
    return amount(number, "B")


def num_patches(number: float) -> Amount:
    return Amount(number, f"{digits(round(number))} patches")


def byte_term(role: str, name: str, size: Amount, part: Part | None = None) -> Term:
    return Term(role, name, size.value / GIB, size.text, part)


def fixed_terms(role: str, layout: Layout, *, is_group: bool) -> tuple[Term, ...]:
    if not layout.has_device:
        return ()
    context = Term(role, "device context", CONTEXT_GIB, "constant, per process")
    group = Term(role, "communicator", COMMUNICATOR_GIB, "constant, per process in a group")
    return (context, group) if is_group else (context,)


def process_on_host(role: str) -> Term:
    return Term(role, "process", HOST_PROCESS_GIB, "constant, per process")


def with_slack(role: str, terms: list[Term]) -> tuple[Term, ...]:
    """Add to working memory what the allocator cannot use of it."""
    working = total(terms)
    slack = Term(role, "allocator slack", ALLOCATOR_SLACK * working, f"{ALLOCATOR_SLACK:.0%} of {working:.2f} GiB")
    return (*terms, slack)


def weight_blocks(role: str, model: ModelShape, weight_bytes: int, *, is_sending: bool = False) -> Term:
    """Return the memory of the blocks through which weights are sent or received."""
    name, count = ("weight blocks, sending", 2) if is_sending else ("weight block, receiving", 1)
    largest = amount(model.vocab_size) * amount(model.hidden_size) * num_bytes(weight_bytes)
    formula = f"{count} x the larger of {WEIGHT_BLOCK_GIB} GiB and {largest.text}"
    return Term(role, name, count * max(WEIGHT_BLOCK_GIB, largest.value / GIB), formula)


def held_parameters(model: ModelShape, tp: int) -> Amount:
    """Count the parameters of one tensor-parallel rank: layers are cut, the rest is not."""
    n, rest = model.num_parameters, model.num_embedding_parameters
    if tp == 1:
        return amount(n, "parameters")
    return amount(rest, "parameters outside the layers") + amount(n - rest).over(tp, "tensor parallel")


def weight_terms(
    role: str, model: ModelShape, tp: int, weight_bytes: int, cut: int, layer_bytes: float | None = None
) -> list[Term]:
    """Return the memory of the weights of a rank, of the decoder and of the visual encoder each by itself.

    layer_bytes: of a weight in NF4, which every rank has whole; None: there are none.
    """
    if layer_bytes is not None:
        in_layers = amount(model.num_matrix_parameters, "parameters")
        rest = amount(model.num_parameters - model.num_matrix_parameters, "parameters")
        return [
            byte_term(role, "weights", (rest * num_bytes(weight_bytes)).over(cut, "ranks"), Part.WEIGHTS),
            byte_term(role, "weights of layers", in_layers * num_bytes(layer_bytes), Part.WEIGHTS),
        ]
    sizes = {"weights": held_parameters(replace(model, vision=None), tp)}
    if model.vision is not None:
        sizes[ENCODER] = amount(model.num_vision_parameters, "parameters")
    stored = num_bytes(weight_bytes)
    return [byte_term(role, name, (size * stored).over(cut, "ranks"), Part.WEIGHTS) for name, size in sizes.items()]


def dequantised(role: str, model: ModelShape, layer_bytes: float | None, num_fused: int = 1) -> list[Term]:
    """Return the memory of the largest weight in NF4 while it is computed with. num_fused: weights of one layer."""
    if layer_bytes is None:
        return []
    largest = amount(num_fused * model.num_largest_matrix, "of the largest weight")
    return [byte_term(role, "dequantised weight", largest * num_bytes(DEQUANTISED_BYTES))]


def pixels(role: str, model: ModelShape, num_tokens: float) -> list[Term]:
    """Return the memory of the pixels of images that so many tokens stand for; they come in fp32."""
    vision = model.vision
    if vision is None or not num_tokens:
        return []
    patches = num_patches(num_tokens * vision.patches_per_token)
    return [byte_term(role, "pixels", patches * amount(vision.patch_values, "values") * num_bytes(FP32))]


def encoder_forward(role: str, model: ModelShape, num_tokens: float, compute_bytes: int) -> list[Term]:
    """Return the memory of pixels, and of a forward of the visual encoder that keeps nothing."""
    vision = model.vision
    if vision is None or not num_tokens:
        return []
    width = (5 * vision.hidden_size + 2 * vision.intermediate_size) * compute_bytes
    kept = num_patches(num_tokens * vision.patches_per_token) * num_bytes(width)
    return [*pixels(role, model, num_tokens), byte_term(role, f"{ENCODER} activations", kept)]


def tokens_of(memory: TrainMemory | ForwardMemory, micro_batch: int) -> int:
    return -(-micro_batch * memory.max_tokens // memory.sequence_parallel)


def attention_mask(role: str, memory: TrainMemory | ForwardMemory, micro_batch: int, compute_bytes: int) -> list[Term]:
    if memory.packing:
        return []
    square = Amount(memory.max_tokens**2, f"{digits(memory.max_tokens)}^2")
    return [byte_term(role, "attention mask", amount(micro_batch, "sequences") * square * num_bytes(compute_bytes))]


def logits(role: str, model: ModelShape, tokens: int, compute_bytes: int, passes: int) -> list[Term]:
    """Return the memory of logits and, with a backward pass (passes = 2), of their gradients.

    They are chunked, and fp32 from the start. The forward pass holds two copies; the backward pass holds logits,
    log-probs and gradients, and the gradients once more in the model's dtype.
    """
    if model.head == "scalar":
        return []
    rows = min(tokens, max(1, LOGITS_CHUNK_ELEMENTS // model.vocab_size))
    each = 2 * FP32 if passes == 1 else 3 * FP32 + (compute_bytes if compute_bytes < FP32 else 0)
    return [byte_term(role, "logits chunk", amount(rows, "tokens") * amount(model.vocab_size) * num_bytes(each))]


def forward_width(model: ModelShape, compute_bytes: int, tp: int) -> float:
    """Count the bytes of the activations of one token in a forward that keeps nothing."""
    mixed = model.mixed_width
    if model.linear is not None:
        mixed = max(mixed, 2 * model.linear.channels + model.linear.value_size)
    return (2 * model.hidden_size + (mixed + 2 * model.mlp_width) / tp) * compute_bytes


def delta_rule(role: str, model: ModelShape, num_tokens: float, share: float) -> list[Term]:
    """Return the memory in which a layer with linear attention computes its states. share: of what a backward takes.

    For each token and head in fp32, 13 values of a key, 8 of a value, 5 of a chunk and 2.25 states per chunk: the peak
    of forward and backward, from the live tensors of layers with heads of 64 and 128. A forward alone takes 3/4 of it.
    """
    if model.linear is None:
        return []
    key, value = model.linear.key_dim, model.linear.value_dim
    each = FP32 * (13 * key + 8 * value + 5 * RULE_CHUNK + 2.25 * key * value / RULE_CHUNK)
    heads = amount(num_tokens, "tokens") * amount(model.linear.num_value_heads, "heads")
    return [byte_term(role, "linear attention", heads * num_bytes(share * each))]


def forward_terms(
    role: str, model: ModelShape, memory: TrainMemory | ForwardMemory, micro_batch: int, compute_bytes: int, tp: int
) -> list[Term]:
    tokens, width = tokens_of(memory, micro_batch), forward_width(model, compute_bytes, tp)
    terms = [byte_term(role, "forward activations", amount(tokens, "tokens") * num_bytes(width))]
    terms += delta_rule(role, model, tokens, RULE_FORWARD)
    terms += attention_mask(role, memory, micro_batch, compute_bytes)
    terms += encoder_forward(role, model, memory.image_share * tokens, compute_bytes)
    return terms + logits(role, model, tokens, compute_bytes, 1)
