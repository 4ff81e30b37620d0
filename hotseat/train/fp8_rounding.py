"""The effect of an engine's FP8 weights and cache on a policy, in a forward that is exact otherwise.

Engines with `rollout.quantization: fp8` round the weights of linear layers, each row (output channel) by a scale of its
own, and what goes into these layers, each token by its own; the head stays as it is. With `rollout.kv_cache_dtype: fp8`
they round queries, keys and values, with scale 1. All are E4M3 numbers: 3 bits of mantissa, at most 448.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hotseat.errors import RunError
from hotseat.vision import set_attention

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
