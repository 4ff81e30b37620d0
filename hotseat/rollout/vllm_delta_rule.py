"""Qwen3.5 in vLLM, as its text model alone: under one name from vLLM 0.25 to 0.32, and on CPUs in every precision.

The trainer loads the text of Qwen3.5 also from checkpoints that have a visual encoder. vLLM's class for text is not
known to its registry before 0.32, and does not say there that it keeps states: `vllm_qwen3_5` has one that does.

On CPUs vLLM has kernels of the gated delta rule in bf16 alone, for weights that it packs where the processor has bf16
instructions. Here torch computes it from the weights as they are pushed, with states in fp32.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch

from hotseat.algorithms.delta_rule import decay_and_beta, heads, step
from hotseat.rollout.slot_states import convolved, over_rows

TEXT_CLASS = "Qwen3_5ForCausalLM"
_FAMILIES = ("qwen3_5", "qwen3_5_text")  # model types that are loaded as this class
_CPU_RULE = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"


def is_qwen3_5(model_config: Any) -> bool:
    """Tell whether a model of this config is loaded as `TEXT_CLASS`."""
    return model_config.model_type in _FAMILIES


def text_config(model_config: Any, **changes: Any) -> Any:
    """Return the config of the text model alone, changed: tokens have one position, not one for each axis of images."""
    if not is_qwen3_5(model_config):  # vLLM asks with an empty one whether the type changes
        return model_config
    config = model_config.get_text_config()
    config.architectures = [TEXT_CLASS]
    rope = config.rope_parameters
    config.rope_parameters = {name: rope[name] for name in rope if not name.startswith("mrope_")}
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def arguments(model_config: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for a model of this config. overrides: entries of its config that are changed."""
    if not is_qwen3_5(model_config):
        return {"hf_overrides": overrides}
    return {
        "hf_overrides": functools.partial(text_config, **overrides),
        "mamba_ssm_cache_dtype": "float32",  # as the trainer and the transformers engine have states
        "gdn_prefill_backend": "triton",  # FlashInfer's, the default on Hopper, is another package
    }


def state_bytes(model_config: Any) -> int:
    """Return the bytes of one request's states; vLLM pads the blocks of all layers to the size of the largest."""
    config = model_config.get_text_config()
    if not is_qwen3_5(model_config):
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    elements = values * config.linear_key_head_dim + config.linear_conv_kernel_dim * (2 * keys + values)
    return 4 * elements * config.num_hidden_layers


def register_text_class() -> None:
    """Make vLLM know the class for text, in this process."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(TEXT_CLASS, f"hotseat.rollout.vllm_qwen3_5:{TEXT_CLASS}")


def compute_in_torch() -> None:
    """Compute the rule by torch instead of by vLLM's CPU kernels. Has no effect where vLLM uses a device."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and importlib.util.find_spec(_CPU_RULE) is not None:
        from vllm.utils.torch_utils import LayerNameType

        _over_requests.__annotations__["layer_name"] = LayerNameType  # vLLM makes an operator's schema of them
        theirs: Any = importlib.import_module(_CPU_RULE)
        theirs.cpu_gdn_attention_core = _over_requests


def _over_requests(
    mixed_qkv: torch.Tensor,  # [tokens, channels]: what the convolution takes
    b: torch.Tensor,  # [tokens, heads]
    a: torch.Tensor,
    core_attn_out: torch.Tensor,  # [tokens, heads, value_dim], to be written
    layer_name: Any,
) -> None:
    """Read and change the states of the requests of a step: first those with one token, then those with more."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    if context.attn_metadata is None:  # memory is being measured
        return
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    requests = context.attn_metadata[layer.prefix]
    inputs, states = layer.kv_cache[0], layer.kv_cache[1]
    if is_conv_state_dim_first():
        inputs = inputs.transpose(1, 2)  # [blocks, num_before, channels]
    num_blocks, num_heads, value_dim, key_dim = states.shape
    states = states.view(num_blocks, num_heads, key_dim, value_dim)  # in this order they are read here
    sizes = _of_rank(layer)
    decay, beta = decay_and_beta(layer, a, b)
    num_single = requests.num_decodes
    if num_single:
        places = requests.non_spec_state_indices_tensor[:num_single].long()
        seen = torch.cat([inputs[places], mixed_qkv[:num_single, None].to(inputs.dtype)], dim=1)
        inputs[places] = seen[:, 1:]
        state = states[places].float()
        tokens = heads(sizes, convolved(sizes, seen)[:, 0], decay[:num_single], beta[:num_single])
        core_attn_out[:num_single] = step(tokens, state).to(core_attn_out.dtype)
        states[places] = state.to(states.dtype)
    starts = requests.non_spec_query_start_loc
    for row in range(num_single, num_single + requests.num_prefills):
        place = int(requests.non_spec_state_indices_tensor[row])
        if not requests.has_initial_state[row]:
            inputs[place], states[place] = 0, 0
        own = slice(int(starts[row]), int(starts[row + 1]))
        seen = torch.cat([inputs[place], mixed_qkv[own].to(inputs.dtype)])
        inputs[place] = seen[len(seen) - inputs.shape[1] :]
        lengths = starts[row + 1 : row + 2] - starts[row]
        state = states[place].float()
        read, after = over_rows(sizes, seen[None], decay[None, own], beta[None, own], lengths, state[None])
        core_attn_out[own] = read[0].to(core_attn_out.dtype)
        states[place] = after[0].to(states.dtype)


def _of_rank(layer: Any) -> Any:
    """Return the sizes of a layer on this tensor-parallel rank, and what convolves its channels."""
    return SimpleNamespace(
        key_dim=layer.key_dim // layer.tp_size,
        value_dim=layer.value_dim // layer.tp_size,
        num_k_heads=layer.num_k_heads // layer.tp_size,
        num_v_heads=layer.num_v_heads // layer.tp_size,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        conv1d=layer.conv1d,
        activation=layer.activation,
    )
