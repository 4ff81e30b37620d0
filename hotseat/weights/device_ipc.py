"""Device memory that a trainer's rank and an engine's process on the same device share (CUDA IPC).

The sender exports each of its blocks once, and a receiving process maps each once: after the first push nothing but
names travels. A block that has grown has a new handle; whoever maps it lets go of the old one. With several trainer
ranks each has the same bucket on its own device: handles are kept by the device's UUID, because device numbers differ
from process to process, and every process picks that of its own device.

The sender waits for its copies before it hands a bucket out; an engine has read all when its `load_bucket` returns.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotseat.cuda_ipc import Exported, device_uuid, export, map_exported
from hotseat.errors import WeightError
from hotseat.weights.bucket import Bucket

_mapped: dict[str, tuple[Handle, Tensor]] = {}  # by the block's name
_own: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()  # CUDA does not map a process's own


@dataclass(frozen=True)
class Handle:
    """The handle by which a process maps one block of a sender."""

    block: str
    exported: Exported


@dataclass(frozen=True)
class SharedData:
    """The first `num_bytes` of a block on each of some devices."""

    num_bytes: int
    handles: Mapping[str, Handle]  # by the device's UUID

    def open(self) -> Tensor:
        here = device_uuid(torch.cuda.current_device())
        handle = self.handles.get(here)
        if handle is None:
            raise WeightError(
                f"no trainer rank is on this process's device {here}: weights were packed on {', '.join(self.handles)}"
            )
        return _map(handle)[: self.num_bytes]


class Exporter:
    """Makes the handles of one sender's blocks."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._known: dict[int, tuple[Tensor, Handle]] = {}

    def shared(self, number: int, block: Tensor, num_bytes: int) -> SharedData:
        known = self._known.get(number)
        if known is None or known[0] is not block:
            handle = Handle(f"{self._name}/{number}", export(block))
            self._known[number] = known = block, handle
            _own[handle.block] = block
        return SharedData(num_bytes, {device_uuid(block.device.index): known[1]})


def merge(buckets: Sequence[Bucket]) -> Bucket:
    """Merge the same bucket of several ranks into one that can be read on the devices of all."""
    first = buckets[0]
    assert all((b.version, b.index, b.entries) == (first.version, first.index, first.entries) for b in buckets)
    parts = [bucket.data for bucket in buckets]
    handles = {name: handle for data in parts if isinstance(data, SharedData) for name, handle in data.handles.items()}
    assert isinstance(first.data, SharedData)
    return replace(first, data=SharedData(first.data.num_bytes, handles))


def _map(handle: Handle) -> Tensor:
    """Map a block into this process: [size of the block] uint8."""
    if handle.block in _own:
        return _own[handle.block]
    known = _mapped.get(handle.block)
    if known is not None and known[0] == handle:
        return known[1]
    _mapped.pop(handle.block, None)
    block = map_exported(handle.exported, torch.device("cuda", torch.cuda.current_device()))
    _mapped[handle.block] = handle, block
    return block
