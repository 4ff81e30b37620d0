"""Models under training: policies compute log-probs of tokens, value models (critics, rewards) a number for each."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from hotseat.algorithms.delta_rule import delta_nets
from hotseat.algorithms.routing import ROUTING, check_replay, replay_routing
from hotseat.errors import UnsupportedError, UserError
from hotseat.model_source import NUMERIC, ModelSource
from hotseat.observe.noise import without_log_lines
from hotseat.train.attention import (
    ATTENTION,
    BLOCKS,
    IMAGE_ATTENTION,
    AttentionRecord,
    Blocks,
    gather,
    recorded_attention,
)
from hotseat.train.backend import TrainOptions
from hotseat.train.divergence import TEACHER_FIELDS, Head, scores_with_teacher, teacher_rows
from hotseat.train.experts import routing_sums
from hotseat.train.liger import use_liger
from hotseat.train.linear_attention import num_seen, use_own_linear_attention
from hotseat.train.logprobs import Compiler, token_log_probs
from hotseat.train.lora import add_adapters
from hotseat.train.model_checks import check_fit, check_value_head, no_head
from hotseat.train.packing import LayoutKind, ModelInput, model_input, take
from hotseat.train.sequence import check_ranks
from hotseat.train.tensor import TENSOR_PARALLEL_SIZE
from hotseat.types import MicroBatch
from hotseat.vision import encoder_of, language_part, policy_class, sees_images, set_attention, value_class

if TYPE_CHECKING:
    from hotseat.numeric.models import NumericScorer

_SCORE = "score"  # what transformers calls the head of a model with one label
_LARGE_LOGIT = 40.0
_MAX_VARIANTS = 64  # of one compiled layer
_NUM_POSITIONS = (64, 2**17)  # in which masks are compared: at least, at most


# A name alone is a checkpoint that runs no Python files.
Model: TypeAlias = ModelSource | str | Path | PreTrainedModel


class Policy(nn.Module):
    """A language model: its body, then log-probs of the scored tokens straight from its output embedding.

    The head is part of this forward, so that a wrapper which shards parameters has gathered it when it is used.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.compiler: Compiler | None = None
        self.has_plain_scores = True  # whether torch has kernels for the scores of its attention
        self.logit_scale, self.logit_cap = logit_changes(model.config)

    def forward(self, inputs: ModelInput, temperature: float, with_entropy: bool = False) -> dict[str, Tensor]:
        """Compute `log_probs`, and `entropy` if asked for, [num_scored] each; `routing` (see `experts`) with counts.

        With a teacher also the `divergence` from it; a teacher's forward computes what it gives (`TEACHER_FIELDS`).
        """
        head = self.model.get_output_embeddings()
        hidden, routing = _hidden(self.model, inputs)
        teaching, whole = inputs.teaching, None
        if teaching is not None:
            whole = Head(head.weight, getattr(head, "bias", None), self.logit_scale, self.logit_cap)
        if whole is not None and teaching is not None and not teaching.gives:
            scores = scores_with_teacher(
                hidden,
                whole,
                inputs.targets,
                teaching.rows,
                teaching.how,
                teacher_head=teaching.head,
                temperature=temperature,
                with_entropy=with_entropy,
            )
            return {name: values for name, values in scores._asdict().items() if values is not None} | routing
        log_probs, entropy = token_log_probs(
            hidden,
            head.weight,
            inputs.targets,
            temperature=temperature / self.logit_scale,
            bias=getattr(head, "bias", None),
            with_entropy=with_entropy,
            compiler=self.compiler,
            cap=self.logit_cap,
        )
        outputs = {"log_probs": log_probs} | routing
        if whole is not None and teaching is not None:
            teacher = teacher_rows(hidden, whole, teaching.how)
            outputs |= {name: rows for name, rows in zip(TEACHER_FIELDS, teacher, strict=True) if rows is not None}
        return outputs if entropy is None else outputs | {"entropy": entropy}


class ValueModel(nn.Module):
    """A value model: its body, then one number for each scored token, from what precedes it."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.compiler: Compiler | None = None
        self.has_plain_scores = True

    def forward(self, inputs: ModelInput, temperature: float = 1.0, with_entropy: bool = False) -> dict[str, Tensor]:
        """Compute `values` [num_scored] float32, and `routing` (see `experts`) if there are counts."""
        hidden, routing = _hidden(self.model, inputs)
        return {"values": getattr(self.model, _SCORE)(hidden).squeeze(-1).float()} | routing


def _hidden(model: PreTrainedModel, inputs: ModelInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the hidden state in front of each scored token, [num_scored, hidden_size]; and routing if asked for."""
    arguments: dict[str, Any] = {} if inputs.position_ids is None else {"position_ids": inputs.position_ids}
    if inputs.blocks is not None:
        arguments[BLOCKS] = inputs.blocks
    if inputs.routing is not None:
        arguments[ROUTING] = inputs.routing
    arguments |= inputs.pixels
    if inputs.counts is not None:
        arguments["output_router_logits"] = True
    output = model.base_model(input_ids=inputs.input_ids, use_cache=False, **arguments)
    hidden = gather(output.last_hidden_state.flatten(0, 1), inputs.rows)
    if inputs.counts is None:
        return hidden, {}
    num_chosen = model.config.get_text_config().num_experts_per_tok
    return hidden, {"routing": routing_sums(output.router_logits, inputs.counts, num_chosen)}


def logit_changes(config: Any) -> tuple[float, float | None]:
    """Return the factor of a model's logits (Granite, Cohere) and their cap (Gemma 2), by its config.

    `_check_head` makes sure that nothing else happens to them.
    """
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1)
    return float(scale), getattr(text, "final_logit_softcapping", None)


def load_model(source: Model, options: TrainOptions, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model from a folder or hub name; or take over one that is loaded, and change it in place."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    check_ranks(options.sequence_parallel_size, num_ranks)
    check_ranks(options.tensor_parallel_size, num_ranks, TENSOR_PARALLEL_SIZE)
    fit = (options.sequence_parallel_size, options.tensor_parallel_size, options.aux_loss_coefficient)
    if isinstance(source, PreTrainedModel):
        check_fit(source.config, *fit)
        for weight in source.parameters():  # not buffers, such as the frequencies of positions: they keep their bits
            weight.data = weight.data.to(dtype)
        return source
    source = source if isinstance(source, ModelSource) else ModelSource(str(source))
    config = source.config()
    check_fit(config, *fit)
    common = {"dtype": dtype, "use_safetensors": True, **source.arguments}
    if options.head == "policy":
        return policy_class(config).from_pretrained(source.name, **common, **source.own_config)
    return _load_value_model(source, config, options, common)


def _load_value_model(
    source: ModelSource, config: Any, options: TrainOptions, common: dict[str, Any]
) -> PreTrainedModel:
    """Load a model with one label. A model to be trained without a head, such as a language model, gets a new one."""
    check_value_head(config)
    config.num_labels = 1
    # A reward model of ours or OpenRLHF's says it.
    prefix = getattr(config, "value_head_prefix", options.value_head_prefix)
    renamed = {} if prefix == _SCORE else {"key_mapping": {rf"^{prefix}\.": f"{_SCORE}."}}
    with without_log_lines("transformers.modeling_utils", _is_looked_into):
        model, info = value_class(config).from_pretrained(
            source.name, config=config, output_loading_info=True, **common, **renamed
        )
    head = getattr(model, _SCORE)
    if any(name.startswith(f"{_SCORE}.") for name in info["missing_keys"]):
        if options.optimizer is None:
            raise UserError(f"{source}: {no_head(prefix)}")
        # Small, so that a critic starts near zero; and the same in every process.
        with torch.no_grad():
            std = 1 / (head.weight.shape[1] + 1)
            head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)) * std)
    missing = [name for name in info["missing_keys"] if not name.startswith(f"{_SCORE}.")]
    if missing:
        raise UserError(
            f"{source} lacks weights of a {type(model).__name__}, such as {missing[0]}: it is another model"
        )
    return model


def _is_looked_into(text: str) -> bool:
    """Tell whether a load report names only missing weights and a language model's unused head."""
    rows = [line for line in text.splitlines() if "|" in line and "UNEXPECTED" in line]
    is_loaded = "MISMATCH" not in text and "CONVERSION" not in text
    return "LOAD REPORT" in text and is_loaded and all("lm_head." in row for row in rows)


def exported_name(name: str, options: TrainOptions) -> str:
    """Return the name of a weight in a checkpoint that `load_model` reads with these options."""
    if options.head == "value" and name.startswith(f"{_SCORE}."):
        return options.value_head_prefix + name.removeprefix(_SCORE)
    return name


def compiles(setting: bool | None, device: torch.device) -> bool:
    """Tell whether layers are compiled; None: on a CUDA device, if kernels can be built there."""
    if setting is not None:
        return setting
    # Triton builds a small C library for each kernel.
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("cc", "gcc", "clang")))
    return device.type == "cuda" and has_triton() and has_compiler


def prepare_model(
    model: PreTrainedModel, options: TrainOptions, device: torch.device, compiler: Compiler | None = None
) -> tuple[Policy | ValueModel | NumericScorer, LayoutKind]:
    """Wrap a loaded model so that it gives log-probs or values; return it and the layout that it can run.

    `compiler` is the backend that torch.compile gets for the layers and for what is done with logits; None: both
    run as they are. With `options.liger_kernel` layers get Liger's kernels for the device instead.

    Dropout and the noise of routers are switched off: the log-probs of the update must be of the same distribution as
    the engine's. The dropout of adapters is added afterwards; see `LoraOptions`.
    """
    if model.config.model_type == NUMERIC:
        return _prepare_numeric(model, options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
    attention, layout = options.attention, options.layout
    if options.lora is not None:
        add_adapters(model, options.lora, options.head)
    if options.freeze_visual_encoder:
        encoder_of(model).requires_grad_(False)
    # The layers of Qwen3.5 take an attention of ours too, but transformers does not say so.
    takes_attention = getattr(model, "_supports_attention_backend", False) or delta_nets(model)
    can_pack = attention is None and bool(takes_attention)
    plain = _use_own_attention(model) if can_pack else None
    if attention is not None:
        set_attention(model, attention)
    if attention is None and sees_images(model.config):
        _use_image_attention(encoder_of(model))
    if options.gradient_checkpointing:
        _recompute(model, options.checkpointed_layers)
    if can_pack:
        use_own_linear_attention(layers(model))
    if options.replays_routing:
        check_replay(model.config)
        replay_routing(model, dict(enumerate(layers(model))))
    model.train()
    wrapped: Policy | ValueModel
    if options.head == "policy":
        wrapped = Policy(model)
        _check_head(wrapped)
    else:
        wrapped = ValueModel(model)
    wrapped.has_plain_scores = plain is None or plain.are_plain
    if layout != "padded" and not (can_pack and not _has_state(model) and _packs(wrapped)):
        if layout != "auto":
            raise UnsupportedError(
                f"{type(model).__name__} cannot run {layout}: its layers do not keep segments apart; set the layout to"
                " 'padded' or 'auto'"
            )
        layout = "padded"
    # Layers change after the probes, which need no compiled code, and before sharding, which renames classes.
    if options.liger_kernel:
        use_liger(model, device)
    elif compiler is not None:
        compile_layers(model, compiler)
    wrapped.compiler = compiler
    return wrapped, layout


def _prepare_numeric(model: PreTrainedModel, options: TrainOptions) -> tuple[NumericScorer, LayoutKind]:
    """Wrap a policy that acts in numbers, or its value model. Raises for options that are for language models."""
    from hotseat.numeric.models import NumericScorer

    lm_only = {
        "train.dtype other than fp32": options.precision != "fp32",
        "train.lora": options.lora,
        "train.liger_kernel": options.liger_kernel,
        "train.gradient_checkpointing": options.gradient_checkpointing,
        "train.attention": options.attention,
        "actor.optimizer.kind: muon": options.muon,
    }
    if names := [name for name, value in lm_only.items() if value]:
        raise UnsupportedError(f"{', '.join(names)}: this is for language models, and actor.model acts in numbers")
    return NumericScorer(model.train()), "whole"


def compile_layers(model: PreTrainedModel, compiler: Compiler) -> None:
    """Compile layer by layer, in place: names and hooks stay. One compilation serves all layers with the same code.

    Only `forward` is compiled: what a wrapper does before and after it, such as gathering its weights, is not.
    """
    # Gradients on or off, first forward or recomputation, prompts shared or not, sizes above or below what a kernel is
    # chosen by: a dozen variants of one layer are normal. Beyond the limit torch runs a layer without compiling it,
    # which is slow, and fatal where a compiled forward is recomputed so: it saves other tensors.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    for layer in layers(language_part(model)):
        layer.forward = _of_any_size(torch.compile(layer.forward, backend=compiler))


def _of_any_size(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Make numbers of rows, tokens and segments symbols from the first call on: new ones compile nothing.

    `dynamic=True` would make symbols of the sizes of sharded weights too.
    """

    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        mark_sizes((args, tuple(kwargs.values())))
        return compiled(*args, **kwargs)

    return forward


def mark_sizes(value: Any) -> None:
    """Mark the sizes of a model's or a layer's arguments as symbols for the compiler."""
    if isinstance(value, Tensor):
        # Hidden states and rotations are [rows, tokens, size], of which the last is the model's.
        num_free = value.ndim - 1 if value.is_floating_point() and value.ndim == 3 else value.ndim
        maybe_mark_dynamic(value, tuple(range(num_free)))
    elif isinstance(value, Blocks):
        mark_sizes((value.offsets, value.places, value.copies))
    elif isinstance(value, ModelInput):
        mark_sizes((value.input_ids, value.position_ids, value.blocks, value.rows, value.targets))
    elif isinstance(value, tuple):
        for each in value:
            mark_sizes(each)


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """List the layers: the modules that transformers says must stay whole, each one unit of sharding."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _recompute(model: PreTrainedModel, num_layers: int | None) -> None:
    """Recompute activations in the backward pass: of all layers, or of so many, evenly spread.

    Only layers of text are counted: those of a visual encoder always recompute theirs.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if num_layers is None:
        return
    of_encoder = {id(module) for module in encoder_of(model).modules()} if sees_images(model.config) else set()
    every = [layer for layer in layers(model) if id(layer) not in of_encoder]
    for index, layer in enumerate(every):
        if (index + 1) * num_layers // len(every) == index * num_layers // len(every):
            layer.gradient_checkpointing = False


def _use_own_attention(model: PreTrainedModel) -> AttentionRecord:
    """Let the layers call our attention instead of their own, and make sure that both give the same.

    Windows are longer than any probe: what a layer asks for is compared with the mask that it would have had.
    """
    token_ids = _probe(model).token_ids[None].to(model.device)

    def hidden() -> Tensor:
        with torch.no_grad():
            return model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state.float()

    model.eval()
    set_attention(model, "eager")  # with capped scores and sinks, which transformers leaves out of others
    expected = hidden()
    set_attention(model, ATTENTION)
    with recorded_attention() as watch:
        ours = hidden()
    is_alike = _is_close(ours / expected.abs().max(), expected / expected.abs().max(), model.dtype)
    num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    if not is_alike or not watch.is_as_masked(max(_NUM_POSITIONS[0], min(num_positions, _NUM_POSITIONS[1]))):
        raise UnsupportedError(
            f"{type(model).__name__} has attention of another kind than training has (causal, whole or with a window,"
            " capped, with sinks): choose another model"
        )
    return watch


def _use_image_attention(encoder: PreTrainedModel) -> None:
    """Let an encoder that packs images into one row call our attention, instead of its own for one image at a time.

    `set_attn_implementation` would look for a package of kernels with that name.
    """
    parameters = (inspect.signature(type(module).forward).parameters for module in encoder.modules())
    if any("cu_seqlens" in each for each in parameters):
        encoder.config._attn_implementation_internal = IMAGE_ATTENTION


def _check_head(policy: Policy) -> None:
    """Raise if a model does more to its logits than project, scale and cap: training would use other logits.

    Random models have small logits, which a cap hardly changes: the head's are made large meanwhile.
    """
    model, head = policy.model, policy.model.get_output_embeddings()
    seen: dict[str, Tensor] = {}

    def keep_hidden(_module: nn.Module, _inputs: Any, output: Any) -> None:
        seen["hidden"] = output.last_hidden_state

    def enlarge(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["taken"], seen["logits"] = inputs[0], output * (_LARGE_LOGIT / output.abs().max())
        return seen["logits"]

    probe = take(_probe(model), [1])
    hooks = [model.base_model.register_forward_hook(keep_hidden), head.register_forward_hook(enlarge)]
    try:
        with torch.no_grad():
            logits = model(input_ids=probe.token_ids[None].to(model.device), use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    if "hidden" not in seen:  # its forward calls a part of the body, such as a decoder
        with torch.no_grad():
            output = model.base_model(input_ids=probe.token_ids[None].to(model.device), use_cache=False)
        seen["hidden"] = output.last_hidden_state
    expected = seen["logits"].float() * policy.logit_scale
    if policy.logit_cap is not None:
        expected = policy.logit_cap * torch.tanh(expected / policy.logit_cap)
    is_projected = torch.equal(seen["hidden"], seen["taken"])
    if not is_projected or not _is_close(logits, expected, model.dtype):
        raise UnsupportedError(
            f"the logits of {type(model).__name__} are not its hidden states times its output embedding, scaled and"
            " capped as its config says, which is all that training has: choose another model"
        )


def _has_state(model: PreTrainedModel) -> bool:
    """Tell whether layers carry state from token to token besides the KV cache, across the ends of segments.

    Linear attention of ours does not.
    """
    ours = delta_nets(model)
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    is_other = not kinds <= {"full_attention", "sliding_attention", *(["linear_attention"] if ours else [])}
    # Linear attention and state spaces have one, also where a config does not name the kinds of its layers.
    known = {id(net.conv1d) for net in ours}
    return is_other or any(isinstance(module, nn.Conv1d) and id(module) not in known for module in model.modules())


def _packs(wrapped: Policy | ValueModel) -> bool:
    """Tell whether packed segments stay apart, and find the context that they share.

    A model may have layers that our attention does not reach.
    """
    device, dtype = wrapped.model.device, next(wrapped.parameters()).dtype
    num_before = num_seen(wrapped.model)
    apart = _probe(wrapped.model)
    # The same two segments behind a context of three tokens.
    context = apart.token_ids[:3]
    alike = MicroBatch(
        torch.cat([context, apart.token_ids[:7], context, apart.token_ids[7:]]),
        torch.tensor([0, 10, 18]),
        torch.tensor([*[False] * 3, *[True] * 7, *[False] * 3, *[True] * 5]),
        torch.ones(18),
        {},
        ("a", "b"),
    )
    probes: tuple[tuple[MicroBatch, LayoutKind], ...] = ((apart, "packed"), (alike, "shared"))
    with torch.no_grad():
        for probe, kind in probes:
            [padded] = wrapped(model_input(probe, "padded", device=device), 1.0).values()
            [packed] = wrapped(model_input(probe, kind, device=device, num_before=num_before), 1.0).values()
            if not _is_close(packed, padded, dtype):
                return False
    return True


def _probe(model: PreTrainedModel) -> MicroBatch:
    """Make a micro-batch of two segments, of 7 and 5 tokens."""
    token_ids = torch.arange(12) * 7919 % model.get_input_embeddings().weight.shape[0]
    return MicroBatch(
        token_ids, torch.tensor([0, 7, 12]), torch.ones(12, dtype=torch.bool), torch.ones(12), {}, ("a", "b")
    )


def _is_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
    return bool(((ours - theirs).abs() <= tolerance * (1 + theirs.abs())).all())
