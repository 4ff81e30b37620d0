"""Tensors offloaded to pinned host memory, their device memory given back, and onloaded again in place.

A tensor keeps its identity: its storage is emptied and later refilled, so parameters, optimizer state and whatever
views a sharding library holds on them stay valid.

DeepSpeed has an `offload_states` of its own, which is not used: it onloads everything or nothing, where a plan
wants weights without optimizer state; with stage 3 it moves the state of one optimizer only, and none with stage 0; and
it pins memory anew each time: with stage 2 offloading took three times as long, onloading as long (bench/offload.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from hotseat.placement.role_names import Part
from hotseat.train.backend import PARTS
from hotseat.types import Moved

_ROUND = 512  # bytes; torch's allocator rounds every size up to a multiple
_SMALL = 1 << 20  # bytes; up to this it takes memory from elsewhere


class HostBuffer:
    """Host memory for the tensors of one part. Pinning is slow, so the memory is kept and used again."""

    # The pinned allocator rounds up to a power of two: chunks of one waste nothing.
    def __init__(self, device: torch.device, chunk_bytes: int = 2**28):
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._stored: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, tensors: Iterable[Tensor]) -> Moved:
        """Copy the tensors here and free their device memory."""
        assert not self._stored, "already offloaded"
        start = _now(self._device)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._stored = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes() > 0]
        for piece, host in self._pieces():
            host.copy_(piece, non_blocking=True)
        _now(self._device)
        for storage, _ in self._stored:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._moved(start)

    def onload(self) -> Moved:
        """Give the tensors device memory again, and copy back what they held."""
        start = _now(self._device)
        reserve(self._device, (num_bytes for _, num_bytes in self._stored))
        for storage, num_bytes in self._stored:
            storage.resize_(num_bytes)
        for piece, host in self._pieces():
            piece.copy_(host, non_blocking=True)
        moved = self._moved(start)
        self._stored = []
        return moved

    def _moved(self, start: float) -> Moved:
        num_bytes = sum(num_bytes for _, num_bytes in self._stored)
        return Moved(num_bytes=num_bytes, num_bytes_copied=num_bytes, ms=(_now(self._device) - start) * 1e3)

    def _pieces(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield device bytes and the host bytes that belong to them: the storages laid end to end over the chunks."""
        place = 0
        for storage, num_bytes in self._stored:
            flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            done = 0
            while done < num_bytes:
                chunk, offset = divmod(place, self._chunk_bytes)
                while chunk >= len(self._chunks):
                    pin = self._device.type == "cuda"
                    self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pin))
                size = min(num_bytes - done, self._chunk_bytes - offset)
                yield flat[done : done + size], self._chunks[chunk][offset : offset + size]
                done += size
                place += size


class PartResidency:
    """Keeps track of the parts that are offloaded, and moves them between device and host memory.

    On a CPU, where both are the same memory, parts are only marked: calls that need them are refused alike.
    """

    def __init__(self, device: torch.device):
        self._buffers = {part: HostBuffer(device) for part in PARTS}
        self.movable: frozenset[Part] = frozenset(PARTS) if device.type == "cuda" else frozenset()
        self.offloaded: set[Part] = set()

    def offload(self, parts: Collection[Part], tensors_of: Callable[[Part], Iterable[Tensor]]) -> Moved:
        """Offload those of the parts that are resident."""
        moved = Moved(0, 0, 0.0)
        for part in (part for part in PARTS if part in parts and part not in self.offloaded):
            if part in self.movable:
                moved += self._buffers[part].offload(tensors_of(part))
            self.offloaded.add(part)
        return moved

    def onload(self, parts: Collection[Part]) -> Moved:
        """Onload those of the parts that are offloaded, bit for bit."""
        moved = Moved(0, 0, 0.0)
        for part in (part for part in PARTS if part in parts and part in self.offloaded):
            if part in self.movable:
                moved += self._buffers[part].onload()
            self.offloaded.remove(part)
        return moved

    def release(self) -> None:
        """Give the host memory back. Parts that are offloaded are lost."""
        self._buffers.clear()


def reserve(device: torch.device, sizes: Iterable[int]) -> None:
    """Allocate memory for tensors of these sizes, in bytes, in one piece, which torch then cuts up for them.

    Hundreds of pieces take as long to get as to fill.
    """
    if device.type == "cuda":
        size = sum(-(-num_bytes // _ROUND) * _ROUND for num_bytes in sizes if num_bytes > _SMALL)
        torch.empty(size, dtype=torch.uint8, device=device)  # given back at once, to torch's allocator


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
