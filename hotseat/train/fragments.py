"""Stretches of flattened tensors, stored in a checkpoint as parts of whole tensors.

ZeRO cuts weights and optimizer state wherever a rank's share of all elements ends, in the middle of a row too. The
checkpoint format knows rectangles only: a `Fragment` tells it those that the stretch is made of. What is written so can
be read by any number of ranks, cut in any way, by either backend.

With tensor parallelism the stretch is of a part of the tensor, itself a rectangle: its rectangles are shifted there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

T = TypeVar("T")


class Box(NamedTuple):
    """A rectangle: where it lies in the whole tensor, and where it begins in the stretch."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """List the rectangles that elements `start` to `stop` of a flattened tensor are made of, in order."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    if len(shape) == 1:
        return [Box((start,), (stop - start,), 0)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        return _in_row(shape, last, start - last * row, stop - last * row, 0)
    boxes_in_order = _in_row(shape, first - 1, start - (first - 1) * row, row, 0) if start < first * row else []
    if first < last:
        rest = tuple(shape[1:])
        boxes_in_order.append(Box((first, *[0] * len(rest)), (last - first, *rest), first * row - start))
    return boxes_in_order + _in_row(shape, last, 0, stop - last * row, last * row - start)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int, begin: int) -> list[Box]:
    return [
        Box((row, *box.offsets), (1, *box.sizes), begin + box.begin) for box in boxes(tuple(shape[1:]), start, stop)
    ]


class Fragment(Tensor):
    """A stretch of a flattened tensor of this shape: `flat` [num_elements] holds its elements from `start` on.

    With `part` and `shift` it is a stretch of a part of that tensor, which has the shape `part` and begins at `shift`.
    """

    flat: Tensor
    start: int
    part: tuple[int, ...]
    shift: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        flat: Tensor,
        shape: Sequence[int],
        start: int,
        part: Sequence[int] | None = None,
        shift: Sequence[int] | None = None,
    ) -> Fragment:
        fragment = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=flat.dtype, device=flat.device)
        fragment.flat, fragment.start = flat, start
        fragment.part = tuple(shape if part is None else part)
        fragment.shift = tuple([0] * len(shape) if shift is None else shift)
        return fragment

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a fragment: use what it holds")

    def __repr__(self, **kwargs: Any) -> str:
        where = "" if self.part == tuple(self.shape) else f"{self.part} at {self.shift} in "
        return f"Fragment({self.start} to {self.start + self.flat.numel()} of {where}{tuple(self.shape)})"

    def detach(self) -> Fragment:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Fragment:
        return Fragment(self.flat.detach().to(*args, **kwargs), self.shape, self.start, self.part, self.shift)

    def _boxes(self) -> list[Box]:
        own_boxes = boxes(self.part, self.start, self.start + self.flat.numel())
        return [box._replace(offsets=tuple(map(sum, zip(box.offsets, self.shift, strict=True)))) for box in own_boxes]

    # --- what torch's checkpoints ask a tensor that is in several places ----------------------------------------------

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        [box] = [box for box in self._boxes() if box.offsets == tuple(index.offset or ())]
        return self.flat.detach()[box.begin : box.begin + math.prod(box.sizes)].view(box.sizes)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is sharded, or all of one that is not."""
    if isinstance(tensor, Fragment):
        return tensor.flat
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_buckets(items: Iterable[T], size_of: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """Group items, in their order, into buckets of at most `max_size`, of which one larger item may be all."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and size + size_of(item) > max_size:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += size_of(item)
    if bucket:
        yield bucket
