"""The form of an item with tensors: a head, which describes them, a pickle of the rest, and maybe their bytes."""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 512  # of tensors in a block

# An item with tensors begins with this and not with a pickle. The sizes of the manifest and of the pickle follow, then
# both, padded; and the bytes of all blocks, unless the item has a token.
_HEAD = struct.Struct("!8sQQ")
_MARK = b"\0tensors"  # pickles begin with another byte
_HEAD_ALIGNMENT = 64


@dataclass(frozen=True)
class Block:
    """Memory with all tensors of an item on one device, one after another."""

    uuid: str
    num_bytes: int
    handle: Any = None


@dataclass(frozen=True)
class Place:
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
class Manifest:
    """Description of an item's tensors for its receiver."""

    name: str  # of the item, in the sender
    who: str  # the sender
    blocks: tuple[Block, ...]
    places: tuple[Place, ...]

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)

    def split(self, data: Tensor) -> list[Tensor]:
        """Return the blocks in the bytes of all of them."""
        return list(data.split([block.num_bytes for block in self.blocks]))


def make_head(manifest: Manifest, body: bytes) -> bytes:
    """Return what stands before the bytes of an item's tensors. body: the pickle of the rest."""
    described = pickle.dumps(manifest, protocol=5)
    pieces = [_HEAD.pack(_MARK, len(described), len(body)), described, body]
    return b"".join([*pieces, b"\0" * (-sum(map(len, pieces)) % _HEAD_ALIGNMENT)])


def has_tensors(item: Any) -> bool:
    """Tell whether an item, as bytes, begins with a head."""
    return bool(item[0] == _MARK[0])


def read_head(item: memoryview) -> tuple[Manifest, memoryview, memoryview]:
    """Return an item's description, the pickle of the rest, and what follows."""
    _, num_described, num_body = _HEAD.unpack_from(item)
    middle = _HEAD.size + num_described
    end = middle + num_body
    manifest: Manifest = pickle.loads(item[_HEAD.size : middle])
    return manifest, item[middle:end], item[end + -end % _HEAD_ALIGNMENT :]


def bytes_in(buffer: Any) -> Tensor:
    """Return the tensor that a buffer's bytes are, [num_bytes] uint8."""
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8)
