"""The few calls to CUDA that items of channels need."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from hotseat import cuda_ipc

_MAX_SHARE = 16  # items wait in this part of a device's memory: a 16th


class CudaDevices:
    """The CUDA devices that this process sees. A class, so that tests need no device."""

    def holds(self, tensor: Any) -> bool:
        """Tell whether a tensor, or a storage, is on one of these devices."""
        is_on_cuda: bool = tensor.device.type == "cuda"
        return is_on_cuda

    def uuid(self, device: torch.device) -> str:
        """Return the device's name in all processes."""
        return _uuids()[device.index]

    def max_bytes(self, device: torch.device) -> int:
        """Return how much of the device's memory items of this process may take while they wait."""
        return torch.cuda.get_device_properties(device).total_memory // _MAX_SHARE

    def allocate(self, device: torch.device, num_bytes: int) -> Tensor | None:
        """Return new memory, [num_bytes] uint8, or None where there is not that much."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            return None

    def export(self, block: Tensor) -> cuda_ipc.Exported | None:
        """Return the handle by which other processes map the block, or None where it cannot be exported."""
        try:
            return cuda_ipc.own(cuda_ipc.export(block))
        except RuntimeError as error:  # the memory is of another allocator than torch's own, for one
            _warn("exported", error)
            return None

    def map(self, uuid: str, handle: cuda_ipc.Exported) -> Tensor | None:
        """Map a block of another process, or return None where this process has not its device or cannot map it."""
        if uuid not in _uuids():
            return None
        device = self.arrival(uuid)
        try:
            return cuda_ipc.map_exported(handle, device)
        except RuntimeError as error:  # it is of another container, or in a segment that the system does not pass
            _warn("mapped", error)
            return None

    def arrival(self, uuid: str) -> torch.device:
        """Return where a tensor of that device arrives: on the same one, else on the current one, else on the CPU."""
        if uuid in _uuids():
            return torch.device("cuda", _uuids().index(uuid))
        if _uuids():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def synchronize(self, device: torch.device) -> None:
        """Wait for what the current stream of the device has to do."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _warn(purpose: str, error: RuntimeError) -> None:
    warnings.warn(
        f"CUDA tensors in items of channels go through host memory, because theirs cannot be {purpose}: {error}",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _uuids() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(cuda_ipc.device_uuid(index) for index in range(torch.cuda.device_count()))
