"""Broadcast of buckets from one sender to many receivers on other devices.

    sender                                             receiver, in whatever process iterates the bucket
    Broadcaster(group)       hosts a store             BroadcastData.open()   joins the group at the first bucket,
    .data(...)               where to join, what is due                       then receives into memory of its own
    .send(block)             joins, then sends

The process group is made over a store that the sender hosts, apart from torch's default group, so that engines come
and go without the trainer noticing. It is made anew when the `BroadcastGroup` changes or anything went wrong. Every
wait is bounded by its `timeout_s`; a failure names the receivers that are missing.

NCCL sends between devices, gloo between hosts: the code is the same but for the lines in `_process_group` and `_close`.
Tests without several GPUs run it over gloo alone.

The store and gloo listen on the loopback interface when all receivers are on the sender's node, otherwise on the nodes'
addresses, as torch's own groups do: like those, it is for a network whose hosts trust each other.
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hotseat.errors import DeadlineError, RunError, WeightError, WorkerError

CollectiveBackend = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 120.0  # to join, and for each bucket
_POLL_S = 2e-4
_LOOK_S = 0.25  # between questions whether the sender has given up
_GRACE_S = 2.0  # for receivers to report after a transfer that failed
_GIVEN_UP = "given up"


@dataclass(frozen=True)
class BroadcastGroup:
    """The receivers of a broadcast, and how they are reached. Any change makes a new process group."""

    receivers: tuple[str, ...]  # a name for each receiving process; the first has rank 1 of the group
    backend: CollectiveBackend
    host: str = LOOPBACK  # at which all of them reach the sender
    generation: int = 0  # how many of them were replaced by other processes so far
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class BroadcastData:
    """Bytes that the sender broadcasts while receivers open them."""

    broadcast_group: BroadcastGroup
    port: int
    group: str
    sequence: int  # of the broadcast in its group
    num_bytes: int
    first_rank: int = 1  # of the engine's first process

    def open(self) -> Tensor:
        rank = self.first_rank + (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
        with _joining:
            for key in [key for key in _members if key[0] != self.group]:
                _members.pop(key).close()
            member = _members.setdefault((self.group, rank), _Member(self, rank))
        try:
            return member.receive(self)
        except (DeadlineError, WorkerError):
            _members.pop((self.group, rank), None)
            raise


class Broadcaster:
    """The sender's side of a group."""

    def __init__(self, broadcast_group: BroadcastGroup):
        self.broadcast_group = broadcast_group
        self.is_broken = False
        self._name = uuid.uuid4().hex
        # A socket of our own: left to itself the store would listen on every interface.
        listening = socket.create_server((broadcast_group.host, 0))
        self._port: int = listening.getsockname()[1]
        self._store = _store(broadcast_group, self._port, is_master=True, master_listen_fd=listening.detach())
        self._group: Any = None
        self._sequence = 0

    def data(self, num_bytes: int) -> BroadcastData:
        """Announce the next broadcast, for receivers to open. `send` must follow."""
        self._sequence += 1
        return BroadcastData(self.broadcast_group, self._port, self._name, self._sequence, num_bytes)

    def send(self, packed: Tensor) -> None:
        """Send [num_bytes] uint8 to every receiver. Over gloo this may return before all have it."""
        started_s = time.monotonic()
        try:
            if self._group is None:
                # First: NCCL waits without a limit for receivers that do not join.
                self._store.wait([f"{rank}/joined" for rank, _ in enumerate(self.broadcast_group.receivers, 1)])
                self._group = _process_group(self.broadcast_group, self._port, self._store, 0)
            packed = packed if self.broadcast_group.backend == "nccl" else packed.cpu()
            _broadcast(self._group, self.broadcast_group, packed, self._store)
            return
        except RuntimeError as error:
            cause = str(error)
        seconds = time.monotonic() - started_s
        with suppress(RuntimeError):
            self._store.set(_GIVEN_UP, "1")  # wakes receivers that still wait for this sender
        self.close()
        who = ", ".join(self._missing()) or "receivers"
        raise _failure(
            f"broadcast {self._sequence} of weights to {len(self.broadcast_group.receivers)} processes failed after"
            f" {seconds:.1f} s: {who} did not receive it",
            self.broadcast_group,
            seconds,
            cause,
        )

    def close(self) -> None:
        self.is_broken = True
        if self._group is not None:
            _close(self._group, self.broadcast_group.backend)
            self._group = None

    def _missing(self) -> list[str]:
        """Name receivers that never joined, else those that neither have the bytes nor report that they failed."""
        names = self.broadcast_group.receivers
        until = time.monotonic() + _GRACE_S
        while True:
            silent = [name for rank, name in enumerate(names, 1) if self._report(rank, "joined") is None]
            silent = silent or [
                name
                for rank, name in enumerate(names, 1)
                if self._report(rank, "got") != str(self._sequence) and self._report(rank, "failed") is None
            ]
            # The last one that has not spoken may only be slow to.
            if len(silent) <= 1 or time.monotonic() > until:
                return silent
            time.sleep(0.05)

    def _report(self, rank: int, what: str) -> str | None:
        key = f"{rank}/{what}"
        with suppress(RuntimeError):
            return self._store.get(key).decode() if self._store.check([key]) else None
        return None


class _Member:
    """A receiver's side of a group."""

    def __init__(self, data: BroadcastData, rank: int):
        self._broadcast_group = data.broadcast_group
        self._rank = rank
        self._port = data.port
        self._store: Any = None
        self._group: Any = None
        self._sequence = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, data: BroadcastData) -> Tensor:
        if data.sequence == self._sequence:
            return self._buffer[: data.num_bytes]  # iterated again
        if data.sequence != self._sequence + 1:
            raise WeightError(
                f"broadcast {data.sequence} of weights is due, but this receiver had {self._sequence} as its last"
            )
        broadcast_group, started_s = self._broadcast_group, time.monotonic()
        try:
            if self._group is None:
                self._join()
            is_cuda = broadcast_group.backend == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
            if self._buffer.numel() < data.num_bytes:
                self._buffer = torch.empty(data.num_bytes, dtype=torch.uint8, device=device)
            received = self._buffer[: data.num_bytes]
            _broadcast(self._group, broadcast_group, received, self._store)
            self._store.set(f"{self._rank}/got", str(data.sequence))
            self._sequence = data.sequence
            return received
        except RuntimeError as error:
            cause = str(error)
        seconds = time.monotonic() - started_s
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"{self._rank}/failed", "1")
        self.close()
        name = broadcast_group.receivers[self._rank - 1]
        raise _failure(
            f"{name} did not receive broadcast {data.sequence} of weights after {seconds:.1f} s",
            broadcast_group,
            seconds,
            cause,
        )

    def _join(self) -> None:
        broadcast_group = self._broadcast_group
        self._store = _store(broadcast_group, self._port, is_master=False)
        self._store.set(f"{self._rank}/joined", "1")
        self._group = _process_group(broadcast_group, self._port, self._store, self._rank)

    def close(self) -> None:
        if self._group is not None:
            _close(self._group, self._broadcast_group.backend)
            self._group = None


_members: dict[tuple[str, int], _Member] = {}  # by group and rank: a process joins a group once
_joining = threading.Lock()


def _store(broadcast_group: BroadcastGroup, port: int, **side: Any) -> Any:
    timeout = datetime.timedelta(seconds=broadcast_group.timeout_s)
    return dist.TCPStore(broadcast_group.host, port, wait_for_workers=False, timeout=timeout, **side)


def _process_group(broadcast_group: BroadcastGroup, port: int, store: Any, rank: int) -> Any:
    size = 1 + len(broadcast_group.receivers)
    store = dist.PrefixStore("group", store)
    if broadcast_group.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # Longer than ours: what torch's watchdog finds late, it ends the process for.
        options._timeout = datetime.timedelta(seconds=10 * broadcast_group.timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(broadcast_group.host, port))]
    options._timeout = datetime.timedelta(seconds=broadcast_group.timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: Any, broadcast_group: BroadcastGroup, tensor: Tensor, store: Any) -> None:
    """Broadcast a tensor from rank 0, and wait. Raises early if the sender has given up, which no connection tells."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work = group.broadcast([tensor], options)
    started_s = looked_s = time.monotonic()
    while not work.is_completed():
        now_s = time.monotonic()
        if now_s - started_s > broadcast_group.timeout_s:
            raise RuntimeError("no answer")
        if now_s - looked_s > _LOOK_S:
            if store.check([_GIVEN_UP]):
                raise RuntimeError("the sender has given up")
            looked_s = now_s
        time.sleep(_POLL_S)
    work.wait()  # Raises what went wrong; the stream that reads next waits for NCCL's.


def _close(group: Any, backend: CollectiveBackend) -> None:
    """End a process group without waiting for its other members."""
    with suppress(RuntimeError):
        group.abort() if backend == "nccl" else group.shutdown()


def _own_address(host: str, port: int) -> str:
    """Return the address under which this node and the host reach each other. Nothing is sent."""
    if host == LOOPBACK:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _failure(message: str, broadcast_group: BroadcastGroup, seconds: float, cause: str) -> RunError:
    if seconds >= 0.95 * broadcast_group.timeout_s:  # clocks differ
        return DeadlineError(f"{message} within {broadcast_group.timeout_s:g} s: {cause}")
    error = WorkerError(f"{message}: {cause}")
    error.is_death = True  # A connection breaks when the process at its end is gone.
    return error
