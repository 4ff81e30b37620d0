"""Items as they travel: pickled, with their tensors on devices beside, which the receiver copies to its own."""

from __future__ import annotations

import contextlib
import copyreg
import io
import math
import mmap
import pickle
import secrets
import select
import socket
import struct
import sys
import threading
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hotseat.errors import DeadlineError, WorkerError
from hotseat.rlinf import wire
from hotseat.rlinf.device_items.keeper import keeper

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hotseat.rlinf.device_items.cuda import CudaDevices

MIN_IN_MEMORY = 1 << 18  # bytes of a packed item from which on it is in memory of its own
MIN_ON_DEVICE = 1 << 20  # bytes of an item's tensors from which on they stay on the device
_ALIGNMENT = 512  # of tensors in a block
_ANSWER_S = 60.0  # how long a sender may take to copy its tensors to host memory

# An item with tensors begins with this and not with a pickle. The sizes of the manifest and of the pickle follow, then
# both, padded; and the bytes of all blocks, unless the item has a token.
_HEAD = struct.Struct("!8sQQ")
_MARK = b"\0tensors"  # pickles begin with another byte
_HEAD_ALIGNMENT = 64

_Dispatch = ChainMap[Any, Any]  # how a pickler reduces objects, by their types: ours, then those of all picklers
_devices: CudaDevices | None = None


def use(devices: CudaDevices | None) -> None:
    """Set the devices that items of this process use; None: CUDA's."""
    global _devices
    _devices = devices


def _devices_here() -> CudaDevices:
    from hotseat.rlinf.device_items.cuda import CudaDevices

    return _devices or CudaDevices()


def _has_devices() -> bool:
    """Tell whether this process can have tensors on devices."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return _devices is not None or (cuda is not None and cuda.is_initialized())


class _Block(NamedTuple):
    """Memory with all tensors of an item on one device, one after another."""

    uuid: str
    num_bytes: int


@dataclass(frozen=True)
class _Place:
    """Place of a tensor in its block, and its form."""

    block: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def view(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the tensor in its block."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        data = blocks[self.block][self.offset : self.offset + num_bytes].view(self.dtype)
        return data.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Manifest:
    """Description of an item's tensors for its receiver. handles: by which other processes map the blocks."""

    name: str  # of the item, in the sender
    who: str  # the sender
    blocks: tuple[_Block, ...]
    places: tuple[_Place, ...]
    handles: tuple[Any, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)

    def split(self, buffer: Any) -> list[Tensor]:
        """Return the blocks in a buffer with the bytes of all of them: [num_bytes] uint8 each."""
        import torch

        data = torch.frombuffer(buffer, dtype=torch.uint8)
        return list(data.split([block.num_bytes for block in self.blocks]))

    def head(self, body: bytes) -> bytes:
        """Return what stands before the bytes of the tensors. body: the pickle of the rest."""
        described = pickle.dumps(self, protocol=5)
        pieces = [_HEAD.pack(_MARK, len(described), len(body)), described, body]
        return b"".join([*pieces, b"\0" * (-sum(map(len, pieces)) % _HEAD_ALIGNMENT)])


# --- at the sender ----------------------------------------------------------------------------------------------------


def pack(item: Any, channel: str, who: str, *, is_passed: bool) -> wire.Packed | wire.Kept:
    """Pickle an item. is_passed: with descriptors beside, so that a large one is in memory of its own.

    channel: by which `move_to_host` finds the item. who: this process, in errors at the receiver.
    """
    tensors: list[Tensor] = []  # that are on devices
    if not _has_devices():
        packed: wire.Packed | wire.Kept = _dumps(item)
    else:
        devices = _devices_here()
        packed = _dumps(item, _dispatch(devices, tensors))
        if tensors:
            packed = _with_tensors(packed, tensors, devices, channel, who, is_passed)
    return wire.Memory.of(packed) if is_passed and type(packed) is bytes and len(packed) >= MIN_IN_MEMORY else packed


def _with_tensors(
    body: bytes, tensors: Sequence[Tensor], devices: CudaDevices, channel: str, who: str, is_passed: bool
) -> wire.Packed | wire.Kept:
    """Return a pickled item with the tensors that were taken out of it."""
    places, sizes = _arrange(tensors)
    blocks = tuple(_Block(devices.uuid(device), size) for device, size in sizes.items())
    manifest = _Manifest(secrets.token_hex(8), who, blocks, places)
    if is_passed and manifest.num_bytes >= MIN_ON_DEVICE and keeper().reserve(devices, sizes):
        staged: list[Tensor] = []
        is_kept = False
        try:
            handles = _staged(devices, sizes, tensors, places, staged)
            if handles is not None:
                head = replace(manifest, handles=handles).head(body)
                data = wire.Memory.of(head) if len(head) >= MIN_IN_MEMORY else head
                kept = wire.Kept(data, keeper().keep(manifest.name, channel, sizes, staged))
                is_kept = True
                return kept
        finally:
            if not is_kept:
                staged.clear()  # also where an error keeps this frame
                keeper().free(sizes)
    return _through_host(manifest.head(body), manifest, tensors, is_passed)


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


def _dispatch(devices: CudaDevices, tensors: list[Tensor]) -> _Dispatch:
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


def _arrange(tensors: Sequence[Tensor]) -> tuple[tuple[_Place, ...], dict[torch.device, int]]:
    """Return where tensors go in the blocks of their devices, and how large those are: not empty, which none can be."""
    import torch

    sizes: dict[torch.device, int] = {}
    places = []
    for tensor in tensors:
        offset = sizes.setdefault(tensor.device, 0)
        stride = tuple(torch.empty_like(tensor.detach(), device="meta").stride())
        block = list(sizes).index(tensor.device)
        places.append(_Place(block, offset, tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad))
        sizes[tensor.device] = offset + -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return tuple(places), {device: max(size, _ALIGNMENT) for device, size in sizes.items()}


def _staged(
    devices: CudaDevices,
    sizes: dict[torch.device, int],
    tensors: Sequence[Tensor],
    places: Sequence[_Place],
    blocks: list[Tensor],
) -> tuple[Any, ...] | None:
    """Copy tensors to new memory on their devices, which is appended to `blocks`, and return its handles.

    None: they have to go through host memory.
    """
    for device, num_bytes in sizes.items():
        block = devices.allocate(device, num_bytes)
        if block is None:
            return None
        blocks.append(block)
    for tensor, place in zip(tensors, places, strict=True):
        place.view(blocks).copy_(tensor.detach())
    for device in sizes:
        devices.synchronize(device)
    handles = tuple(devices.export(block) for block in blocks)
    return None if None in handles else handles


def _through_host(head: bytes, manifest: _Manifest, tensors: Sequence[Tensor], is_passed: bool) -> wire.Packed:
    size = len(head) + manifest.num_bytes
    memory = wire.Memory.empty(size) if is_passed and size >= MIN_IN_MEMORY else None
    buffer: Any = bytearray(size) if memory is None else mmap.mmap(memory.descriptor, size)
    buffer[: len(head)] = head
    blocks = manifest.split(memoryview(buffer)[len(head) :])
    for tensor, place in zip(tensors, manifest.places, strict=True):
        place.view(blocks).copy_(tensor.detach())
    return memoryview(buffer) if memory is None else memory


# --- at the receiver --------------------------------------------------------------------------------------------------


class _Arriving(threading.local):
    """The tensors of the item that this thread unpickles."""

    tensors: Sequence[Tensor] = ()


_arriving = _Arriving()


def arrived(number: int) -> Any:
    """Return a tensor of the item that this thread unpickles. Pickles name it."""
    return _arriving.tensors[number]


def arrived_storage(number: int, dtype: torch.dtype | None) -> Any:
    """Return the storage of such a tensor. Pickles name it."""
    from torch.storage import TypedStorage

    untyped = _arriving.tensors[number].untyped_storage()
    return untyped if dtype is None else TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def unpack_all(packed: list[wire.Packed | wire.Kept]) -> list[Any]:
    """Return the items, their tensors on this process's devices, and let go of the memory that they came in.

    Where one cannot be unpacked, the others are dropped.
    """
    try:
        return [pickle.loads(each) if type(each) is memoryview and each[0] else _unpack(each) for each in packed]
    finally:
        packed.clear()


def _unpack(packed: wire.Packed | wire.Kept) -> Any:
    if not isinstance(packed, wire.Kept):
        return _unpack_with(packed, None)
    with socket.socket(fileno=packed.detach_token()) as token:  # closed when the tensors are copied, or cannot be
        return _unpack_with(packed.data, token)


def _unpack_with(data: wire.Packed, token: socket.socket | None) -> Any:
    # Private, so that torch does not warn of memory that cannot be written.
    buffer: Any = (
        mmap.mmap(data.descriptor, data.size, access=mmap.ACCESS_COPY) if isinstance(data, wire.Memory) else data
    )
    if buffer[0] != _MARK[0]:
        return pickle.loads(buffer)
    item = memoryview(buffer)
    _, num_described, num_body = _HEAD.unpack_from(item)
    middle = _HEAD.size + num_described
    end = middle + num_body
    manifest: _Manifest = pickle.loads(item[_HEAD.size : middle])
    body, rest = item[middle:end], item[end + -end % _HEAD_ALIGNMENT :]
    if token is not None:
        return _loads(body, _from_sender(manifest, token))
    if len(rest) < manifest.num_bytes:  # the broker asked the sender for them
        raise WorkerError(
            f"{manifest.who} did not send the tensors of its item: it ended, or could not copy them to host memory"
        )
    return _loads(body, _copied(manifest, manifest.split(rest[: manifest.num_bytes])))


def _from_sender(manifest: _Manifest, token: socket.socket) -> list[Tensor]:
    """Return the tensors of an item whose sender keeps them."""
    if not _has_news(token):
        blocks = _mapped(manifest)
        if blocks is not None:
            try:
                tensors = _copied(manifest, blocks)
            finally:
                blocks.clear()  # unmapped before the token is closed, also where an error keeps this frame
            if not _has_news(token):
                return tensors
            del tensors  # the sender may have freed the memory before it was copied
    memory = _ask_for_host(manifest, token)
    return _copied(manifest, manifest.split(mmap.mmap(memory.descriptor, memory.size, access=mmap.ACCESS_COPY)))


def _mapped(manifest: _Manifest) -> list[Tensor] | None:
    """Return the blocks on this process's devices, or None where it cannot map all of them."""
    own = keeper().blocks_of(manifest.name)
    if own is not None:
        return own
    blocks = []
    for block, handle in zip(manifest.blocks, manifest.handles, strict=True):
        mapped = _devices_here().map(block.uuid, handle)
        if mapped is None:
            return None
        blocks.append(mapped)
    return blocks


def _has_news(token: socket.socket) -> bool:
    """Tell whether the sender has sent bytes in host memory, or ended."""
    poll = select.poll()
    poll.register(token, select.POLLIN)
    return bool(poll.poll(0))


def _ask_for_host(manifest: _Manifest, token: socket.socket) -> wire.Memory:
    token.settimeout(_ANSWER_S)
    with contextlib.suppress(OSError):  # it may have answered and ended
        token.send(b"host")
    try:
        answer, descriptors = wire.receive_with(token, 4096)
    except TimeoutError as error:
        raise DeadlineError(
            f"{manifest.who} did not copy {manifest.num_bytes} bytes of tensors to host memory in {_ANSWER_S:.0f} s"
        ) from error
    except ConnectionError:
        answer, descriptors = b"", []
    if descriptors:
        return wire.Memory(descriptors[0], manifest.num_bytes)
    if answer:
        raise WorkerError(
            f"{manifest.who} could not copy its tensors to host memory: {answer.decode(errors='replace')}"
        )
    raise WorkerError(f"{manifest.who} ended before the tensors of its item were copied from its device")


def _copied(manifest: _Manifest, blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors in these blocks, and wait for them."""
    import torch

    devices = _devices_here()
    targets = [devices.arrival(block.uuid) for block in manifest.blocks]
    tensors = []
    try:
        for place in manifest.places:
            target = targets[place.block]
            tensor = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=target)
            tensor.copy_(place.view(blocks))
            tensors.append(tensor.requires_grad_(place.requires_grad))
    finally:
        for target in set(targets):
            devices.synchronize(target)
    return tensors


def _loads(body: memoryview, tensors: list[Tensor]) -> Any:
    before = _arriving.tensors  # of an item whose unpickling gets another one
    _arriving.tensors = tensors
    try:
        return pickle.loads(body)
    finally:
        _arriving.tensors = before
