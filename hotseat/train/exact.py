"""Log-probs of a policy, computed in float32 throughout: the reference for errors of rounding in 16 bits.

The effect of an engine's FP8 weights and cache can be added to it. Engines with `rollout.quantization: fp8` round the
weights of linear layers, each row (output channel) by a scale of its own, and what goes into these layers, each token
by its own; the head stays as it is. With `rollout.kv_cache_dtype: fp8` they round queries, keys and values, with scale
1. All are E4M3 numbers: 3 bits of mantissa, at most 448.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hotseat.errors import RunError
from hotseat.model_source import ModelSource
from hotseat.train.policy_models import logit_changes
from hotseat.vision import Vision, policy_class, set_attention

_MARGIN_BYTES = 1 << 30  # device memory left for others
_ALIVE = 8  # tensors of the widest kind that a layer has at one time


@dataclass(frozen=True)
class ExactScores:
    """Log-probs of tokens from a forward in float32. One entry per scored token, sequence by sequence."""

    log_probs: list[float]
    with_rounded_logits: list[float]  # the same, after the logits were rounded to the engine's type
    with_fp8: list[float] | None = None  # the same, with layers or cache in FP8; None: the engine has neither


@dataclass(frozen=True)
class Fp8Parts:
    """Parts of an engine that are in FP8."""

    weights: bool = False  # of linear layers, and what goes into them
    cache: bool = False  # keys and values


NO_FP8 = Fp8Parts()


def missing_bytes(model: ModelSource, device: torch.device, longest: int) -> int:
    """Measure how much device memory is lacking for `exact_log_probs`. 0: there is enough. Always 0 on a CPU.

    longest: tokens of the longest sequence.
    """
    if device.type != "cuda":
        return 0
    with torch.device("meta"):
        policy = _untrained(model)
    text = policy.config.get_text_config()
    widest = max(text.vocab_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    needed = 4 * (sum(weight.numel() for weight in policy.parameters()) + _ALIVE * widest * longest)
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, needed + _MARGIN_BYTES - free - unused)


def exact_log_probs(
    model: ModelSource,
    named_tensors: Iterable[tuple[str, Tensor]],
    sequences: Sequence[Sequence[int]],
    num_context: Sequence[int],
    temperature: float,
    *,
    dtype: torch.dtype,
    device: torch.device,
    images: Sequence[Sequence[str]] = (),
    fp8: Fp8Parts = NO_FP8,
) -> ExactScores:
    """Score all tokens after the context of each sequence, with the policy that has these weights, in float32.

    model: for its shape alone. named_tensors: every weight, in any type, as `Backend.weights`
    yields them. num_context: tokens at the beginning of each sequence that are not scored, at least 1. dtype: to round
    logits to. images: those of each sequence. fp8: what the engine has in FP8.
    """
    with torch.device(device):
        policy = _untrained(model).eval()
    policy.tie_weights()
    slots = dict(policy.named_parameters()) | dict(policy.named_buffers())
    missing = {name for name, _ in policy.named_parameters()}
    with torch.no_grad():
        for name, tensor in named_tensors:
            if name not in slots:
                raise RunError(f"{type(policy).__name__} has no weight {name}, which the trainer holds")
            slots[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise RunError(f"the trainer holds no {min(missing)}, which {type(policy).__name__} has")

        def scores() -> list[list[float]]:
            each = zip(sequences, num_context, images or [()] * len(sequences), strict=True)
            scored = [
                _scores(policy, torch.tensor(tokens), start, temperature, dtype, seen) for tokens, start, seen in each
            ]
            return torch.cat(scored, dim=1).tolist()

        exact, rounded = scores()
        if fp8 == NO_FP8:
            return ExactScores(exact, rounded)
        if fp8.weights:
            round_layers(policy)
        if fp8.cache:
            round_cache(policy)
        return ExactScores(exact, rounded, scores()[0])


def _untrained(model: ModelSource) -> PreTrainedModel:
    """Make a model of this shape with uninitialised weights, without drawing from torch's generators."""
    config = model.config()
    options: dict[str, Any] = {"dtype": torch.float32, **model.arguments}
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"  # transformers leaves the cap of scores out of faster ones
    with no_init_weights():
        return policy_class(config).from_config(config, **options)


def _scores(
    policy: PreTrainedModel, tokens: Tensor, start: int, temperature: float, dtype: torch.dtype, images: Sequence[str]
) -> Tensor:
    """Score the tokens from `start` on, exactly and with rounded logits: [2, num_tokens - start]."""
    device, vision = policy.device, Vision.of(policy) if images else None
    arguments = {} if vision is None else vision.arguments(images, device)
    if vision is not None and vision.has_axes:
        arguments["position_ids"] = vision.positions(tokens[:-1], images)[:, None].to(device)
    tokens = tokens.to(device)
    output = policy.base_model(input_ids=tokens[None, :-1], use_cache=False, **arguments)
    hidden = output.last_hidden_state[0, start - 1 :]
    logits = policy.get_output_embeddings()(hidden)  # [num_tokens - start, vocab_size]
    scale, cap = logit_changes(policy.config)

    def log_probs(values: Tensor) -> Tensor:
        values = values.float() * scale
        values = values if cap is None else cap * torch.tanh(values / cap)
        return (values / temperature).log_softmax(-1).gather(1, tokens[start:, None])[:, 0]

    return torch.stack([log_probs(logits), log_probs(logits.to(dtype))]).cpu()


# --- FP8 --------------------------------------------------------------------------------------------------------------


_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_SMALLEST_SCALE = 1.0 / (_LARGEST * 512)  # of rows of zeros
_ATTENTION = "hotseat_fp8_cache"


def rounded_rows(values: Tensor) -> Tensor:
    """Round values [..., size] to FP8, each row by a scale that makes its largest magnitude the largest number."""
    scales = (values.abs().amax(-1, keepdim=True).float() / _LARGEST).clamp_min(_SMALLEST_SCALE)
    return (_rounded(values.float() / scales) * scales).to(values.dtype)


def _rounded(values: Tensor) -> Tensor:
    return values.clamp(-_LARGEST, _LARGEST).to(_FP8).to(values.dtype)


@torch.no_grad()
def round_layers(policy: PreTrainedModel) -> None:
    """Round the weights of all linear layers but the head, in place, and from now on what goes into them."""
    head = policy.get_output_embeddings()
    for layer in policy.modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            layer.weight.copy_(rounded_rows(layer.weight))
            layer.register_forward_pre_hook(lambda _layer, inputs: (rounded_rows(inputs[0]), *inputs[1:]))


def round_cache(policy: PreTrainedModel) -> None:
    """Round queries, keys and values of the language model from now on.

    Raises `RunError` for attention that torch's own does not compute.
    """
    if policy.config.get_text_config()._attn_implementation != "sdpa":
        raise RunError(f"the attention of {type(policy).__name__} has no form with an FP8 KV cache")
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, sdpa_mask)
    set_attention(policy, _ATTENTION)


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, _rounded(query), _rounded(key), _rounded(value), *args, **options)
