"""Buckets: many tensors in one block of bytes, so that few large transfers replace many small ones.

A bucket's bytes are a numpy array, which the cluster hands to other processes of a node through shared memory, without
a copy per receiver.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; a view of any dtype may start at such an offset

# By name, not by pickled object: what arrives is data.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Part `index` of a push of one version."""

    version: int
    index: int
    entries: tuple[Entry, ...]
    data: np.ndarray  # [num_bytes] uint8


def make_buckets(named: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int) -> Iterator[Bucket]:
    """Pack tensors in order. A tensor is never cut; one larger than `bucket_bytes` has a bucket of its own."""
    pending: list[tuple[Entry, Tensor]] = []
    end = index = 0
    for name, tensor in named:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and end + num_bytes > bucket_bytes:
            yield _pack(pending, end, version, index)
            pending, end, index = [], 0, index + 1
        # Copied now: the source may reuse its buffer for the next tensor.
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, num_bytes)
        pending.append((entry, copy))
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if pending:
        yield _pack(pending, end, version, index)


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its bytes. They are to be read, not written: others read them too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        whole = torch.from_numpy(bucket.data)
    for entry in bucket.entries:
        piece = whole[entry.start : entry.start + entry.num_bytes]
        yield entry.name, piece.view(_DTYPES[entry.dtype]).view(entry.shape)


def _pack(pending: list[tuple[Entry, Tensor]], size: int, version: int, index: int) -> Bucket:
    data = np.empty(size, dtype=np.uint8)
    whole = torch.from_numpy(data)
    for entry, tensor in pending:
        whole[entry.start : entry.start + entry.num_bytes] = tensor.reshape(-1).view(torch.uint8)
    return Bucket(version, index, tuple(entry for entry, _ in pending), data)
