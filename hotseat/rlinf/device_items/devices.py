"""Operations on devices that items of channels need, and the devices that this process uses for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Devices(Protocol):
    """Operations on devices. Those of CUDA are a class of their own, so that tests need no device."""

    def holds(self, tensor: Any) -> bool:
        """Tell whether a tensor, or a storage, is on one of these devices."""

    def uuid(self, device: torch.device) -> str:
        """Return the device's name in all processes."""

    def max_bytes(self, device: torch.device) -> int:
        """Return how much of the device's memory items of this process may take while they wait."""

    def allocate(self, device: torch.device, num_bytes: int) -> Tensor | None:
        """Return new memory, [num_bytes] uint8, or None where there is not that much."""

    def export(self, block: Tensor) -> Any:
        """Return the handle by which other processes map the block, or None where it cannot be exported."""

    def map(self, uuid: str, handle: Any) -> Tensor | None:
        """Map a block of another process, or return None where this process has not its device or cannot map it."""

    def arrival(self, uuid: str) -> torch.device:
        """Return where a tensor of that device arrives in this process."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for what the current stream of the device has to do."""


_devices: Devices | None = None


def use(devices: Devices | None) -> None:
    """Have items of this process use these devices. None: CUDA's."""
    global _devices
    _devices = devices


def devices_here() -> Devices:
    """Return the devices that items of this process use."""
    if _devices is not None:
        return _devices
    from hotseat.rlinf.device_items.cuda import CudaDevices

    return CudaDevices()


def devices_in_use() -> Devices | None:
    """Return the devices if this process can have tensors on them."""
    if _devices is not None:
        return _devices
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return devices_here() if cuda is not None and cuda.is_initialized() else None
