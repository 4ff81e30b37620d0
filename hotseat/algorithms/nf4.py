"""Linear layers whose frozen weights are kept in NF4: 4 bits each, and a scale for each 64 of them.

NF4 (Dettmers et al., "QLoRA", 2023, section 3) has 16 levels, which split a normal distribution into parts of equal
probability: with Φ⁻¹ its quantile function, δ = 0.9677083 and i = 0 to 7,

    positive levels  Φ⁻¹(δ + (0.5 - δ) i / 8)          of which there are 8, i < 8
    zero             0
    negative levels  -Φ⁻¹(δ + (0.5 - δ) i / 7)         of which there are 7, i < 7

all of them divided by the largest. A row of a weight [out, in] is cut into blocks of 64 neighbours; the scale of one
is its largest magnitude, and each of its numbers becomes the nearest level times that scale. Two numbers share a byte,
the first in its high half. Blocks do not cross rows, so rows of several weights may be stacked and cut.

Scales keep the type of the weights, in which a magnitude of theirs is exact: 4.25 bits for each weight of 16 bits. They
are not quantised once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64
SCALES = "absmax"  # what a layer calls its scales
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes [out, in / 2] of a weight [out, in], and the scales of its blocks [out, in / 64]."""
    num_rows, num_columns = weight.shape
    blocks = weight.float().reshape(num_rows, num_columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    scaled = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = torch.bucketize(scaled, between, out_int32=True).view(num_rows, num_columns // 2, 2)
    return (codes[..., 0] * 16 + codes[..., 1]).to(torch.uint8), scales.to(weight.dtype)


def level_pairs(device: torch.device | None = None) -> Tensor:
    """Return the two levels that each byte stands for, [256, 2], as the bits of their 32-bit numbers.

    As integers they stay as they are in a module whose numbers are converted to another type.
    """
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).view(torch.int32)


def dequantise(packed: Tensor, scales: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in]: products in 32 bits, rounded to `dtype` once. pairs: `level_pairs`."""
    num_rows, num_blocks = scales.shape
    if packed.is_cuda:  # one kernel, where it is compiled
        levels = functional.embedding(packed.int(), pairs.view(torch.float32))
    else:  # pairs as one number each: four times as fast
        levels = pairs.view(torch.int64)[:, 0].index_select(0, packed.int().flatten()).view(torch.float32)
    levels = levels.view(num_rows, num_blocks, BLOCK).mul_(scales.float()[..., None])
    return levels.to(dtype).view(num_rows, num_blocks * BLOCK)


class _Product(torch.autograd.Function):
    """The product with a weight in NF4. The backward makes the 16-bit weight once more instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(packed, scales, pairs)
        return functional.linear(x, dequantise(packed, scales, pairs, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        [gradient] = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        packed, scales, pairs = ctx.saved_tensors
        return gradient @ dequantise(packed, scales, pairs, gradient.dtype), None, None, None


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is frozen in NF4. Its bias, if any, stays as it is.

    Bytes and scales are buffers, not parameters: nothing shards them or gives them a gradient. device: where to
    quantise; the layer stays where it was.
    """

    absmax: Tensor
    pairs: Tensor

    def __init__(self, linear: nn.Linear, device: torch.device | None = None):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        packed, scales = quantise(weight.to(device))
        self.register_buffer("weight", packed.to(weight.device))
        self.register_buffer(SCALES, scales.to(weight.device))
        self.register_buffer("pairs", level_pairs(weight.device), persistent=False)
        self.register_parameter("bias", linear.bias)
        self.lora_A: nn.Linear | None = None
        self.lora_B: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.weight, self.absmax, self.pairs)
        if self.bias is not None:
            y = y + self.bias
        if self.lora_A is not None and self.lora_B is not None:
            y = y + self.lora_B(self.lora_A(x))
        return y

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return dequantise(self.weight, self.absmax, self.pairs, dtype)

    def add_factors(self, rank: int) -> None:
        """Add the two factors of an adapter, of zeros, for an engine: see `adapters` for what pushes bring."""
        how: dict[str, Any] = {"bias": False, "device": self.weight.device, "dtype": self.absmax.dtype}
        self.lora_A = nn.Linear(self.in_features, rank, **how).requires_grad_(False)
        self.lora_B = nn.Linear(rank, self.out_features, **how).requires_grad_(False)
        nn.init.zeros_(self.lora_A.weight)
        nn.init.zeros_(self.lora_B.weight)


def quantise_layers(model: Any, device: torch.device | None = None) -> None:
    """Replace the linear layers of a model of transformers but for its head. device: see `Nf4Linear`."""
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not head and name != "score":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Nf4Linear(layer, device))


def scales_of(weight: str) -> str:
    """Return the name of the scales of a weight."""
    return f"{weight.removesuffix('weight')}{SCALES}"


def nf4_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """Return the layers of a model that are in NF4, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Nf4Linear)}
