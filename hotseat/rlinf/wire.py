"""Messages between a client and the broker: KIND, LENGTH, PAYLOAD. Items are bytes, or memory that a message passes.

The payload of a request is `ASK`, then items; that of an answer is items, JSON or a text. This file needs only the
standard library, as does everything that the broker's process loads.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

HEAD = struct.Struct("!BQ")
ASK = struct.Struct("!dd")  # timeout; weight of the item that is put, or of the batch that is taken (0: one item)
LENGTH = struct.Struct("!Q")  # of an item

IN_MEMORY = 1 << 63  # added to the length of an item whose bytes are not in the message, but in memory that it passes
KEPT = 1 << 62  # added to the length of an item with a token, which the message passes
MAX_PASSED = 64  # descriptors in one message; the system takes 253

HELLO, PUT, GET, SIZE, RECORD, REPLACE, LOOK_UP, BYE = range(1, 9)  # asked
DONE, ITEMS, FAILED, LATE = range(32, 36)  # answered
NUM_ITEMS = {PUT: 1, GET: 0, SIZE: 0, RECORD: 2, REPLACE: 2, LOOK_UP: 1}  # of a record: name and value

NONCE = 32


def proof(key: bytes, nonce: bytes, side: bytes) -> bytes:
    """Compute the proof that this side knows the key, which itself is not sent."""
    return hmac.digest(key, side + nonce, hashlib.sha256)


class Memory:
    """An item in memory of its own, without a name, which processes of this machine pass to each other.

    The system frees it when the last process that has its descriptor closes it, or ends.
    """

    def __init__(self, descriptor: int, size: int):
        self.descriptor = descriptor
        self.size = size

    @classmethod
    def empty(cls, size: int) -> Memory:
        memory = cls(os.memfd_create("hotseat-item"), size)
        os.ftruncate(memory.descriptor, size)
        return memory

    @classmethod
    def of(cls, data: bytes) -> Memory:
        """Write an item to new memory."""
        memory = cls(os.memfd_create("hotseat-item"), len(data))
        view = memoryview(data)
        while view:
            view = view[os.write(memory.descriptor, view) :]
        return memory

    def read(self) -> bytes:
        """Copy the item out of its memory."""
        pieces, at = [], 0
        while at < self.size:
            pieces.append(os.pread(self.descriptor, self.size - at, at))
            if not pieces[-1]:
                raise OSError(errno.ENODATA, f"memory of {self.size} bytes ends after {at}")
            at += len(pieces[-1])
        return b"".join(pieces)

    def __del__(self) -> None:
        os.close(self.descriptor)


Packed = bytes | memoryview | Memory


class Kept:
    """An item whose tensors are in device memory, which its producer keeps as long as any process has the token.

    The token is a descriptor of a socket. Asked through it by any byte, the producer answers with memory that has the
    tensors' bytes; its end of the socket is closed when it ends.
    """

    def __init__(self, data: Packed, token: int):
        self.data = data
        self.token = token

    def detach_token(self) -> int:
        """Return the token, which the caller now has to close."""
        token, self.token = self.token, -1
        return token

    def __del__(self) -> None:
        if self.token >= 0:
            os.close(self.token)


PASSED = (Memory, Kept)  # what has descriptors


def pack_items(items: Sequence[Any]) -> list[bytes]:
    """Return the pieces of a payload: each item after its length, which stands alone for an item in `Memory`."""
    pieces: list[Any] = []
    for item in items:
        if not isinstance(item, PASSED):
            pieces += (LENGTH.pack(len(item)), item)
            continue
        flags, data = (KEPT, item.data) if isinstance(item, Kept) else (0, item)
        if isinstance(data, Memory):
            pieces.append(LENGTH.pack(data.size | IN_MEMORY | flags))
        else:
            pieces += (LENGTH.pack(len(data) | flags), data)
    return pieces


def unpack_items(payload: memoryview, passed: deque[int]) -> list[Any]:
    """Return the items of a payload. passed: descriptors that came with it, of which it takes its own.

    Raises `ValueError`, `IndexError` or `struct.error` if they do not make up the payload.
    """
    items: list[Packed | Kept] = []
    at = 0
    while at < len(payload):
        (length,) = LENGTH.unpack_from(payload, at)
        at += LENGTH.size
        size = length & ~(IN_MEMORY | KEPT)
        data: Packed
        if length & IN_MEMORY:
            data = Memory(passed.popleft(), size)
        else:
            data = payload[at : at + size]
            at += size
        items.append(Kept(data, passed.popleft()) if length & KEPT else data)
    if at != len(payload):
        raise ValueError(f"{len(payload)} bytes with items of {at}")
    return items


def check_passed(items: Sequence[Any]) -> None:
    """Raise `ValueError` for descriptors that are no memory of the stated size, or no token."""
    for item in items:
        data = item.data if isinstance(item, Kept) else item
        if isinstance(data, Memory):
            facts = os.fstat(data.descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size < data.size:
                raise ValueError(f"no memory of {data.size} bytes")
        if isinstance(item, Kept) and not stat.S_ISSOCK(os.fstat(item.token).st_mode):
            raise ValueError("a token that is no socket")


def receive_with(connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive at most `size` bytes, and the descriptors that come with them."""
    # Programs that this process starts are not to have them.
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, descriptors, flags, _ = socket.recv_fds(connection, size, MAX_PASSED, flags)
    if flags & socket.MSG_CTRUNC:  # the system has dropped the others
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, "this process has too many open files to take the memory that was passed")
    return data, descriptors


def passed_with(items: Sequence[Any]) -> list[int]:
    """Return the descriptors to be passed with these items."""
    descriptors = []
    for item in items:
        data = item.data if isinstance(item, Kept) else item
        if isinstance(data, Memory):
            descriptors.append(data.descriptor)
        if isinstance(item, Kept):
            descriptors.append(item.token)
    return descriptors


def prepare(connection: socket.socket) -> None:
    """Set the socket to send at once, and to notice a machine that vanished in some ten seconds."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
