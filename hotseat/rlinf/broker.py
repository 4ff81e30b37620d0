"""The broker of a node as its users see it: what starts it, and a client for each queue in each process."""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotseat.errors import DeadlineError, WorkerError
from hotseat.processes import ChildProcess, WorkerDied, WorkerTimeout
from hotseat.processes.supervisor import WORKER
from hotseat.rlinf import device_items, wire

# The broker answers at the deadline. A client that hears nothing for this much longer takes the broker for stuck. Long,
# because a loaded machine may hold it up that much; one that died is noticed at once, by its sockets.
_BROKER_GRACE_S = 60.0
_FIRST = 1 << 14  # bytes of an answer that are received at first
_PROGRAM = Path(__file__).with_name("broker_process.py")
_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class BrokerAddress:
    """How processes reach a broker: by its socket file, or on other machines by host and port; and the key for both."""

    path: str
    host: str | None
    port: int = 0
    key: bytes = field(default_factory=functools.partial(secrets.token_bytes, 32), repr=False)


class Broker:
    """A broker process, started here: a `NodeService`. It ends when this process does, or at `close`.

    It listens on a socket file in `directory`, and on a port of `host` for processes on other machines; without `host`
    no port is open. Whoever connects has to prove that it knows the key, which travels inside the channels.
    """

    def __init__(
        self, directory: str, *, host: str | None = None, env: dict[str, str] | None = None, timeout_s: float = 30.0
    ):
        self.address = BrokerAddress(os.path.join(directory, f"channels-{secrets.token_hex(4)}"), host)
        self._child = ChildProcess(
            _PROGRAM,
            {"path": self.address.path, "host": host, "key": self.address.key.hex()},
            command=[sys.executable, "-I", "-S"],
            imports_from=[_ROOT],
            stderr=None,
            env={**os.environ, **(env or {})},
            cwd=Path("/"),
        )
        try:
            self.address = replace(self.address, port=self._child.receive(timeout_s)["port"])
        except (WorkerTimeout, WorkerDied) as error:
            self.close()
            raise DeadlineError(f"the channel broker did not start in {timeout_s:.0f} s in {directory}") from error
        self.pid = self._child.pid

    def close(self) -> None:
        self._child.end(grace_s=3.0)
        with contextlib.suppress(OSError):
            os.unlink(self.address.path)
        forget_clients(self.address.path)

    @staticmethod
    def disconnect(address: BrokerAddress) -> None:
        """Close this process's connections to a broker that has ended."""
        forget_clients(address.path)


class BrokerClient:
    """The client of a broker. Each thread that waits has a connection to itself; idle ones are kept for the next.

    There is one for each channel in a process, however often the channel is sent there. Once it is used, it lasts as
    long as the process or the broker, or until `leave`, also between the calls of a worker.
    """

    def __init__(self, address: BrokerAddress, channel: str, capacity: int):
        self.address = address
        self.channel = channel
        self._capacity = capacity
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._near: bool | None = None  # whether the broker is on this machine; None: not tried yet
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return client_of, (self.address, self.channel, self._capacity)

    def put(self, item: Any, weight: float, timeout_s: float) -> tuple[int, Any]:
        is_passed = hasattr(os, "memfd_create") and self._is_near()  # descriptors are, where the broker is here
        packed = [device_items.pack(item, self.channel, _who(), is_passed=is_passed)]
        try:
            return self._ask(wire.PUT, timeout_s, weight, packed)
        finally:
            packed.clear()  # or an error would keep this frame, and with it descriptors

    def get(self, weight: float, timeout_s: float) -> tuple[int, Any]:
        return self._ask(wire.GET, timeout_s, weight)

    def record(self, name: str, value: Any, replaces: bool) -> Any:
        packed = device_items.pack(value, self.channel, _who(), is_passed=False)
        kind = wire.REPLACE if replaces else wire.RECORD
        return self._ask(kind, 0.0, items=[name.encode(), packed])[1][0]

    def look_up(self, name: str, timeout_s: float) -> tuple[int, Any]:
        return self._ask(wire.LOOK_UP, timeout_s, items=[name.encode()])

    def facts(self) -> dict[str, Any]:
        return json.loads(bytes(self._ask(wire.SIZE, 0.0)[1]))

    def _ask(self, kind: int, timeout_s: float, weight: float = 0.0, items: Sequence[Any] = ()) -> tuple[int, Any]:
        connection, waits_s = self._take(), timeout_s + _BROKER_GRACE_S
        try:
            if connection.gettimeout() != waits_s:
                connection.settimeout(waits_s)
            pieces = [wire.ASK.pack(timeout_s, weight), *wire.pack_items(items)]
            _send(connection, kind, pieces, wire.passed_with(items))
            answer, payload, descriptors = _receive(connection)
        except BaseException as error:
            # Requests on this connection are withdrawn with it; the channel itself stays open.
            _say_bye(connection)
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"{self._name()}: no answer in {waits_s:.1f} s") from error
            if isinstance(error, OSError):
                raise WorkerError(f"{self._name()} is gone ({error})") from error
            raise
        with self._lock:
            self._idle.append(connection)
        _used_clients[self.channel] = self
        if answer == wire.FAILED:
            self._end_use()
            return answer, bytes(payload).decode()
        if answer == wire.ITEMS:
            return answer, device_items.unpack_all(wire.unpack_items(payload, descriptors))
        return answer, json.loads(bytes(payload)) if answer == wire.LATE else payload

    def leave(self) -> None:
        """Leave the channel in good order: what this process put in stays there when it ends."""
        device_items.move_to_host(self.channel)
        self._end_use()

    def _end_use(self) -> None:
        _used_clients.pop(self.channel, None)  # first: a thread that uses it meanwhile enters it again
        self.hang_up()

    def hang_up(self) -> None:
        """Give up the idle connections, in good order."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            _say_bye(connection)

    def _name(self) -> str:
        return f"the broker of channel {self.channel.rpartition('/')[0]!r}"

    def _take(self) -> socket.socket:
        if os.getpid() != self._pid:  # a fork: its parent's connections are not for it
            self._forget()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            with contextlib.ExitStack() as opened:  # closed again, unless the broker accepts
                connection = self._connect(opened)
                self._greet(connection)
                opened.pop_all()
        except OSError as error:
            raise WorkerError(f"{self._name()} is gone ({error})") from error
        return connection

    def _is_near(self) -> bool:
        if self._near is None:
            self._near = self.address.host is None or _is_heard(self.address.path)
        return self._near

    def _connect(self, opened: contextlib.ExitStack) -> socket.socket:
        address = self.address
        if address.host is not None and not self._is_near():
            there = address.host, address.port
            return opened.enter_context(socket.create_connection(there, timeout=_BROKER_GRACE_S))
        connection = opened.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(_BROKER_GRACE_S)
        connection.connect(address.path)
        return connection

    def _greet(self, connection: socket.socket) -> None:
        wire.prepare(connection)
        mine = secrets.token_bytes(wire.NONCE)
        connection.sendall(wire.proof(self.address.key, bytes(_read(connection, wire.NONCE)), b"client") + mine)
        if not hmac.compare_digest(bytes(_read(connection, wire.NONCE)), wire.proof(self.address.key, mine, b"broker")):
            raise ConnectionError("what answers is not the broker")
        hello = {"who": _who(), "channel": self.channel, "capacity": self._capacity}
        _send(connection, wire.HELLO, [json.dumps(hello).encode()])
        _receive(connection)


_clients: weakref.WeakValueDictionary[str, BrokerClient] = weakref.WeakValueDictionary()
_used_clients: dict[str, BrokerClient] = {}  # which stay when the channels that were sent here are gone
_clients_lock = threading.Lock()


def client_of(address: BrokerAddress, channel: str, capacity: int) -> BrokerClient:
    with _clients_lock:
        client = _clients.get(channel)
        if client is None:
            client = _clients[channel] = BrokerClient(address, channel, capacity)
        return client


def forget_clients(path: str) -> None:
    """Close this process's connections to the broker with this socket file, which has ended."""
    with _clients_lock:
        clients = {channel: client for channel, client in _clients.items() if client.address.path == path}
        for channel in clients:
            del _clients[channel]
            _used_clients.pop(channel, None)
    for client in clients.values():
        client.hang_up()


def _is_heard(path: str) -> bool:
    """Return whether a process of this machine listens on a socket file: on a shared disk another machine may."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_BROKER_GRACE_S)
        try:
            connection.connect(path)
        except OSError:
            return False
    return True


def _who() -> str:
    """Describe this process: the worker's group and rank, or the driver."""
    _, group, rank, *_ = [*os.environ.get(WORKER, "").split(":"), "", "", ""][:4]
    return f"{group}[{rank}] (pid {os.getpid()})" if group else f"driver (pid {os.getpid()})"


def _say_bye(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(1.0)
        _send(connection, wire.BYE, [])
    connection.close()


def _send(connection: socket.socket, kind: int, pieces: list[bytes], passed: Sequence[int] = ()) -> None:
    """Send a message; descriptors that are passed go with its first byte."""
    size = sum(map(len, pieces))
    pieces = [wire.HEAD.pack(kind, size), *pieces]
    if size < 1 << 18:
        pieces = [b"".join(pieces)]
    if passed:
        sent = socket.send_fds(connection, pieces[:1], passed)
        pieces[0] = pieces[0][sent:]
    for piece in pieces:
        connection.sendall(piece)


def _receive(connection: socket.socket) -> tuple[int, memoryview, deque[int]]:
    """Receive a message, before which nothing else is sent: kind, payload, and the descriptors that came with it."""
    descriptors = deque[int]()
    if connection.family == socket.AF_UNIX:
        first, passed = wire.receive_with(connection, _FIRST)
        descriptors += passed
    else:
        first = connection.recv(_FIRST)
    try:
        if not first:
            raise ConnectionError("the connection was closed")
        if len(first) < wire.HEAD.size:
            first += bytes(_read(connection, wire.HEAD.size - len(first)))
        kind, size = wire.HEAD.unpack_from(first)
        payload = memoryview(bytearray(first))[wire.HEAD.size :]  # writable, as torch wants it
        return kind, payload if len(payload) == size else _read(connection, size, payload), descriptors
    except BaseException:
        while descriptors:
            os.close(descriptors.popleft())
        raise


def _read(connection: socket.socket, size: int, begun: bytes | memoryview = b"") -> memoryview:
    """Receive so many bytes, of which the first are there already."""
    buffer = memoryview(bytearray(size))
    at = len(begun)
    buffer[:at] = begun
    while at < size:
        count = connection.recv_into(buffer[at:])
        if not count:
            raise ConnectionError("the connection was closed")
        at += count
    return buffer
