"""Latent attention in vLLM (DeepSeek-V2 and V3, Kimi K2): the weights that it decodes with.

vLLM prefills with `kv_b_proj`, and decodes with two other forms of it: `W_UK_T`, which takes queries to the latent
values that are cached, and `W_UV`, which takes what attention gives to values. `process_weights_after_loading` makes
both of `kv_b_proj`: views of it, or copies, depending on version, dtype and platform. So a push makes them again, as
vLLM's own layerwise reload does, in the memory where captured graphs find them.

The two hold each value of `kv_b_proj` once. In its order they have its digest, which is that of the trainer's weight:
a form that was not made again from what a push brought is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotseat.algorithms.digest import named_digests
from hotseat.errors import WeightError
from hotseat.rollout.fused_weights import Piece
from hotseat.rollout.vllm_versions import installed_version

_FORMS = ("W_UK_T", "W_UV")


def latent_layers(model: nn.Module) -> dict[str, Any]:
    """Return vLLM's layers of latent attention, by name."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return {name: module for name, module in model.named_modules() if isinstance(module, MLAAttention)}


def latent_problem(model: nn.Module) -> str | None:
    """Tell why pushed weights would not reach what this model decodes with; None if they do."""
    for layer in latent_layers(model).values():
        weight, forms = layer.kv_b_proj.weight, [getattr(layer, form, None) for form in _FORMS]
        if all(isinstance(form, Tensor) and form.dtype == weight.dtype for form in forms):
            if in_order(layer).shape == weight.shape:
                continue
        return (
            f"vLLM {installed_version()} decodes this {type(model).__name__} with weights that its backend"
            f" {layer.attn_backend.get_name()} keeps in another form, where no push reaches: leave attention_backend"
            " out of rollout.engine_args, or set rollout.engine to transformers"
        )
    return None


def rotate_views(model: nn.Module) -> None:
    """Have vLLM on a CPU rotate latent attention's queries and keys by torch operations.

    Its kernel rotates them in place, as if they were not parts of wider tensors: keys stay as they were.
    """
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, MultiHeadLatentAttentionWrapper) and module.rotary_emb is not None:
            rotary: Any = module.rotary_emb
            rotary._forward_method = rotary.forward_native


def in_order(layer: Any) -> Tensor:
    """Put what a layer decodes with together, in the order of its `kv_b_proj`: [heads x (keys + values), latent]."""
    to_latent, to_values = (getattr(layer, form) for form in _FORMS)
    return torch.cat([to_latent, to_values.transpose(1, 2)], dim=1).flatten(0, 1)


class DecodingWeights:
    """Weights that latent layers decode with, made from those that a push brings."""

    def __init__(self, model: nn.Module, pieces: Iterable[Piece]):
        named = {piece.live.data_ptr(): piece for piece in pieces}
        pairs = [(named.get(layer.kv_b_proj.weight.data_ptr()), layer) for layer in latent_layers(model).values()]
        self._layers = {piece.name: (piece, layer) for piece, layer in pairs if piece is not None}

    def make(self, dtype: torch.dtype) -> None:
        """Make it from the weights that are there."""
        for _, layer in self._layers.values():
            held = {form: getattr(layer, form) for form in _FORMS}
            layer.process_weights_after_loading(dtype)
            for form, tensor in held.items():
                made = getattr(layer, form)
                if made.data_ptr() != tensor.data_ptr():  # captured graphs read where it was
                    tensor.copy_(made)
                    setattr(layer, form, tensor)

    def check(self, digests: Mapping[str, int]) -> None:
        """Raise `WeightError` unless it has these digests: of this rank's pieces of weights, by name."""
        chosen = {name: self._layers[name] for name in digests if name in self._layers}
        offsets = {name: piece.offset for name, (piece, _) in chosen.items()}
        for name, digest in named_digests(_named(chosen), offsets).items():
            if digest != digests[name]:
                raise WeightError(
                    f"{name}: what vLLM decodes with ({', '.join(_FORMS)}) was not made from the values of this weight"
                    " that it holds"
                )


def _named(layers: Mapping[str, tuple[Piece, Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, (_, layer) in layers.items():  # one by one: each is a copy
        yield name, in_order(layer)
