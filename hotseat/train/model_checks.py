"""Checks, before a model is loaded, that it can do what training asks of it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hotseat.algorithms.nf4 import BLOCK
from hotseat.errors import UnsupportedError, UserError
from hotseat.train.attention import ATTENTION
from hotseat.train.backend import TrainOptions
from hotseat.train.experts import check_experts
from hotseat.train.sequence import check_heads
from hotseat.train.tensor import check_cut
from hotseat.vision import value_class

_NF4_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def check_fit(config: Any, sequence_parallel_size: int, tensor_parallel_size: int, aux_loss_coefficient: float) -> None:
    """Raise if a model of this config cannot do what is asked of it."""
    check_family(config)
    check_heads(sequence_parallel_size, config)
    check_cut(tensor_parallel_size, config)
    if aux_loss_coefficient:
        check_experts(config)


def check_family(config: Any) -> None:
    """Raise if models of this config cannot be trained whatever the options are."""
    name = type(config).__name__.removesuffix("Config")
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        kind = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise UnsupportedError(
            f"its weights are quantized ({kind or type(quantized).__name__}), and only weights of 16 or 32 bits are"
            " trained: choose a checkpoint of the model in bf16, or make one with transformers, also for"
            " train.load_in_4bit"
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if "chunked_attention" in kinds:
        raise UnsupportedError(
            f"{name} has layers with attention inside chunks of a sequence, which training does not have: choose"
            " another model"
        )


def check_nf4(config: Any, num_parts: int) -> None:
    """Raise if the layers of a model of this config cannot be kept in NF4. num_parts: into which engines cut them."""
    instead = "unset train.load_in_4bit"
    if config.model_type not in _NF4_FAMILIES:
        name = type(config).__name__.removesuffix("Config")
        raise UnsupportedError(
            f"weights in 4 bits (train.load_in_4bit) have not been tried with {name}: choose a model of the kinds"
            f" {', '.join(_NF4_FAMILIES)}, or {instead}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads * head_dim
    widths = (config.hidden_size, heads // num_parts, config.intermediate_size // num_parts)
    odd = next((width for width in widths if width % BLOCK), None)
    if odd is not None:
        parts = f", cut into {num_parts} parts by rollout.tensor_parallel_size," if num_parts > 1 else ""
        raise UnsupportedError(
            f"weights in 4 bits (train.load_in_4bit) have a scale for each {BLOCK} inputs of a layer, and layers of"
            f" this model{parts} have {odd} inputs: {instead}"
        )


def check_attention(options: TrainOptions) -> None:
    """Raise if transformers does not have the chosen attention, or not here."""
    name = options.attention
    if name is None:
        return
    if "/" in name:  # a kernel from the hub, which transformers loads with this package
        is_there, needs = find_spec("kernels") is not None, "the package kernels: `pip install kernels`"
    elif name not in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()):
        own = ", ".join(sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()} - {ATTENTION}))
        raise UserError(f"train.attention: transformers has none that is called {name!r}; it has {own}")
    elif name.startswith("flash_attention"):
        package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(name, name)
        is_there = find_spec(package) is not None and torch.cuda.is_available()
        needs = f"a CUDA device and the package {package}"
        if is_there and options.precision == "fp32":
            is_there, needs = False, "16-bit floats: set train.dtype to bf16"
    else:
        is_there, needs = True, ""
    if not is_there:
        raise UserError(
            f"train.attention: {name} needs {needs}; leave it unset for torch's own flash attention, or set sdpa"
        )


def check_length(config: Any, max_length: int) -> None:
    """Raise if the angles of a model of this config depend on more than the position in sequences of this length."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and limit is not None and max_length > limit:
        raise UnsupportedError(
            f"beyond {limit} tokens the angles of longrope depend on the longest sequence of a batch, and trainer and"
            f" engine would disagree: set data.max_length, which is {max_length}, to at most {limit}"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if rope.get("rope_type") == "dynamic" and positions is not None and max_length > positions:
        raise UnsupportedError(
            f"beyond {positions} tokens the angles of dynamic NTK scaling depend on the longest sequence of a batch,"
            f" and log-probs on what a sample is packed with: set data.max_length, which is {max_length}, to at most"
            f" {positions}"
        )


def check_value_head(config: Any) -> None:
    """Raise if models of this config cannot have a value head."""
    if type(config) not in value_class(config)._model_mapping:
        raise UserError(
            f"transformers has no {type(config).__name__.removesuffix('Config')} with a head of one number: choose"
            " another model for the critic or the reward"
        )


def check_stored_head(folder: Path, config: Any, prefix: str) -> None:
    """Raise if a folder with a model of this config has no head of one number, as far as its files tell."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    elif single.is_file():
        with safe_open(single, "pt") as stored:
            files = dict.fromkeys(stored.keys(), single)
    else:
        return
    prefix = getattr(config, "value_head_prefix", prefix)
    heads = [name for name in files if name.startswith(f"{prefix}.")]
    if not heads:
        raise UserError(no_head(prefix))
    for name in heads:
        with safe_open(files[name], "pt") as stored:
            num_labels = stored.get_slice(name).get_shape()[0]
        if num_labels != 1:
            raise UserError(f"its {name} gives {num_labels} numbers, and a reward is one: choose one with one label")


def no_head(prefix: str) -> str:
    return (
        f"it has no weights called {prefix}.*, the head of a reward model: choose a reward model, or set"
        " value_head_prefix to what its head is called"
    )
