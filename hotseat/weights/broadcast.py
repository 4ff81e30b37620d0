"""One sender, many receivers on other devices: every bucket's bytes are broadcast once.

    sender                                             receiver, in whatever process iterates the bucket
    Broadcaster(audience)    hosts a store             BroadcastData.open()   joins the group at the first bucket,
    .data(...)               where to join, what is due                       then receives into memory of its own
    .send(block)             joins, then sends

The group is none of torch's: it is made of one process group over a store that the sender hosts, so that engines come
and go without the trainer's own group. It is made anew when the audience changes or anything went wrong. Every wait is
bounded by the audience's `timeout_s`; a failure names who has not received.

NCCL between devices, gloo between hosts: the code is the same but for the lines in `_process_group` and `_close`. Tests
without several GPUs run it over gloo alone.

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

Backend = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 120.0  # to join, and for each bucket
_POLL_S = 2e-4
_LOOK_S = 0.25  # between questions whether the sender has given up
_GRACE_S = 2.0  # for receivers to say that they are alive after a transfer that failed
_GIVEN_UP = "given up"


@dataclass(frozen=True)
class Audience:
    """Who receives. Any change makes a new group."""

    receivers: tuple[str, ...]  # a name for each receiving process; the first has rank 1 of the group
    backend: Backend
    host: str = LOOPBACK  # at which all of them reach the sender
    generation: int = 0  # how many of them were replaced by other processes so far
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True)
class BroadcastData:
    """Bytes that the sender broadcasts while receivers open them."""

    audience: Audience
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

    def __init__(self, audience: Audience):
        self.audience = audience
        self.is_broken = False
        self._name = uuid.uuid4().hex
        # A socket of our own: left to itself the store would listen on every interface.
        listening = socket.create_server((audience.host, 0))
        self._port: int = listening.getsockname()[1]
        self._store = dist.TCPStore(
            audience.host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=datetime.timedelta(seconds=audience.timeout_s),
        )
        self._group: Any = None
        self._sequence = 0

    def data(self, num_bytes: int) -> BroadcastData:
        """Of the next broadcast. `send` must follow."""
        self._sequence += 1
        return BroadcastData(self.audience, self._port, self._name, self._sequence, num_bytes)

    def send(self, packed: Tensor) -> None:
        """[num_bytes] uint8, to every receiver. Over gloo it may have left before all have it."""
        started_s = time.monotonic()
        try:
            if self._group is None:
                # First: NCCL waits without a limit for those who do not come.
                self._store.wait([f"{rank}/joined" for rank, _ in enumerate(self.audience.receivers, 1)])
                self._group = _process_group(self.audience, self._port, self._store, 0)
            packed = packed if self.audience.backend == "nccl" else packed.cpu()
            _broadcast(self._group, self.audience, packed, self._store)
            return
        except RuntimeError as error:
            cause = str(error)
        seconds = time.monotonic() - started_s
        with suppress(RuntimeError):
            self._store.set(_GIVEN_UP, "1")  # wakes those who still wait for us
        self.close()
        who = ", ".join(self._missing()) or "receivers"
        raise _failure(
            f"broadcast {self._sequence} of weights to {len(self.audience.receivers)} processes failed after"
            f" {seconds:.1f} s: {who} did not receive it",
            self.audience,
            seconds,
            cause,
        )

    def close(self) -> None:
        self.is_broken = True
        if self._group is not None:
            _close(self._group, self.audience.backend)
            self._group = None

    def _missing(self) -> list[str]:
        """Names of receivers that never came, else of those that neither have the bytes nor say that they failed."""
        names = self.audience.receivers
        until = time.monotonic() + _GRACE_S
        while True:
            silent = [name for rank, name in enumerate(names, 1) if self._said(rank, "joined") is None]
            silent = silent or [
                name
                for rank, name in enumerate(names, 1)
                if self._said(rank, "got") != str(self._sequence) and self._said(rank, "failed") is None
            ]
            # The last one that has not spoken may only be slow to.
            if len(silent) <= 1 or time.monotonic() > until:
                return silent
            time.sleep(0.05)

    def _said(self, rank: int, what: str) -> str | None:
        key = f"{rank}/{what}"
        with suppress(RuntimeError):
            return self._store.get(key).decode() if self._store.check([key]) else None
        return None


class _Member:
    """A receiver's side of a group."""

    def __init__(self, data: BroadcastData, rank: int):
        self._audience = data.audience
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
        audience, started_s = self._audience, time.monotonic()
        try:
            if self._group is None:
                self._join()
            is_cuda = audience.backend == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
            if self._buffer.numel() < data.num_bytes:
                self._buffer = torch.empty(data.num_bytes, dtype=torch.uint8, device=device)
            received = self._buffer[: data.num_bytes]
            _broadcast(self._group, audience, received, self._store)
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
        name = audience.receivers[self._rank - 1]
        raise _failure(
            f"{name} did not receive broadcast {data.sequence} of weights after {seconds:.1f} s",
            audience,
            seconds,
            cause,
        )

    def _join(self) -> None:
        audience = self._audience
        self._store = dist.TCPStore(
            audience.host,
            self._port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=audience.timeout_s),
        )
        self._store.set(f"{self._rank}/joined", "1")
        self._group = _process_group(audience, self._port, self._store, self._rank)

    def close(self) -> None:
        if self._group is not None:
            _close(self._group, self._audience.backend)
            self._group = None


_members: dict[tuple[str, int], _Member] = {}  # by group and rank: a process joins a group once
_joining = threading.Lock()


def _process_group(audience: Audience, port: int, store: Any, rank: int) -> Any:
    size = 1 + len(audience.receivers)
    store = dist.PrefixStore("group", store)
    if audience.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # Longer than ours: what torch's watchdog finds late, it ends the process for.
        options._timeout = datetime.timedelta(seconds=10 * audience.timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(audience.host, port))]
    options._timeout = datetime.timedelta(seconds=audience.timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: Any, audience: Audience, tensor: Tensor, store: Any) -> None:
    """From rank 0, until it is done. Ends early when the sender has given up, of which a connection need not tell."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work = group.broadcast([tensor], options)
    started_s = looked_s = time.monotonic()
    while not work.is_completed():
        now_s = time.monotonic()
        if now_s - started_s > audience.timeout_s:
            raise RuntimeError("no answer")
        if now_s - looked_s > _LOOK_S:
            if store.check([_GIVEN_UP]):
                raise RuntimeError("the sender has given up")
            looked_s = now_s
        time.sleep(_POLL_S)
    work.wait()  # Raises what went wrong; the stream that reads next waits for NCCL's.


def _close(group: Any, backend: Backend) -> None:
    """Without waiting for anybody."""
    with suppress(RuntimeError):
        group.abort() if backend == "nccl" else group.shutdown()


def _own_address(host: str, port: int) -> str:
    """The address under which this node reaches, and is reached by, the host. Nothing is sent."""
    if host == LOOPBACK:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _failure(message: str, audience: Audience, seconds: float, cause: str) -> RunError:
    if seconds >= 0.95 * audience.timeout_s:  # clocks differ
        return DeadlineError(f"{message} within {audience.timeout_s:g} s: {cause}")
    error = WorkerError(f"{message}: {cause}")
    error.is_death = True  # type: ignore[attr-defined]  # A connection breaks when the process at its end is gone.
    return error
