"""Tensors put aside in pinned host memory, their device memory given back, and brought back in place.

A tensor keeps its identity: its storage is emptied and later refilled, so parameters, optimizer state and whatever
views a sharding library holds on them stay valid.

DeepSpeed has an `offload_states` of its own, which is not used: it brings back everything or nothing, where a plan
wants weights without optimizer state; with stage 3 it moves the state of one optimizer only, and none with stage 0; and
it takes pinned memory anew each time: away took three times as long with stage 2, back as long (bench/put_aside.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from hotseat.types import Moved

_ROUND = 512  # bytes; torch's allocator rounds every size up to a multiple
_SMALL = 1 << 20  # bytes; up to this it takes memory from elsewhere


class Shelf:
    """Host memory for one part. Pinning is slow, so it is kept and used again."""

    # The pinned allocator rounds up to a power of two: chunks of one waste nothing.
    def __init__(self, device: torch.device, chunk_bytes: int = 2**28):
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._stored: list[tuple[torch.UntypedStorage, int]] = []

    def put_aside(self, tensors: Iterable[Tensor]) -> Moved:
        assert not self._stored, "already put aside"
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

    def bring_back(self) -> Moved:
        start = _now(self._device)
        self._reserve()
        for storage, num_bytes in self._stored:
            storage.resize_(num_bytes)
        for piece, host in self._pieces():
            piece.copy_(host, non_blocking=True)
        moved = self._moved(start)
        self._stored = []
        return moved

    def _reserve(self) -> None:
        """One piece of device memory for all that comes back: hundreds of pieces take as long to get as to fill."""
        if self._device.type == "cuda":
            large = [num_bytes for _, num_bytes in self._stored if num_bytes > _SMALL]
            size = sum(-(-num_bytes // _ROUND) * _ROUND for num_bytes in large)
            # Given back at once to torch's allocator, which cuts it up for the storages.
            torch.empty(size, dtype=torch.uint8, device=self._device)

    def _moved(self, start: float) -> Moved:
        num_bytes = sum(num_bytes for _, num_bytes in self._stored)
        return Moved(num_bytes=num_bytes, num_bytes_copied=num_bytes, ms=(_now(self._device) - start) * 1e3)

    def _pieces(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Device bytes and the host bytes that belong to them: the storages laid end to end over the chunks."""
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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
