"""Devices whose memory are files in a folder, for items of channels: all but the calls to CUDA are as with a GPU.

Tensors of float64 are on the device. A file is in the folder exactly as long as the memory is not freed.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

CPU = torch.device("cpu")


class FileDevices:
    def __init__(self, folder: Path, uuid: str = "one", max_bytes: int = 1 << 30):
        self.folder = folder
        self.own = uuid
        self.limit = max_bytes
        self.has_room = self.can_export = True
        self.storages: set[int] = set()  # that are on the device, by address
        self.at_map: Callable[[], None] = lambda: None
        self.num_mapped = 0
        self._numbers = itertools.count()

    def holds(self, tensor) -> bool:
        is_storage = isinstance(tensor, torch.UntypedStorage)
        return tensor.data_ptr() in self.storages if is_storage else tensor.dtype == torch.float64

    def uuid(self, device: torch.device) -> str:
        return self.own

    def max_bytes(self, device: torch.device) -> int:
        return self.limit

    def allocate(self, device: torch.device, num_bytes: int) -> Tensor | None:
        if not self.has_room:
            return None
        path = str(self.folder / f"{os.getpid()}-{next(self._numbers)}")
        block = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        block.path = path
        weakref.finalize(block, os.unlink, path).atexit = False
        return block

    def export(self, block: Tensor) -> tuple[str, int] | None:
        return (block.path, len(block)) if self.can_export else None

    def map(self, uuid: str, handle: tuple[str, int]) -> Tensor | None:
        if uuid != self.own:
            return None
        path, size = handle
        assert Path(path).exists(), "the sender has freed it"
        self.num_mapped += 1
        self.at_map()
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def arrival(self, uuid: str) -> torch.device:
        return CPU

    def synchronize(self, device: torch.device) -> None:
        pass
