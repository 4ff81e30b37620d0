"""Batches from one group of workers to another: who sends which part to whom, how it is cut and put together.

The rows of all senders, in rank order, are one batch, of which every receiver gets an equal run, in rank order too. So
a sender's rows go to one receiver or to several neighbours, and the pairs depend on the sizes of the groups alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hotseat.errors import DeadlineError, PlacementError, UserError
from hotseat.rlinf.queues import QueueDirectory

_LOOK_UP_S = 60.0  # how long to wait for a group to be launched


@dataclass(frozen=True)
class RankRows:
    """Rows that go to a worker, or come from it."""

    rank: int
    num_rows: int


def parts_to_send(num_rows: int, num_senders: int, num_receivers: int, rank: int) -> list[RankRows]:
    """Return the receivers of a sender's rows, in order. num_rows: of all senders together."""
    _check_divisible(num_rows, num_senders, num_receivers)
    return _overlaps(rank, num_rows // num_senders, num_rows // num_receivers)


def parts_to_receive(num_rows: int, num_senders: int, num_receivers: int, rank: int) -> list[RankRows]:
    """Return the senders of a receiver's rows, in order. num_rows: of all receivers together."""
    _check_divisible(num_rows, num_senders, num_receivers)
    return _overlaps(rank, num_rows // num_receivers, num_rows // num_senders)


def _overlaps(rank: int, own: int, theirs: int) -> list[RankRows]:
    """Cut the rows [rank * own, (rank + 1) * own) at the multiples of `theirs`."""
    first, end = rank * own, (rank + 1) * own
    peers = range(first // theirs, (end - 1) // theirs + 1)
    return [RankRows(peer, min(end, (peer + 1) * theirs) - max(first, peer * theirs)) for peer in peers]


def _check_divisible(num_rows: int, num_senders: int, num_receivers: int) -> None:
    if num_rows <= 0 or num_rows % num_senders or num_rows % num_receivers:
        raise UserError(
            f"a batch of {num_rows} rows cannot be shared evenly among {num_senders} senders and {num_receivers}"
            " receivers: batch_size, which counts the rows of all workers of a group, has to be a multiple of both"
        )


# --- rows -------------------------------------------------------------------------------------------------------------


def num_rows(batch: Any) -> int:
    """Count the rows of a tensor, an array, a list, or of the first of those in a dict."""
    first = next(_values_with_rows(batch), None)
    if first is None:
        raise UserError(
            f"a {type(batch).__name__} has no rows: send tensors, arrays, lists or dicts of them; with anything else"
            " set batch_size and split_fn in send_to, and merge_fn and infer_batch_size_fn in recv_from"
        )
    return len(first)


def _values_with_rows(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict):
        for value in batch.values():
            yield from _values_with_rows(value)
    elif isinstance(batch, list) or _has_rows(batch):
        yield batch


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into runs of rows. In a dict, every part has the values that have no rows."""
    if isinstance(batch, dict):
        columns = {key: split(value, sizes) for key, value in batch.items()}
        return [{key: parts[at] for key, parts in columns.items()} for at in range(len(sizes))]
    if batch is None or isinstance(batch, bool | int | float | str) or getattr(batch, "shape", None) == ():
        return [batch] * len(sizes)
    if num_rows(batch) != sum(sizes):
        raise UserError(f"{num_rows(batch)} rows are to be sent as {' + '.join(map(str, sizes))}: they must be as many")
    if len(sizes) == 1:
        return [batch]
    parts, begin = [], 0
    for size in sizes:
        part = batch[begin : begin + size]
        parts.append(part.clone() if _is_tensor(part) else part)  # with its batch's memory all of that would travel
        begin += size
    return parts


def merge(batches: Sequence[Any]) -> Any:
    """Put runs of rows together. Values without rows must be equal in all of them."""
    first = batches[0]
    if len(batches) == 1:
        return first
    kinds = {type(batch).__name__ for batch in batches}
    if len(kinds) > 1:
        raise UserError(f"parts of one batch are of several types: {', '.join(sorted(kinds))}; set merge_fn")
    if isinstance(first, dict):
        if any(batch.keys() != first.keys() for batch in batches):
            raise UserError(f"parts of one batch have different keys: {[sorted(map(str, batch)) for batch in batches]}")
        return {key: merge([batch[key] for batch in batches]) for key in first}
    if isinstance(first, list):
        return [row for batch in batches for row in batch]
    if _has_rows(first):
        library = sys.modules["torch" if _is_tensor(first) else "numpy"]
        return library.cat(list(batches)) if _is_tensor(first) else library.concatenate(list(batches))
    if all(batch == first for batch in batches):
        return first
    raise UserError(f"parts of one batch have different values, such as {first!r} and {batches[1]!r}: set merge_fn")


def _has_rows(value: Any) -> bool:
    return len(getattr(value, "shape", ())) > 0


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has loaded it
    return torch is not None and isinstance(value, torch.Tensor)


# --- sizes of groups --------------------------------------------------------------------------------------------------


def record_size(directory: QueueDirectory, group: str, size: int) -> None:
    """Publish how many workers a group has, for other groups."""
    directory.record(_entry_of(group), size)  # in place of a group of this name that was closed before


def group_size(directory: QueueDirectory, group: str) -> int:
    """Return how many workers a group has, which was launched or will be soon."""
    try:
        size: int = directory.look_up(_entry_of(group), timeout_s=min(_LOOK_UP_S, directory.timeout_s))
    except DeadlineError as error:
        raise PlacementError(f"there is no group {group!r} to exchange batches with: launch it first") from error
    return size


def _entry_of(group: str) -> str:
    return f"size of group {group}"
