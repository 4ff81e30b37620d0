"""Tensors on devices inside items of channels: they stay on the device, and handles travel.

`pack_all` copies an item's CUDA tensors into device memory of their own, so that the item is what it was when it was
put, waits for that copy, and sends handles of it beside the pickle of the rest. `unpack_all` maps that memory where
this process has the same device (by UUID), copies it into tensors of its own, waits for the copy, and unmaps it. Where
it has not, the bytes come through host memory. A tensor arrives on the same device if the receiver sees it, else on the
receiver's current CUDA device, else on the CPU; contiguous, unless it was dense in another order of dimensions, which
it keeps.

With such an item goes a token: one end of a pair of sockets, whose other end the sender has. It is a descriptor, so the
system itself keeps count of it: as long as the broker or the receiver has it, the sender keeps the memory, and the
moment that nobody has it any more - copied, dropped, or killed - the sender hears the end of the stream and frees the
memory. The token also says what became of the sender. Asked through it, the sender answers with the bytes in host
memory, and it does so unasked before it leaves the channel or exits. If it is killed, the stream ends without them, and
`unpack_all` raises `WorkerError`, also where that happens during the copy.

Items of less than 1 MiB on devices go through host memory, where they are faster, and so do items that would have this
process keep more than a 16th of a device's memory, or more than 256 of them.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import io
import math
import mmap
import os
import pickle
import secrets
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from hotseat.cluster import _broker as wire
from hotseat.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Devices", "move_to_host", "num_kept", "pack_all", "unpack_all", "use"]

MIN_IN_MEMORY = 1 << 18  # bytes of a packed item from which on it is in memory of its own
MIN_ON_DEVICE = 1 << 20  # bytes of an item's tensors from which on they stay on the device
MAX_KEPT = 256  # items of this process that wait on devices: each takes two descriptors

_ALIGNMENT = 512  # of tensors in a block
_EXIT_S = 10.0  # how long the end of this process waits for a copy to host memory that is under way
_ANSWER_S = 60.0  # how long a sender may take to copy its tensors to host memory

# An item with tensors begins with this and not with a pickle. The sizes of the manifest and of the pickle follow, then
# both, padded; and the bytes of all blocks, unless the item has a token.
_HEAD = struct.Struct("!8sQQ")
_MARK = b"\0tensors"  # pickles begin with another byte
_HEAD_ALIGNMENT = 64

_Dispatch = ChainMap[Any, Any]  # how a pickler reduces objects, by their types: ours, then those of all picklers


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


@dataclass(frozen=True)
class _Block:
    """All tensors of an item on one device, one after another."""

    uuid: str
    num_bytes: int
    handle: Any = None


@dataclass(frozen=True)
class _Place:
    """Place of a tensor in its block, and its form."""

    block: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def view(self, block: Tensor) -> Tensor:
        """Return the tensor in its block."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        data = block[self.offset : self.offset + num_bytes].view(self.dtype)
        return data.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Manifest:
    """Description of an item's tensors for its receiver."""

    name: str  # of the item, in the sender
    who: str  # the sender
    blocks: tuple[_Block, ...]
    places: tuple[_Place, ...]

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)

    def split(self, data: Tensor) -> list[Tensor]:
        """Return the blocks in the bytes of all of them."""
        return list(data.split([block.num_bytes for block in self.blocks]))


_devices: Devices | None = None


def use(devices: Devices | None) -> None:
    """Have items of this process use these devices. None: CUDA's."""
    global _devices
    _devices = devices


def _cuda() -> Devices:
    if _devices is not None:
        return _devices
    from hotseat.cluster._cuda_devices import CudaDevices

    return CudaDevices()


def _devices_in_use() -> Devices | None:
    """Return the devices if this process can have tensors on them."""
    if _devices is not None:
        return _devices
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return _cuda() if cuda is not None and cuda.is_initialized() else None


# --- packing ----------------------------------------------------------------------------------------------------------


def pack_all(items: Sequence[Any], packed: list[Any], channel: str, who: str, max_passed: int) -> None:
    """Append items, pickled, to `packed`. With at most `max_passed` descriptors: large ones in memory of their own.

    channel: by which `move_to_host` finds the items. who: this process, in errors at the receiver.
    """
    devices = _devices_in_use()
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
    manifest = _Manifest(
        secrets.token_hex(8), who, tuple(_Block(devices.uuid(device), size) for device, size in sizes.items()), places
    )
    if max_passed >= 2 and manifest.num_bytes >= MIN_ON_DEVICE:
        staged = _staged(devices, sizes, tensors, places)
        if staged is not None:
            blocks, handles = staged
            exported = tuple(
                replace(block, handle=handle) for block, handle in zip(manifest.blocks, handles, strict=True)
            )
            try:
                head = _head(replace(manifest, blocks=exported), body)
                data = wire.Memory.of(head) if len(head) >= MIN_IN_MEMORY else head
                return wire.Kept(data, _keeper.keep(manifest.name, channel, sizes, blocks))
            except BaseException:
                blocks.clear()
                _keeper.free(sizes)
                raise
    return _through_host(_head(manifest, body), manifest, tensors, max_passed)


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
        return _arrived, (len(tensors) - 1,)

    def of_storage(storage: Any) -> Any:
        untyped = storage if isinstance(storage, UntypedStorage) else storage._untyped_storage
        if not devices.holds(untyped):
            return storage.__reduce_ex__(5)
        tensors.append(torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped))
        return _arrived_storage, (len(tensors) - 1, None if storage is untyped else storage.dtype)

    own = {torch.Tensor: of_tensor, TypedStorage: of_storage, UntypedStorage: of_storage}
    return ChainMap(own, copyreg.dispatch_table)


def _arrange(tensors: Sequence[Tensor]) -> tuple[tuple[_Place, ...], dict[torch.device, int]]:
    """Return where tensors go in the blocks of their devices, and how large those are: not empty, which none can be."""
    import torch

    sizes: dict[torch.device, int] = {}
    places = []
    for tensor in tensors:
        offset = sizes.setdefault(tensor.device, 0)
        stride = torch.empty_like(tensor.detach(), device="meta").stride()
        places.append(
            _Place(
                list(sizes).index(tensor.device),
                offset,
                tuple(tensor.shape),
                tuple(stride),
                tensor.dtype,
                tensor.requires_grad,
            )
        )
        sizes[tensor.device] = offset + -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return tuple(places), {device: max(size, _ALIGNMENT) for device, size in sizes.items()}


def _staged(
    devices: Devices, sizes: dict[torch.device, int], tensors: Sequence[Tensor], places: Sequence[_Place]
) -> tuple[list[Tensor], list[Any]] | None:
    """Copy tensors to new memory on their devices. None: they have to go through host memory.

    What is returned is counted in the keeper.
    """
    if not _keeper.reserve(devices, sizes):
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
            _keeper.free(sizes)


def _head(manifest: _Manifest, body: bytes) -> bytes:
    described = pickle.dumps(manifest, protocol=5)
    pieces = [_HEAD.pack(_MARK, len(described), len(body)), described, body]
    return b"".join([*pieces, b"\0" * (-sum(map(len, pieces)) % _HEAD_ALIGNMENT)])


def _through_host(head: bytes, manifest: _Manifest, tensors: Sequence[Tensor], max_passed: int) -> wire.Packed:
    """Return an item with the bytes of its tensors."""
    size = len(head) + manifest.num_bytes
    memory = wire.Memory.empty(size) if max_passed and size >= MIN_IN_MEMORY else None
    buffer: Any = bytearray(size) if memory is None else mmap.mmap(memory.descriptor, size)
    buffer[: len(head)] = head
    blocks = manifest.split(_bytes_in(memoryview(buffer)[len(head) :]))
    for tensor, place in zip(tensors, manifest.places, strict=True):
        place.view(blocks[place.block]).copy_(tensor.detach())
    return memoryview(buffer) if memory is None else memory


# --- the sender's side of tokens --------------------------------------------------------------------------------------


@dataclass
class _KeptItem:
    name: str
    channel: str
    sizes: dict[torch.device, int]
    blocks: list[Tensor]
    token: socket.socket  # the sender's end


class _Keeper:
    """Keeps the device memory of items until their tokens are closed.

    Its thread waits for the tokens: at the end of one it frees the memory of its item; asked through one, it sends the
    bytes in host memory. It ends with the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[str, _KeptItem] = {}
        self._num_reserved = 0
        self._bytes: Counter[torch.device] = Counter()
        self._selector: selectors.BaseSelector | None = None

    def reserve(self, devices: Devices, sizes: dict[torch.device, int]) -> bool:
        """Count memory that is about to be kept. False: it would be too much."""
        with self._lock:
            if self._num_reserved >= MAX_KEPT or any(
                self._bytes[device] + num_bytes > devices.max_bytes(device) for device, num_bytes in sizes.items()
            ):
                return False
            self._num_reserved += 1
            self._bytes.update(sizes)
            return True

    def free(self, sizes: dict[torch.device, int]) -> None:
        """Count memory as free that was reserved."""
        with self._lock:
            self._num_reserved -= 1
            self._bytes.subtract(sizes)

    def keep(self, name: str, channel: str, sizes: dict[torch.device, int], blocks: list[Tensor]) -> int:
        """Keep the memory of an item, which was reserved, and return the descriptor of its token."""
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        ours.setblocking(False)
        item = _KeptItem(name, channel, sizes, blocks, ours)
        with self._lock:
            if self._selector is None:
                selector = selectors.DefaultSelector()
                threading.Thread(target=self._serve, args=(selector,), name="device items", daemon=True).start()
                self._selector = selector
            self._selector.register(ours, selectors.EVENT_READ, item)
            self._items[name] = item
        return theirs.detach()

    def blocks_of(self, name: str) -> list[Tensor] | None:
        """Return the blocks of an item that this process itself has put: no process maps its own memory."""
        with self._lock:
            item = self._items.get(name)
            return list(item.blocks) if item else None

    def num_kept(self) -> int:
        with self._lock:
            return self._num_reserved

    def move_to_host(self, channel: str | None) -> None:
        """Move what waits of a channel, or of all, to host memory, where it outlasts this process."""
        with self._lock:
            items = [item for item in self._items.values() if channel in (None, item.channel)]
        for item in items:
            self._move_to_host(item)

    def forget_in_fork(self) -> None:
        """Close tokens that this process has from its parent, who still has them. The memory is not this process's."""
        for item in self._items.values():
            item.token.close()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
                item: _KeptItem = key.data
                try:
                    request = item.token.recv(16)
                except BlockingIOError:
                    continue
                except OSError:
                    request = b""
                if request:
                    self._move_to_host(item)
                elif self._take(item):
                    self._end(item)
                del key, item  # or this thread would keep the memory until the next event

    def _take(self, item: _KeptItem) -> bool:
        """Take an item out. False: another thread did."""
        with self._lock:
            if self._items.pop(item.name, None) is None:
                return False
            assert self._selector is not None
            self._selector.unregister(item.token)
            return True

    def _move_to_host(self, item: _KeptItem) -> None:
        if not self._take(item):
            return
        try:
            memory = _host_copy(item.blocks)
            socket.send_fds(item.token, [b"host"], [memory.descriptor])
        except Exception as error:  # it belongs to whoever takes the item, unless nobody does
            with contextlib.suppress(OSError):
                item.token.send(f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            self._end(item)

    def _end(self, item: _KeptItem) -> None:
        item.blocks.clear()
        self.free(item.sizes)
        item.token.close()


def _host_copy(blocks: Sequence[Tensor]) -> wire.Memory:
    memory = wire.Memory.empty(sum(len(block) for block in blocks))
    data = _bytes_in(mmap.mmap(memory.descriptor, memory.size))
    for part, block in zip(data.split([len(block) for block in blocks]), blocks, strict=True):
        part.copy_(block)
    return memory


_keeper = _Keeper()
_of_parents: list[_Keeper] = []  # kept in a fork: their memory is freed by the parent alone


def _after_fork() -> None:
    global _keeper
    _of_parents.append(_keeper)
    _keeper.forget_in_fork()
    _keeper = _Keeper()


os.register_at_fork(after_in_child=_after_fork)


def num_kept() -> int:
    """Return how many items of this process wait on devices."""
    return _keeper.num_kept()


def move_to_host(channel: str | None = None) -> None:
    """Move what this process put into a channel, or into any, to host memory, where it outlasts the process."""
    _keeper.move_to_host(channel)


@atexit.register
def _at_exit() -> None:
    move_to_host()
    until_s = time.monotonic() + _EXIT_S
    while num_kept() and time.monotonic() < until_s:  # the keeper's thread, which ends with the process, copies one
        time.sleep(0.01)


# --- unpacking --------------------------------------------------------------------------------------------------------


class _Arriving(threading.local):
    """The tensors of the item that this thread unpickles."""

    tensors: Sequence[Tensor] = ()


_arriving = _Arriving()


def _arrived(number: int) -> Any:
    return _arriving.tensors[number]


def _arrived_storage(number: int, dtype: torch.dtype | None) -> Any:
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
    buffer: Any = data
    if isinstance(data, wire.Memory):
        # Private, so that torch does not warn of memory that cannot be written.
        buffer = mmap.mmap(data.descriptor, data.size, access=mmap.ACCESS_COPY)
    if buffer[0] != _MARK[0]:
        return pickle.loads(buffer)
    view = memoryview(buffer)
    _, num_described, num_body = _HEAD.unpack_from(view)
    middle = _HEAD.size + num_described
    end = middle + num_body
    manifest: _Manifest = pickle.loads(view[_HEAD.size : middle])
    body = view[middle:end]
    if token is not None:
        return _loads(body, _from_sender(manifest, token))
    start = end + -end % _HEAD_ALIGNMENT
    if len(view) - start < manifest.num_bytes:  # the broker asked the sender for them
        raise WorkerError(
            f"{manifest.who} did not send the tensors of its item: it ended, or could not copy them to host memory"
        )
    blocks = manifest.split(_bytes_in(view[start : start + manifest.num_bytes]))
    return _loads(body, _copied(manifest, blocks))


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
    mapped = mmap.mmap(memory.descriptor, memory.size, access=mmap.ACCESS_COPY)
    return _copied(manifest, manifest.split(_bytes_in(mapped)))


def _mapped(manifest: _Manifest) -> list[Tensor] | None:
    """Return the blocks on this process's devices, or None where it cannot map all of them."""
    own = _keeper.blocks_of(manifest.name)
    if own is not None:
        return own
    blocks = []
    for block in manifest.blocks:
        mapped = _cuda().map(block.uuid, block.handle)
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

    devices = _cuda()
    targets = [devices.arrival(block.uuid) for block in manifest.blocks]
    tensors = []
    try:
        for place in manifest.places:
            target = targets[place.block]
            tensor = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=target)
            tensor.copy_(place.view(blocks[place.block]))
            tensors.append(tensor.requires_grad_(place.requires_grad))
    finally:
        for target in set(targets):
            devices.synchronize(target)
    return tensors


def _loads(body: memoryview, tensors: list[Tensor]) -> Any:
    """Unpickle an item with these tensors."""
    before = _arriving.tensors  # of an item whose unpickling gets another one
    _arriving.tensors = tensors
    try:
        return pickle.loads(body)
    finally:
        _arriving.tensors = before


def _bytes_in(buffer: Any) -> Tensor:
    """Return the tensor that a buffer's bytes are, [num_bytes] uint8."""
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8)
