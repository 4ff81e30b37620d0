"""Items as a receiver unpacks them: their tensors copied to devices of its own."""

from __future__ import annotations

import contextlib
import mmap
import pickle
import select
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotseat.errors import DeadlineError, WorkerError
from hotseat.rlinf import wire
from hotseat.rlinf.device_items.devices import devices_here
from hotseat.rlinf.device_items.form import Manifest, bytes_in, has_tensors, read_head
from hotseat.rlinf.device_items.keeper import keeper

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ANSWER_S = 60.0  # how long a sender may take to copy its tensors to host memory


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
    buffer: Any = data
    if isinstance(data, wire.Memory):
        # Private, so that torch does not warn of memory that cannot be written.
        buffer = mmap.mmap(data.descriptor, data.size, access=mmap.ACCESS_COPY)
    if not has_tensors(buffer):
        return pickle.loads(buffer)
    manifest, body, rest = read_head(memoryview(buffer))
    if token is not None:
        return _loads(body, _from_sender(manifest, token))
    if len(rest) < manifest.num_bytes:  # the broker asked the sender for them
        raise WorkerError(
            f"{manifest.who} did not send the tensors of its item: it ended, or could not copy them to host memory"
        )
    blocks = manifest.split(bytes_in(rest[: manifest.num_bytes]))
    return _loads(body, _copied(manifest, blocks))


def _from_sender(manifest: Manifest, token: socket.socket) -> list[Tensor]:
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
    return _copied(manifest, manifest.split(bytes_in(mapped)))


def _mapped(manifest: Manifest) -> list[Tensor] | None:
    """Return the blocks on this process's devices, or None where it cannot map all of them."""
    own = keeper().blocks_of(manifest.name)
    if own is not None:
        return own
    blocks = []
    for block in manifest.blocks:
        mapped = devices_here().map(block.uuid, block.handle)
        if mapped is None:
            return None
        blocks.append(mapped)
    return blocks


def _has_news(token: socket.socket) -> bool:
    """Tell whether the sender has sent bytes in host memory, or ended."""
    poll = select.poll()
    poll.register(token, select.POLLIN)
    return bool(poll.poll(0))


def _ask_for_host(manifest: Manifest, token: socket.socket) -> wire.Memory:
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


def _copied(manifest: Manifest, blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors in these blocks, and wait for them."""
    import torch

    devices = devices_here()
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
    before = _arriving.tensors  # of an item whose unpickling gets another one
    _arriving.tensors = tensors
    try:
        return pickle.loads(body)
    finally:
        _arriving.tensors = before
