"""The sender's side of tokens: device memory of items that wait, kept until nobody needs it."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotseat.rlinf import wire

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hotseat.rlinf.device_items.cuda import CudaDevices

MAX_KEPT = 256  # items of this process that wait on devices: each takes two descriptors

_EXIT_S = 10.0  # how long the end of this process waits for a copy to host memory that is under way


@dataclass
class _KeptItem:
    name: str
    channel: str
    sizes: dict[torch.device, int]
    blocks: list[Tensor]
    token: socket.socket  # the sender's end


class Keeper:
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

    def reserve(self, devices: CudaDevices, sizes: dict[torch.device, int]) -> bool:
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
    import torch

    memory = wire.Memory.empty(sum(len(block) for block in blocks))
    data = torch.frombuffer(mmap.mmap(memory.descriptor, memory.size), dtype=torch.uint8)
    for part, block in zip(data.split([len(block) for block in blocks]), blocks, strict=True):
        part.copy_(block)
    return memory


_keeper = Keeper()
_of_parents: list[Keeper] = []  # kept in a fork: their memory is freed by the parent alone


def _after_fork() -> None:
    global _keeper
    _of_parents.append(_keeper)
    _keeper.forget_in_fork()
    _keeper = Keeper()


os.register_at_fork(after_in_child=_after_fork)


def keeper() -> Keeper:
    return _keeper


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
