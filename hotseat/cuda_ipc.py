"""Device memory of one process that another process on the same device maps (CUDA IPC), by torch's own means.

torch counts readers of exported memory and keeps it until each has dropped it once, so memory that nobody maps, or
whose reader is killed, would stay for ever. `own` gives up that count: whoever exports the memory decides how long it
stays, and has to know when its readers are done.

CUDA does not map memory into the process that exported it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Exported = tuple[Any, ...]  # what `_new_shared_cuda` takes after the number of the device

_COUNTER = slice(3, 5)  # of `Exported`: the file of torch's count, and the place in it
_NO_COUNTER = (b"/hotseat-counts-itself", 0)  # there is no such file, and torch leaves it at that
_NO_EVENT = (b"\0" * 64, False)


def device_uuid(index: int) -> str:
    """Return the name of a device that all processes share; numbers differ from process to process."""
    return str(torch.cuda.get_device_properties(index).uuid)


def export(block: Tensor) -> Exported:
    """Return the handle of a block's memory. torch keeps the memory until one reader has dropped it."""
    # The first value is the number that this process has for the device.
    return tuple(block.untyped_storage()._share_cuda_()[1:])


def own(exported: Exported) -> Exported:
    """Have exported memory end with its block, whoever maps it, and return a handle without count and event.

    The caller has waited for the kernels that write the block, and keeps it until its readers are done.
    """
    torch.UntypedStorage._release_ipc_counter_cuda(*exported[_COUNTER])
    return (*exported[:3], *_NO_COUNTER, *_NO_EVENT)


def map_exported(exported: Exported, device: torch.device) -> Tensor:
    """Map a block of another process: [size of the block] uint8. It is unmapped when the tensor is dropped."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *exported)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
