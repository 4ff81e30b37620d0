"""A push of weights: begin, buckets in order, finish, check. Either side may be a process of its own.

    sender.begin(version)          receiver.begin(version)
    while sender.pack_next():      receiver.take(sender.packed(transport))    each bucket to each engine
          sender.broadcast()                                                  meanwhile, if an engine has that transport
    sender.finish()                live = receiver.finish(version)
    check_digests(version, sent, live, engine)

A bucket's bytes stay as they are until the second `pack_next` after it: take bucket n before packing bucket n + 2.

The receiver refuses a bucket of another version or out of order. `check_digests` compares what the trainer holds with
what the engine would use next, tensor by tensor: it catches weights that were dropped, corrupted or swapped, or that
arrived and were not loaded. The loop's canary compares what both compute from these weights: some engines repack
weights so that they have no digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hotseat.errors import WeightError
from hotseat.weights.broadcast import Broadcaster, BroadcastGroup
from hotseat.weights.bucket import Bucket, BucketData, Entry, Packer, host_data
from hotseat.weights.device_ipc import Exporter
from hotseat.weights.transports import Transport

BUCKET_BYTES = 1 << 29


class Sender:
    """Packs a trainer's weights, one bucket at a time, and hands each bucket to every transport."""

    def __init__(
        self,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._weights = weights
        self._packer = Packer(torch.device(device), bucket_bytes)
        self._exporter = Exporter()
        self._broadcaster: Broadcaster | None = None
        self._broadcast_group: BroadcastGroup | None = None
        self._is_finished = True
        self._version = self._index = -1
        self._entries: tuple[Entry, ...] = ()
        self._packed: Tensor | None = None  # [bytes of the bucket] uint8

    def begin(self, version: int, broadcast_group: BroadcastGroup | None = None) -> None:
        """Begin a push. Another broadcast group than before, or a push that failed, makes a new process group."""
        group = self._broadcaster
        if group is not None and (group.broadcast_group != broadcast_group or group.is_broken or not self._is_finished):
            group.close()
            self._broadcaster = None
        self._broadcast_group = broadcast_group
        self._is_finished = False
        self._version, self._index, self._packed = version, -1, None
        self._packer.begin(self._weights())

    def pack_next(self) -> int | None:
        """Pack the next bucket; return its bytes, or None if no weight is left."""
        packed = self._packer.pack()
        if packed is None:
            self._packed = None
            return None
        self._entries, num_bytes = packed
        self._index += 1
        self._packed = self._packer.block[:num_bytes]
        if self._packed.is_cuda:
            torch.cuda.current_stream(self._packed.device).synchronize()  # Other processes read it next.
        return num_bytes

    def packed(self, transport: Transport = "host") -> Bucket:
        """Return the bucket that was packed last, for this transport. After "broadcast", call `broadcast`."""
        return Bucket(self._version, self._index, self._entries, self._data(transport))

    def _data(self, transport: Transport) -> BucketData:
        packed = self._bytes()
        if transport == "host":
            return host_data(packed)
        if transport == "ipc":
            return self._exporter.shared(self._packer.turn, self._packer.block, packed.numel())
        if self._broadcaster is None:
            assert self._broadcast_group is not None, "a broadcast needs receivers"
            self._broadcaster = Broadcaster(self._broadcast_group)
        return self._broadcaster.data(packed.numel())

    def broadcast(self) -> None:
        """Send the packed bucket's bytes. Raises, naming receivers, after the group's time limit at the latest."""
        assert self._broadcaster is not None, "no bucket was packed for a broadcast"
        self._broadcaster.send(self._bytes())

    def finish(self) -> None:
        """End a push, after all buckets were taken."""
        self._is_finished = True

    def close(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
            self._broadcaster = None

    def _bytes(self) -> Tensor:
        assert self._packed is not None, "no bucket is packed"
        return self._packed


class Receiver:
    """Feeds an engine, or a copy of the policy, from buckets.

    load: takes the weights of a bucket. digest: hashes live weights of these names. begin, finish: called with the
    version before the first bucket, and after the last.
    """

    def __init__(
        self,
        load: Callable[[Bucket], object],
        digest: Callable[[Sequence[str]], dict[str, int]],
        begin: Callable[[int], object] = lambda version: None,
        finish: Callable[[], object] = lambda: None,
    ):
        self._load, self._digest, self._begin, self._finish = load, digest, begin, finish
        self._version: int | None = None
        self._next_index = 0
        self._names: list[str] = []  # of the weights that were taken

    def begin(self, version: int) -> None:
        self._version, self._next_index, self._names = version, 0, []
        self._begin(version)

    def take(self, bucket: Bucket) -> None:
        names = ", ".join(entry.name for entry in bucket.entries[:3]) + (", ..." if len(bucket.entries) > 3 else "")
        if bucket.version != self._version:
            raise WeightError(
                f"push of version {self._version}: bucket {bucket.index} ({names}) is of version {bucket.version}"
            )
        if bucket.index != self._next_index:
            raise WeightError(
                f"push of version {self._version}: bucket {bucket.index} ({names}) arrived where bucket"
                f" {self._next_index} was due"
            )
        self._next_index += 1
        self._load(bucket)
        self._names += [entry.name for entry in bucket.entries]

    def finish(self, version: int) -> dict[str, int]:
        """Serve the version; return the digests of the weights that were taken, as they are live now."""
        if version != self._version:
            raise WeightError(f"push of version {self._version} cannot be finished as version {version}")
        self._finish()
        self._version = None
        return self._digest(self._names)


def check_digests(version: int, sent: Mapping[str, int], live: Mapping[str, int], engine: str) -> None:
    """Raise unless the engine holds, bit for bit, what was sent."""
    wrong = [name for name, digest in sent.items() if live.get(name) != digest]
    if not wrong:
        return
    missing = [name for name in wrong if name not in live]
    what = f"has no {missing[0]}" if missing else f"serves other values of {wrong[0]} than the trainer holds"
    others = (
        f" (and {len(wrong) - 1} more of {len(sent)} tensors)" if len(wrong) > 1 else f" (1 of {len(sent)} tensors)"
    )
    raise WeightError(
        f"{engine} {what} after the push of version {version}{others}: the push was dropped, damaged or not loaded."
        " Nothing was sampled from it"
    )
