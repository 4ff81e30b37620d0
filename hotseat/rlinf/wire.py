"""Messages between a client and the broker: KIND, LENGTH, PAYLOAD. Items are bytes, or memory that a message passes.

It needs only the standard library, as does everything that the broker's process loads.
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
from typing import Any

HEAD = struct.Struct("!BQ")
COUNT = struct.Struct("!I")
LENGTH = struct.Struct("!Q")
ASK_PUT = struct.Struct("!dd")  # timeout, weight of each item; then the items
ASK_GET = struct.Struct("!dIId")  # timeout, most, at least, weight of the batch (0: it has no limit)
ASK_RECORD = struct.Struct("!?I")  # whether it replaces one that is there, length of the name; then name and value
ASK_LOOK_UP = struct.Struct("!d")  # timeout; then the name

MAX_COUNT = (1 << 32) - 1
IN_MEMORY = 1 << 63  # added to the length of an item whose bytes are not in the message, but in memory that it passes
KEPT = 1 << 62  # added to the length of an item with a token, which the message passes
MAX_PASSED = 64  # descriptors in one message; the system takes 253

HELLO, PUT, GET, CLOSE, FAIL, SIZE, BYE, RECORD, LOOK_UP = range(1, 10)  # asked
DONE, ITEMS, CLOSED, FAILED, LATE = range(32, 37)  # answered

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


def pack_items(items: list[Any]) -> list[bytes]:
    """Return the pieces of a payload: the number of items, then each item after its length.

    Of an item in `Memory` the payload has the length alone.
    """
    pieces: list[Any] = [COUNT.pack(len(items))]
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


def unpack_items(payload: memoryview, passed: deque[int]) -> list[Packed | Kept]:
    """Return the items of a payload. passed: descriptors that came with it, of which it takes its own.

    Raises `ValueError`, `IndexError` or `struct.error` if they do not make up the payload.
    """
    (count,) = COUNT.unpack_from(payload)
    items: list[Packed | Kept] = []
    at = COUNT.size
    for _ in range(count):
        (length,) = LENGTH.unpack_from(payload, at)
        at += LENGTH.size
        if length < KEPT:
            items.append(payload[at : at + length])
            at += length
            continue
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


def check_passed(items: list[Any]) -> None:
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


def passed_with(items: list[Any]) -> list[int]:
    """Return the descriptors to be passed with these items."""
    descriptors = []
    for item in items:
        data = item.data if isinstance(item, Kept) else item
        if isinstance(data, Memory):
            descriptors.append(data.descriptor)
        if isinstance(item, Kept):
            descriptors.append(item.token)
    return descriptors


class Stream:
    """A client's socket, with what came from it and what it has not taken yet: bytes, and descriptors beside them."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.received = bytearray()
        self.passed: deque[int] = deque()  # descriptors that came, and belong to no item yet
        self.unsent = bytearray()
        self.to_pass: list[Memory | Kept] = []  # goes with the first byte that is sent next

    def receive(self) -> bool:
        """Take what has come. False: the client has ended."""
        try:
            if self.socket.family == socket.AF_UNIX:
                data, descriptors = receive_with(self.socket, 1 << 18)
                self.passed += descriptors
            else:
                data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += data
        return bool(data)

    def take(self, size: int) -> bytes:
        """Return the first bytes that came, and drop them here."""
        data = bytes(memoryview(self.received)[:size])
        del self.received[:size]
        return data

    def drop_passed(self) -> None:
        while self.passed:
            os.close(self.passed.popleft())

    def write(self, data: bytes) -> None:
        """Send what the socket takes now; the rest is for `flush`."""
        sent = 0
        if not self.unsent:
            try:
                sent = self._send(memoryview(data))
            except BlockingIOError:
                pass
            except OSError:
                return  # the socket will be readable, and end its connection in its turn
        self.unsent += memoryview(data)[sent:]

    def flush(self) -> bool:
        """Send more of what is left. False: the connection is broken."""
        try:
            del self.unsent[: self._send(memoryview(self.unsent)[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _send(self, data: memoryview) -> int:
        if not self.to_pass:
            return self.socket.send(data)
        sent = socket.send_fds(self.socket, [data], passed_with(self.to_pass))
        self.to_pass = []
        return sent


def prepare(connection: socket.socket) -> None:
    """Set the socket to send at once, and to notice a machine that vanished in some ten seconds."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
