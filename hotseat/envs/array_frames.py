"""Messages between a simulator's process and its parent: large arrays go through memory that both map.

The memory has no name: the parent makes it before it starts the child, and the system frees it when both have ended or
let go of it, however they end. The child writes the arrays of a command's answers one after another, and begins anew
with the next command, which the parent sends when it has taken all answers. The channel carries where they are.
"""

from __future__ import annotations

import mmap
import os
import pickle
from dataclasses import dataclass
from typing import Any

_MIN_BYTES = 4096  # smaller arrays go through the channel
_ALIGNMENT = 64


def make_memory() -> int | None:
    """Return a descriptor of new memory, to be passed to a child; None where the system has no such memory."""
    return os.memfd_create("hotseat-frames") if hasattr(os, "memfd_create") else None


@dataclass(eq=False)
class ChildFrames:
    """The child's codec. memory: the descriptor that it inherited; None: everything goes through the channel."""

    memory: int | None
    _map: mmap.mmap | None = None
    _at: int = 0

    def loads(self, data: bytes) -> Any:
        """Return a command, with which the answers begin anew: those of earlier ones were taken."""
        self._at = 0
        return pickle.loads(data)

    def dumps(self, message: Any) -> bytes:
        """Pickle an answer. Arrays in it that are large and contiguous are written to the memory."""
        places: list[tuple[int, int]] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if self.memory is None or raw.nbytes < _MIN_BYTES:
                return True
            places.append((self._write(raw), raw.nbytes))
            return False

        return pickle.dumps((pickle.dumps(message, protocol=5, buffer_callback=is_small), places))

    def _write(self, raw: memoryview) -> int:
        assert self.memory is not None
        start, end = self._at, self._at + raw.nbytes
        if self._map is None or end > len(self._map):
            size = max(2 * end, 1 << 20)
            os.ftruncate(self.memory, size)
            self._map = mmap.mmap(self.memory, size)
        self._map[start:end] = raw
        self._at = -(-end // _ALIGNMENT) * _ALIGNMENT
        return start


@dataclass(eq=False)
class ParentFrames:
    """The parent's codec. memory: a descriptor, which this closes in the end; None: everything comes by the channel."""

    memory: int | None
    _map: mmap.mmap | None = None

    def dumps(self, message: Any) -> bytes:
        return pickle.dumps(message)

    def loads(self, data: bytes) -> Any:
        """Return an answer. Its arrays are copies, which stay."""
        pickled, places = pickle.loads(data)
        return pickle.loads(pickled, buffers=[self._read(*place) for place in places])

    def _read(self, start: int, size: int) -> bytearray:
        assert self.memory is not None
        if self._map is None or start + size > len(self._map):
            self._map = mmap.mmap(self.memory, 0, prot=mmap.PROT_READ)
        return bytearray(memoryview(self._map)[start : start + size])

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None
