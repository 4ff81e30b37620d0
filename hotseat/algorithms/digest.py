"""A 64-bit digest of a tensor's raw bits that composes over slices.

    digest(t) = sum over elements  bits(t[i]) * w_0(i_0) * w_1(i_1) * ...   mod 2^64

`bits` is the element's memory read as a signed integer of its width; `w_d` is a fixed table of odd 64-bit numbers for
dimension d, indexed by the position in the full tensor. Therefore

- the digests of any slices that tile a tensor add up to its digest (`combine_digests`): a fused or sharded weight is
  compared with the whole one without gathering it;
- a single changed element always changes the digest, because an odd factor cannot cancel a difference;
- moved elements, rows, columns, blocks or tensors change it but for a chance of about 2^-40.

It guards against mistakes, not against an adversary. It takes three passes over the data, in blocks that stay in cache;
on a GPU with Triton installed, one pass by a kernel of its own.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Elements per block: the int64 copy of one stays in a core's cache; a GPU wants few launches instead.
_CPU_BLOCK = 1 << 16
_GPU_BLOCK = 1 << 26


def signed(value: int) -> int:
    """Return the int64 with the low 64 bits of `value`: torch has no arithmetic on unsigned 64-bit integers."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def mix64(x: Tensor) -> Tensor:
    """Apply the output function of splitmix64 (Steele, Lea and Flood 2014) to int64, which wraps like uint64."""
    # `>>` on int64 copies the sign: mask it off to shift in zeros.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def golden_counter(key: int | Tensor, counter: Tensor) -> Tensor:
    """[...] int64: the splitmix64 state of `key` after `counter + 1` steps; `mix64` of it is the random number."""
    return (counter + 1) * signed(_GOLDEN) + (key if isinstance(key, Tensor) else signed(key))


@cache
def _fused() -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """Return the CUDA kernel, or None if Triton is missing or does not work: it needs a C compiler and headers."""
    if importlib.util.find_spec("triton") is None:
        return None
    from hotseat.algorithms.digest_kernel import add_digest

    one = torch.ones(1, 1, dtype=torch.int64, device="cuda")
    try:
        add_digest(one, one[0], one[0], one.sum())
    except Exception as error:
        warnings.warn(
            f"digests of weights are computed without the faster kernel, since Triton does not work here: {error}",
            stacklevel=2,
        )
        return None
    return add_digest


@lru_cache(maxsize=256)  # layers repeat the same few sizes, push after push
def _axis_weights(dim: int, size: int, offset: int, stride: int, device: torch.device, _thread: int) -> Tensor:
    """Return [size] odd int64 factors of positions offset, offset + stride, ... of dimension `dim`.

    Each thread has its own, since several may compute digests at once, on streams of their own.
    """
    positions = torch.arange(size, device=device, dtype=torch.int64) * stride + offset
    return mix64(golden_counter(dim << 56, positions)) | 1


def _digest(tensor: Tensor, offset: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Compute the digest as an int64 scalar on the tensor's device."""
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    offset = tuple(offset) or (0,) * tensor.dim()
    stride = tuple(stride) or (1,) * tensor.dim()
    if len(offset) != tensor.dim() or len(stride) != tensor.dim():
        raise ValueError(f"a tensor of {tensor.dim()} dimensions needs as many offsets and strides: {offset}, {stride}")
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    bits = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor.view(_INTEGERS[tensor.element_size()])
    axes = zip(tensor.shape, offset, stride, strict=True)
    weights = [_axis_weights(dim, *axis, tensor.device, threading.get_ident()) for dim, axis in enumerate(axes)]

    # In the order of memory, so that a transposed view is read as fast as its base.
    order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    bits = bits.permute(order)
    rows = weights[order[0]]
    for d in order[1:-1]:
        rows = (rows[:, None] * weights[d]).flatten()
    if tensor.dim() == 1:
        bits, rows = bits[None], torch.ones(1, dtype=torch.int64, device=tensor.device)
    bits = bits.reshape(-1, bits.shape[-1])  # [rows, columns]
    columns = weights[order[-1]]
    fused = _fused() if tensor.is_cuda else None
    if fused is not None:
        fused(bits, rows, columns, total)
        return total

    block = _GPU_BLOCK if tensor.is_cuda else _CPU_BLOCK
    num_columns = min(block, bits.shape[1])
    num_rows = max(1, block // num_columns)
    for r in range(0, bits.shape[0], num_rows):
        for c in range(0, bits.shape[1], num_columns):
            part = bits[r : r + num_rows, c : c + num_columns].to(torch.int64)
            part = part.mul_(columns[c : c + num_columns]).sum(1)
            total += part.mul_(rows[r : r + num_rows]).sum()
    return total


def tensor_digest(tensor: Tensor, offset: Sequence[int] = (), stride: Sequence[int] = ()) -> int:
    """Compute the digest of `tensor`, in [0, 2^64); for a slice, its share of the digest of the full tensor.

    offset, stride: per dimension, the position in the full tensor of the slice's first element, and the distance
    between neighbours (default 0 and 1 everywhere). Works on any layout; the answer does not depend on it.
    """
    return int(_digest(tensor, offset, stride)) & _MASK_64


def named_digests(
    named_tensors: Iterable[tuple[str, Tensor]], offsets: Mapping[str, Sequence[int]] | None = None
) -> dict[str, int]:
    """Compute `tensor_digest` of many tensors, with one wait for the device instead of one each.

    offsets: positions in the full tensor, for tensors that are slices.
    """
    offsets = offsets or {}
    digests = {name: _digest(tensor, offsets.get(name, ()), ()) for name, tensor in named_tensors}
    if not digests:
        return {}
    devices = {digest.device for digest in digests.values()}
    target = devices.pop() if len(devices) == 1 else torch.device("cpu")
    values = torch.stack([digest.to(target) for digest in digests.values()]).tolist()
    return {name: value & _MASK_64 for name, value in zip(digests, values, strict=True)}


def combine_digests(parts: Iterable[int]) -> int:
    """Compute the digest of a tensor from the digests of slices that tile it."""
    return sum(parts) & _MASK_64
