"""Buckets: many tensors in one block of bytes, so that few large transfers replace many small ones.

A bucket is small itself: it names its tensors, and its `data` says how to get at their bytes. It can be pickled to any
process, and the bytes come there when it is iterated: mapped, received, or out of the pickle, as its transport has it
(`HostData`, `device_ipc`, `broadcast`). An engine that hands its buckets on to worker processes needs nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; a view of any dtype may start at such an offset
_FIRST_BLOCK = 1 << 26  # bytes; what a small model makes do with

# Types travel by name, not as pickled objects: what arrives is data.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}


@dataclass(frozen=True)
class Entry:
    """The place of one tensor in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class BucketData(Protocol):
    """Access to a bucket's bytes, one class for each transport."""

    def open(self) -> Tensor:
        """Return [at least the bucket's bytes] uint8 in this process, to be read only, until the next bucket."""


@dataclass(frozen=True)
class HostData:
    """Bytes in host memory, as numpy: the cluster hands them to other processes of a node without a copy for each."""

    array: np.ndarray  # [num_bytes] uint8

    def open(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.array)


def host_data(packed: Tensor) -> HostData:
    """Copy [num_bytes] uint8 from any device to host memory."""
    return HostData(packed.cpu().numpy())


@dataclass(frozen=True)
class Bucket:
    """Part `index` of a push of one version."""

    version: int
    index: int
    entries: tuple[Entry, ...]
    data: BucketData

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors: views of bytes that others read too and that the sender will reuse."""
        whole = self.data.open()
        for entry in self.entries:
            piece = whole[entry.start : entry.start + entry.num_bytes]
            yield entry.name, piece.view(_DTYPES[entry.dtype]).view(entry.shape)


class Packer:
    """Packs tensors in order into two alternating blocks of memory: one is filled while the other is read.

    A tensor is never cut; one larger than `bucket_bytes` has a bucket of its own, for which the block grows. Blocks are
    kept from push to push, so that what other processes know of them stays true.
    """

    def __init__(self, device: torch.device, bucket_bytes: int):
        self._bucket_bytes = bucket_bytes
        self._blocks = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self.turn = 0  # which of the two blocks was packed last
        self._named: Iterator[tuple[str, Tensor]] = iter(())
        self._next: tuple[str, Tensor] | None = None

    @property
    def block(self) -> Tensor:
        """Return the block that was packed last."""
        return self._blocks[self.turn]

    def begin(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._named = iter(named)
        self._next = next(self._named, None)

    def pack(self) -> tuple[tuple[Entry, ...], int] | None:
        """Fill the other block; return its entries and bytes, or None if no tensor is left.

        The copy may still be under way.
        """
        if self._next is None:
            return None
        self.turn = 1 - self.turn
        entries: list[Entry] = []
        end = used = 0
        while self._next is not None:
            name, tensor = self._next
            num_bytes = tensor.numel() * tensor.element_size()
            if entries and end + num_bytes > self._bucket_bytes:
                break
            self._make_room(used, end + num_bytes)
            place = self.block[end : end + num_bytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach())
            entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, num_bytes))
            used = end + num_bytes
            end = -(-used // ALIGNMENT) * ALIGNMENT
            self._next = next(self._named, None)  # Only now: the source may reuse its memory for it.
        return tuple(entries), used

    def _make_room(self, used: int, needed: int) -> None:
        block = self.block
        needed = -(-needed // ALIGNMENT) * ALIGNMENT
        if needed <= block.numel():
            return
        size = max(needed, min(self._bucket_bytes, max(2 * block.numel(), _FIRST_BLOCK)))
        if block.is_cuda:
            torch.cuda.empty_cache()  # The block gets a segment of its own: a shared one could not be given back.
        grown = torch.empty(size, dtype=torch.uint8, device=block.device)
        grown[:used] = block[:used]
        self._blocks[self.turn] = grown
