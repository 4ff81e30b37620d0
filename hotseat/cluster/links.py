"""Workers that measure a cluster: the links between its nodes, and collectives over its devices."""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hotseat.errors import RunError

BLOCK_BYTES = 16 << 20
_ROUND_TRIPS = 20


@dataclass(frozen=True)
class Link:
    """Measured between two ranks, in both directions one after the other."""

    latency_s: float  # half of a round trip of one byte
    bytes_per_s: float  # of the slower direction


class LinkWorker:
    """One rank of a group, on a node or on a device of one.

    device: "cpu", whose collectives are gloo's, or "cuda", whose are NCCL's. timeout_s: until a silent peer is an
    error.
    """

    def __init__(self, device: str, timeout_s: float):
        self._device = torch.device(device)
        self._rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", rank=self._rank, world_size=size, timeout=timeout
        )

    def link(self, first: int, second: int) -> Link | None:
        """Measure the link between two ranks, which both call this; others return None at once."""
        if self._rank not in (first, second):
            return None
        peer = second if self._rank == first else first
        goes_first = self._rank == first
        one = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._trip(one, peer, goes_first)  # connects
        started_s = time.perf_counter()
        for _ in range(_ROUND_TRIPS):
            self._trip(one, peer, goes_first)
        latency_s = (time.perf_counter() - started_s) / (2 * _ROUND_TRIPS)
        block = torch.full((BLOCK_BYTES,), first + 1, dtype=torch.uint8, device=self._device)
        slowest_s = 0.0
        for sends in (goes_first, not goes_first):
            started_s = time.perf_counter()
            self._send_and_confirm(block, one, peer, sends)
            slowest_s = max(slowest_s, time.perf_counter() - started_s)
        if not bool((block == first + 1).all()):
            raise RunError(f"what rank {peer} sent arrived as something else")
        return Link(latency_s, BLOCK_BYTES / slowest_s)

    def all_reduce(self) -> float:
        """Add up a block over all ranks, check the sum, and return bytes per second of each rank's block."""
        size = dist.get_world_size()
        block = torch.full((BLOCK_BYTES // 4,), float(self._rank + 1), device=self._device)
        dist.all_reduce(block.clone())  # connects
        self._synchronize()
        started_s = time.perf_counter()
        dist.all_reduce(block)
        self._synchronize()
        seconds = time.perf_counter() - started_s
        if not bool((block == size * (size + 1) / 2).all()):
            raise RunError(f"rank {self._rank} got a wrong sum over all ranks")
        return BLOCK_BYTES / seconds

    def close(self) -> None:
        dist.destroy_process_group()

    def _trip(self, tensor: torch.Tensor, peer: int, goes_first: bool) -> None:
        for sends in (goes_first, not goes_first):
            (dist.send if sends else dist.recv)(tensor, peer)
        self._synchronize()

    def _send_and_confirm(self, block: torch.Tensor, one: torch.Tensor, peer: int, sends: bool) -> None:
        """Move a block in one direction, and a byte back when it is there."""
        (dist.send if sends else dist.recv)(block, peer)
        self._synchronize()
        (dist.recv if sends else dist.send)(one, peer)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
