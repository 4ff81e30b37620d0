"""The child's side of a process that `ChildProcess` starts: a channel of frames, and the program that runs a file.

Run as `python child.py FD PROGRAM`: FD is a connected socket, and PROGRAM a Python file with `main(channel, task)`. The
first message, in JSON, has the task and how the process is bounded. This file needs nothing but Python's own library,
since the interpreter of a child may have nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import struct
import sys

TYPE_CHECKING = False  # importing `typing` would take longer than the rest
if TYPE_CHECKING:
    import asyncio
    from typing import Any, Protocol

    class Codec(Protocol):
        """Makes bytes of messages, and messages of bytes. `loads` raises `ValueError` for bytes that are none."""

        def dumps(self, message: Any, /) -> bytes: ...
        def loads(self, data: bytes, /) -> Any: ...


HEAD = struct.Struct("<Q")  # the length of a message, before it
MAX_BYTES = 1 << 30  # of a message to the parent
_PR_SET_PDEATHSIG = 1


class Json:
    """The codec of messages that are JSON objects."""

    def dumps(self, message: Any) -> bytes:
        return json.dumps(message).encode()

    def loads(self, data: bytes) -> Any:
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message


class FrameChannel:
    """The child's end of a connection. Its waits have no limit: the parent ends a child that is late."""

    def __init__(self, connection: socket.socket, codec: Codec | None = None):
        self.socket = connection
        self.codec: Codec = codec or Json()

    def send(self, message: Any) -> None:
        self.socket.sendall(self.frame(message))

    def receive(self) -> Any:
        """Return the next message. Raises `EOFError` if the other side has ended."""
        return self.codec.loads(self._read(*HEAD.unpack(self._read(HEAD.size))))

    def frame(self, message: Any) -> bytes:
        data = self.codec.dumps(message)
        return HEAD.pack(len(data)) + data

    async def receive_from(self, reader: asyncio.StreamReader, max_bytes: int = MAX_BYTES) -> Any:
        """Return the next message in an event loop. Raises `EOFError` if the other side has ended."""
        (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
        if size > max_bytes:
            raise EOFError("a message is longer than any should be")
        return self.codec.loads(await reader.readexactly(size))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def die_with(parent: int) -> None:
    """Have the system kill this process when the thread ends that started it."""
    if sys.platform.startswith("linux"):
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def _main(handle: str, program: str) -> None:
    # What is beside this file has nothing to do with the program.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    channel = FrameChannel(socket.socket(fileno=int(handle)))
    channel.socket.set_inheritable(False)
    try:
        first = channel.receive()
    except (EOFError, ConnectionError):
        return
    if first["parent"] is not None:
        die_with(first["parent"])
    if first["max_memory"] is not None:
        import resource

        # The limit is on written data: libraries, above all for GPUs, reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (first["max_memory"], first["max_memory"]))
    # Last: first would put all that is installed beside a package before Python's own library.
    sys.path += first["path"]
    spec = importlib.util.spec_from_file_location("hotseat_program", program)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(channel, first["task"])


if __name__ == "__main__":
    _main(*sys.argv[1:])
