"""Weights of a policy with low-rank adapters, in the forms in which they leave the trainer.

A layer of weight W [out, in] with the factors A [rank, in] and B [out, rank] computes W x + s B A x. Receivers get A
and s B, so that they need not know s.

    merged    W + s B A, under the name of W
    apart     A and s B of every adapter, then every W as it is
    adapters  A and s B of every adapter: for receivers that have every W, which never changes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from torch import Tensor

WeightForm = Literal["merged", "apart", "adapters"]

_A, _B = ".lora_A.weight", ".lora_B.weight"


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names under which A and s B of a weight's adapter travel."""
    layer = weight.removesuffix(".weight")
    return layer + _A, layer + _B


def is_factor(name: str) -> bool:
    """Tell whether a factor of an adapter travels under this name."""
    return name.endswith((_A, _B))


def merge_apart(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Merge weights that come apart: yield W + s B A in 32 bits, and weights without an adapter as they are."""
    factors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if is_factor(name):
            factors[name] = tensor.float().clone()
            continue
        a, b = factor_names(name)
        yield name, tensor.float() + factors.pop(b) @ factors.pop(a) if a in factors else tensor
