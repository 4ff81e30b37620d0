"""Weights that vLLM keeps in FP8 (`rollout.quantization: fp8`): how pushed ones get there, and what digests say.

vLLM quantises the weights of linear layers when it loads them, each row (output channel) with a scale of its own. A
push brings 16-bit weights as ever; each piece is quantised by vLLM's own method and copied into the memory that the
layer has, values and scales, where captured graphs find them. Rows do not depend on each other, so the pieces of a
fused weight may come one by one, and an engine that got weights by a push equals, bit for bit, one that loaded them.

No digest of 16-bit weights can be computed from FP8 ones. So the digest of what arrived is kept beside the digest of
what was made from it, and counts for as long as the live values and scales still have the latter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from hotseat.algorithms.digest import named_digests
from hotseat.errors import WeightError
from hotseat.rollout.fused_weights import FP8, Piece
from hotseat.rollout.vllm_versions import FP8_WEIGHTS, installed_version

_METHOD = "Fp8PtpcOnlineLinearMethod"  # vLLM's: a scale for each output channel, and for each token of the input
_INSTEAD = "unset rollout.quantization"


@dataclass(frozen=True, kw_only=True)
class QuantisedPiece(Piece):
    """A rank's part of one weight, in FP8."""

    layer: Any  # vLLM's, which the weight belongs to
    scales: Tensor  # a view [rows, 1]: one for each row of `live`

    def take(self, whole: Tensor) -> None:
        """Quantise this piece of a new weight."""
        rows = self.window(whole).to(self.live.device, self.layer.orig_dtype)
        values, scales = quantised(self.layer, rows)
        self.live.copy_(values)
        self.scales.copy_(scales)


def quantised(layer: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows [num_rows, in_size] as vLLM does for this layer: (values in FP8, scales [num_rows, 1])."""
    stand_in = copy.copy(layer)
    stand_in._parameters = {"weight": nn.Parameter(rows.contiguous(), requires_grad=False)}
    stand_in.__dict__.pop("_already_called_process_weights_after_loading", None)
    method = copy.copy(layer.quant_method)
    method.fp8_linear = copy.copy(method.fp8_linear)  # it notes the size of the layer, which is not that of these rows
    method.process_weights_after_loading(stand_in)
    num_rows, in_size = rows.shape
    # vLLM's kernels take the weight transposed, and some want its sides padded.
    return stand_in.weight.t()[:num_rows, :in_size], stand_in.weight_scale[:num_rows]


def quantising(pieces: Iterable[Piece], model: nn.Module) -> Iterator[Piece]:
    """Have pieces of FP8 weights quantise the weights that they get; others stay as they are."""
    layers = {_address(layer.weight): layer for layer in _quantised_layers(model)}
    for piece in pieces:
        layer = layers.get(_address(piece.live)) if piece.live.dtype == FP8 else None
        if layer is None:
            yield piece
            continue
        start = (piece.live.storage_offset() - layer.weight.storage_offset()) // piece.live.stride(0)
        scales = layer.weight_scale.detach()[start : start + len(piece.live)]
        same = {field.name: getattr(piece, field.name) for field in fields(piece)}
        yield QuantisedPiece(**same, layer=layer, scales=scales)


def fp8_problem(model: nn.Module, model_config: Any) -> str | None:
    """Tell why pushed weights cannot be quantised into this model; None if they can, or if it is not quantised."""
    if model_config.quantization != FP8_WEIGHTS:
        return None
    layers = _quantised_layers(model)
    what = f"vLLM {installed_version()} keeps the weights of this {type(model).__name__}"
    if not layers:
        return f"{what} in none of the forms that are known in FP8: {_INSTEAD}"
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dtype != FP8 or module in layers:
            continue
        return f"{what} in FP8 by {type(module.quant_method).__name__} ({name}), where none can be pushed: {_INSTEAD}"
    for layer in layers:
        sizes = (layer.output_size_per_partition, layer.input_size_per_partition)
        if tuple(layer.weight.t().shape) != sizes or tuple(layer.weight_scale.shape) != (sizes[0], 1):
            return f"{what} padded ({layer.prefix}, {sizes[0]} x {sizes[1]}), and only multiples of 16 fit: {_INSTEAD}"
    return None


def _quantised_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(getattr(module, "quant_method", None)).__name__ == _METHOD]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class _Made:
    """Digests of one piece: of the 16-bit weights that arrived, and of what was made from them."""

    arrived: int
    held: int


class QuantisedDigests:
    """Digests of the 16-bit weights from which the live ones were made."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], _Made] = {}  # by a piece's name and offset

    def record(self, arrived: Sequence[tuple[QuantisedPiece, Tensor]]) -> None:
        """Record which 16-bit weights (whole ones) these pieces were just made from."""
        # One by one: on a device each is a copy.
        windows = ((str(i), _as_arrived(piece, whole)) for i, (piece, whole) in enumerate(arrived))
        digests = named_digests(windows, {str(i): piece.offset for i, (piece, _) in enumerate(arrived)})
        held = _held([piece for piece, _ in arrived])
        for index, (piece, _) in enumerate(arrived):
            self._made[piece.name, piece.offset] = _Made(digests[str(index)], held[index])

    def of(self, pieces: Sequence[QuantisedPiece]) -> list[int]:
        """Return the digest of what each piece was made from. Raises `WeightError` if one is not that any more."""
        digests = []
        for piece, held in zip(pieces, _held(pieces), strict=True):
            made = self._made.get((piece.name, piece.offset))
            if made is None:
                raise WeightError(f"{piece.name} is in FP8 and was not pushed yet: it has no digest")
            if made.held != held:
                raise WeightError(f"{piece.name}: the engine's FP8 values are not those made of the weight it got")
            digests.append(made.arrived)
        return digests

    def forget(self) -> None:
        self._made = {}


def _as_arrived(piece: QuantisedPiece, whole: Tensor) -> Tensor:
    return piece.window(whole).to(piece.live.device, piece.layer.orig_dtype)


def _held(pieces: Sequence[QuantisedPiece]) -> list[int]:
    """Compute digests of live values and scales together."""
    values = named_digests((str(index), piece.live) for index, piece in enumerate(pieces))
    scales = named_digests((str(index), piece.scales) for index, piece in enumerate(pieces))
    return [hash((values[str(index)], scales[str(index)])) for index in range(len(pieces))]
