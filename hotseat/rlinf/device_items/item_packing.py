"""Items as a sender packs them: pickled, with their tensors on devices beside."""

from __future__ import annotations

import copyreg
import io
import mmap
import pickle
import secrets
import sys
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotseat.rlinf import wire
from hotseat.rlinf.device_items.devices import Devices, devices_in_use
from hotseat.rlinf.device_items.form import ALIGNMENT, Block, Manifest, Place, bytes_in, make_head
from hotseat.rlinf.device_items.keeper import keeper
from hotseat.rlinf.device_items.unpacking import arrived, arrived_storage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_IN_MEMORY = 1 << 18  # bytes of a packed item from which on it is in memory of its own
MIN_ON_DEVICE = 1 << 20  # bytes of an item's tensors from which on they stay on the device

_Dispatch = ChainMap[Any, Any]  # how a pickler reduces objects, by their types: ours, then those of all picklers


def pack_all(items: Sequence[Any], packed: list[Any], channel: str, who: str, max_passed: int) -> None:
    """Append items, pickled, to `packed`. With at most `max_passed` descriptors: large ones in memory of their own.

    channel: by which `move_to_host` finds the items. who: this process, in errors at the receiver.
    """
    devices = devices_in_use()
    tensors: list[Tensor] = []  # of the item that is being packed
    dispatch = _dispatch(devices, tensors) if devices is not None else None
    for item in items:
        entry: Any = _dumps(item, dispatch)
        if devices is not None and tensors:
            entry = _pack(entry, tensors, devices, channel, who, max_passed)
            tensors.clear()
        if max_passed and type(entry) is bytes and len(entry) >= MIN_IN_MEMORY:
            entry = wire.Memory.of(entry)
        packed.append(entry)
        if isinstance(entry, wire.PASSED):
            max_passed -= len(wire.passed_with([entry]))
        del entry  # or an error of the next item would keep this one's token open


def _pack(
    body: bytes, tensors: Sequence[Tensor], devices: Devices, channel: str, who: str, max_passed: int
) -> wire.Packed | wire.Kept:
    """Return a pickled item with the tensors that were taken out of it."""
    places, sizes = _arrange(tensors)
    manifest = Manifest(
        secrets.token_hex(8), who, tuple(Block(devices.uuid(device), size) for device, size in sizes.items()), places
    )
    if max_passed >= 2 and manifest.num_bytes >= MIN_ON_DEVICE:
        staged = _staged(devices, sizes, tensors, places)
        if staged is not None:
            blocks, handles = staged
            exported = tuple(
                replace(block, handle=handle) for block, handle in zip(manifest.blocks, handles, strict=True)
            )
            try:
                head = make_head(replace(manifest, blocks=exported), body)
                data = wire.Memory.of(head) if len(head) >= MIN_IN_MEMORY else head
                return wire.Kept(data, keeper().keep(manifest.name, channel, sizes, blocks))
            except BaseException:
                blocks.clear()
                keeper().free(sizes)
                raise
    return _through_host(make_head(manifest, body), manifest, tensors, max_passed)


def _dumps(item: Any, dispatch: _Dispatch | None = None) -> bytes:
    # A class of the script itself has no module that the other process could import, so it has to travel by value.
    by_value = sys.modules.get("ray.cloudpickle") if type(item).__module__ == "__main__" else None
    if dispatch is None:
        return (by_value or pickle).dumps(item, protocol=5)
    with io.BytesIO() as file:
        pickler: Any
        if by_value:  # whose table is one of the class, so that one of the object has no effect
            base = by_value.CloudPickler
            table = {"dispatch_table": ChainMap(*dispatch.maps[:1], base.dispatch_table)}
            pickler = type("TensorPickler", (base,), table)(file, protocol=5)
        else:
            pickler = pickle.Pickler(file, protocol=5)
            pickler.dispatch_table = dispatch
        pickler.dump(item)
        return file.getvalue()


def _dispatch(devices: Devices, tensors: list[Tensor]) -> _Dispatch:
    """Return how a pickler takes tensors and storages: those on devices are appended to `tensors`."""
    import torch
    from torch.storage import TypedStorage, UntypedStorage

    def of_tensor(tensor: Tensor) -> Any:
        # What is more than numbers in memory is pickled in torch's way, down to its storage or its parts.
        is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not vars(tensor)
        if not is_plain or not devices.holds(tensor):
            return tensor.__reduce_ex__(5)
        tensors.append(tensor.detach().requires_grad_(tensor.requires_grad))
        return arrived, (len(tensors) - 1,)

    def of_storage(storage: Any) -> Any:
        untyped = storage if isinstance(storage, UntypedStorage) else storage._untyped_storage
        if not devices.holds(untyped):
            return storage.__reduce_ex__(5)
        tensors.append(torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))
        return arrived_storage, (len(tensors) - 1, None if storage is untyped else storage.dtype)

    own = {torch.Tensor: of_tensor, TypedStorage: of_storage, UntypedStorage: of_storage}
    return ChainMap(own, copyreg.dispatch_table)


def _arrange(tensors: Sequence[Tensor]) -> tuple[tuple[Place, ...], dict[torch.device, int]]:
    """Return where tensors go in the blocks of their devices, and how large those are: not empty, which none can be."""
    import torch

    sizes: dict[torch.device, int] = {}
    places = []
    for tensor in tensors:
        offset = sizes.setdefault(tensor.device, 0)
        stride = torch.empty_like(tensor.detach(), device="meta").stride()
        places.append(
            Place(
                list(sizes).index(tensor.device),
                offset,
                tuple(tensor.shape),
                tuple(stride),
                tensor.dtype,
                tensor.requires_grad,
            )
        )
        sizes[tensor.device] = offset + -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return tuple(places), {device: max(size, ALIGNMENT) for device, size in sizes.items()}


def _staged(
    devices: Devices, sizes: dict[torch.device, int], tensors: Sequence[Tensor], places: Sequence[Place]
) -> tuple[list[Tensor], list[Any]] | None:
    """Copy tensors to new memory on their devices. None: they have to go through host memory.

    What is returned is counted in the keeper.
    """
    if not keeper().reserve(devices, sizes):
        return None
    blocks: list[Tensor] = []
    is_staged = False
    try:
        for device, num_bytes in sizes.items():
            block = devices.allocate(device, num_bytes)
            if block is None:
                return None
            blocks.append(block)
        for tensor, place in zip(tensors, places, strict=True):
            place.view(blocks[place.block]).copy_(tensor.detach())
        for device in sizes:
            devices.synchronize(device)
        handles = [devices.export(block) for block in blocks]
        is_staged = all(handle is not None for handle in handles)
        return (blocks, handles) if is_staged else None
    finally:
        if not is_staged:
            blocks.clear()
            keeper().free(sizes)


def _through_host(head: bytes, manifest: Manifest, tensors: Sequence[Tensor], max_passed: int) -> wire.Packed:
    size = len(head) + manifest.num_bytes
    memory = wire.Memory.empty(size) if max_passed and size >= MIN_IN_MEMORY else None
    buffer: Any = bytearray(size) if memory is None else mmap.mmap(memory.descriptor, size)
    buffer[: len(head)] = head
    blocks = manifest.split(bytes_in(memoryview(buffer)[len(head) :]))
    for tensor, place in zip(tensors, manifest.places, strict=True):
        place.view(blocks[place.block]).copy_(tensor.detach())
    return memoryview(buffer) if memory is None else memory
