"""Weights on their way out of the trainer: their types, and adapters merged into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hotseat.algorithms.adapters import WeightForm, factor_names
from hotseat.algorithms.nf4 import Nf4Linear, scales_of
from hotseat.train.backend import Precision
from hotseat.train.lora import Adapter, base_names

# Rows of a weight as they leave, from its name, the live rows and the index of the first of them.
Merge = Callable[[str, Tensor, int], Tensor]


@dataclass(frozen=True)
class OutgoingWeights:
    """Types and adapters: the differences between a weight in the trainer and the same weight in an engine."""

    model: PreTrainedModel
    adapters: Mapping[str, Adapter]  # by the name of their weight; empty: all weights are trained
    precision: Precision
    saved: frozenset[str] = frozenset()  # names in the model's `state_dict`
    nf4: Mapping[str, Nf4Linear] = field(default_factory=dict)  # layers, by the name of their weight

    def buffers(self, form: WeightForm = "apart") -> dict[str, Tensor]:
        """Return the buffers that are saved, by name; merged: without the scales of weights in NF4."""
        saved = [name for name, _ in self.model.named_buffers() if name in self.saved]
        named = {plain: self.model.get_buffer(name) for name, plain in base_names(saved).items()}
        scales = {scales_of(name) for name in self.nf4} if form == "merged" else set()
        return {name: buffer for name, buffer in named.items() if name not in scales}

    def packed(self) -> list[Tensor]:
        """List the bytes and scales of weights in NF4."""
        return [tensor for layer in self.nf4.values() for tensor in (layer.weight, layer.absmax)]

    def dtype(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the type in which weights leave; None: each in its own.

        A frozen base may have fewer bits than the adapters, and than the two merged: then the type is that of
        the training's precision, or, of a base in NF4, that of the weights which it was made from.
        """
        if dtype is not None or not self.adapters:
            return dtype
        if self.nf4:
            return next(iter(self.nf4.values())).absmax.dtype
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def buffer_dtype(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the type in which a buffer leaves: `dtype`, unless transformers always keeps it in 32 bits."""
        kept = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        return None if set(name.split(".")) & set(kept) else dtype

    def factor_names(self) -> list[str]:
        """List the names of the adapters' factors."""
        return [name for each in self.adapters.values() for name in (each.a, each.b)]

    def merging(self, factors: Mapping[str, Tensor]) -> Merge:
        """Return the function that merges adapters into weights, from all their factors, whole."""

        def merged(name: str, rows: Tensor, first_row: int) -> Tensor:
            adapter, layer = self.adapters.get(name), self.nf4.get(name)
            if layer is not None:
                rows = layer.dequantised(torch.float32 if adapter is not None else layer.absmax.dtype)
            return rows if adapter is None else adapter.merge(rows, first_row, factors[adapter.a], factors[adapter.b])

        return merged

    def factors(self, whole: Mapping[str, Tensor], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield A and s B of every adapter, by the names under which they travel, from the whole factors."""
        for name, adapter in self.adapters.items():
            name_of_a, name_of_b = factor_names(name)
            yield name_of_a, convert(whole[adapter.a], dtype)
            yield name_of_b, convert(whole[adapter.b].float().mul(adapter.scale), dtype)


def as_they_are(_name: str, rows: Tensor, _first_row: int) -> Tensor:
    """Leave weights without their adapters."""
    return rows


def convert(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a tensor of floating-point numbers; None, and other tensors: leave it as it is."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
