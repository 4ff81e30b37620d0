"""The broker of a node as its users see it: what starts it, and a client for each queue in each process."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotseat.errors import DeadlineError, WorkerError
from hotseat.processes.supervisor import WORKER
from hotseat.rlinf import device_items, wire

# The broker answers at the deadline. A client that hears nothing for this much longer takes the broker for stuck. Long,
# because a loaded machine may hold it up that much; one that died is noticed at once, by its sockets.
_BROKER_GRACE_S = 60.0
# Last among the places to import from: first would put all that is installed beside this package before Python's own.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from hotseat.rlinf.broker_process import main; main()"
_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class BrokerAddress:
    """How processes reach a broker: by its socket file, or on other machines by host and port; and the key for both."""

    path: str
    host: str | None
    port: int
    key: bytes = field(repr=False)


class Broker:
    """A broker process, started here: a `NodeService`. It ends when this process does, or at `close`.

    It listens on a socket file in `directory`, and on a port of `host` for processes on other machines; without `host`
    no port is open. Whoever connects has to prove that it knows the key, which travels inside the channels.
    """

    def __init__(
        self, directory: str, *, host: str | None = None, env: dict[str, str] | None = None, timeout_s: float = 30.0
    ):
        key = secrets.token_bytes(32)
        self._path = os.path.join(directory, f"channels-{secrets.token_hex(4)}")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, _ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            cwd="/",
            start_new_session=True,
        )
        # Through the pipe, because the arguments of a process are for everybody to read.
        task = {"path": self._path, "host": host, "key": key.hex()}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        port = self._process.stdout.readline()
        timer.cancel()
        if not port:
            self.close()
            raise DeadlineError(f"the channel broker did not start in {timeout_s:.0f} s in {directory}")
        self.address = BrokerAddress(self._path, host, int(port), key)
        self.pid = self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60.0)
        self._process.stdout.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        forget_clients(self._path)

    @staticmethod
    def disconnect(address: BrokerAddress) -> None:
        """Close this process's connections to a broker that has ended."""
        forget_clients(address.path)


class BrokerClient:
    """The client of a broker. Each thread that waits has a connection to itself; idle ones are kept for the next.

    There is one for each channel in a process, however often the channel is sent there. Once it is used, it lasts as
    long as the process, the stream or the broker, or until `leave`: a worker that returns from one call and continues
    in the next has not left.
    """

    def __init__(self, address: BrokerAddress, channel: str, capacity: int, num_producers: int):
        self._address = address
        self._hello: dict[str, Any] = {"channel": channel, "capacity": capacity, "num_producers": num_producers}
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._client = secrets.token_hex(8)
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """The broker's socket file."""
        return self._address.path

    def __reduce__(self) -> Any:
        hello = self._hello
        return client_of, (self._address, hello["channel"], hello["capacity"], hello["num_producers"])

    def put(self, items: list[Any], timeout_s: float, weight: float) -> tuple[int, Any]:
        packed: list[Any] = []
        try:
            # As many descriptors as a message passes, where the broker is on this machine.
            max_passed = wire.MAX_PASSED if hasattr(os, "memfd_create") and self._is_near() else 0
            device_items.pack_all(items, packed, self._hello["channel"], _who(), max_passed)
            pieces = [wire.ASK_PUT.pack(timeout_s, weight), *wire.pack_items(packed)]
            return self._ask(wire.PUT, pieces, timeout_s, wire.passed_with(packed))
        finally:
            packed.clear()  # or an error would keep this frame, and with it descriptors

    def get(self, most: int, at_least: int, timeout_s: float, weight: float = 0.0) -> tuple[int, Any]:
        return self._ask(
            wire.GET, [wire.ASK_GET.pack(timeout_s, min(most, wire.MAX_COUNT), at_least, weight)], timeout_s
        )

    def record(self, name: str, value: Any, replaces: bool) -> Any:
        packed: list[Any] = []
        device_items.pack_all([value], packed, self._hello["channel"], _who(), 0)
        pieces = [wire.ASK_RECORD.pack(replaces, len(name.encode())), name.encode(), *packed]
        kind, values = self._ask(wire.RECORD, pieces, 0.0)
        return values[0] if kind == wire.ITEMS else value

    def look_up(self, name: str, timeout_s: float) -> tuple[int, Any]:
        return self._ask(wire.LOOK_UP, [wire.ASK_LOOK_UP.pack(timeout_s), name.encode()], timeout_s)

    def close(self) -> None:
        self._ask(wire.CLOSE, [], 0.0)
        self.hang_up()

    def fail(self, reason: str) -> None:
        self._ask(wire.FAIL, [reason.encode()], 0.0)

    def facts(self) -> dict[str, Any]:
        return json.loads(bytes(self._ask(wire.SIZE, [], 0.0)[1]))

    def _ask(self, kind: int, pieces: list[bytes], timeout_s: float, passed: Sequence[int] = ()) -> tuple[int, Any]:
        connection = self._take()
        try:
            connection.settimeout(timeout_s + _BROKER_GRACE_S)
            _send(connection, kind, pieces, passed)
            answer, payload, descriptors = _receive(connection)
        except BaseException as error:
            # Requests on this connection are withdrawn with it; the channel itself stays open.
            with contextlib.suppress(OSError):
                connection.settimeout(1.0)
                _send(connection, wire.BYE, [])
            connection.close()
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"{self._name()}: no answer in {timeout_s + _BROKER_GRACE_S:.1f} s") from error
            if isinstance(error, OSError):
                raise WorkerError(f"{self._name()} is gone ({error})") from error
            raise
        with self._lock:
            self._idle.append(connection)
        _used_clients[self._hello["channel"]] = self
        if answer in (wire.CLOSED, wire.FAILED):
            self._end_use()
        if answer == wire.ITEMS:
            return answer, device_items.unpack_all(wire.unpack_items(payload, descriptors))
        if answer == wire.FAILED:
            return answer, bytes(payload).decode()
        if answer == wire.LATE:
            return answer, json.loads(bytes(payload))
        return answer, payload

    def leave(self) -> None:
        """Leave the channel in good order: what this process put in stays there when it ends."""
        device_items.move_to_host(self._hello["channel"])
        self._end_use()

    def _end_use(self) -> None:
        _used_clients.pop(self._hello["channel"], None)  # first: a thread that uses it meanwhile enters it again
        self.hang_up()

    def hang_up(self) -> None:
        """Give up the idle connections, in good order."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            with contextlib.suppress(OSError):
                _send(connection, wire.BYE, [])
            connection.close()

    def _name(self) -> str:
        return f"the broker of channel {self._hello['channel'].rpartition('/')[0]!r}"

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
        return self._address.host is None or os.path.exists(self._address.path)

    def _connect(self, opened: contextlib.ExitStack) -> socket.socket:
        address = self._address
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
        connection.sendall(wire.proof(self._address.key, bytes(_read(connection, wire.NONCE)), b"client") + mine)
        if not hmac.compare_digest(
            bytes(_read(connection, wire.NONCE)), wire.proof(self._address.key, mine, b"broker")
        ):
            raise ConnectionError("what answers is not the broker")
        _send(connection, wire.HELLO, [json.dumps({**self._hello, "client": self._client, "who": _who()}).encode()])
        _receive(connection)


_clients: weakref.WeakValueDictionary[str, BrokerClient] = weakref.WeakValueDictionary()
_used_clients: dict[str, BrokerClient] = {}  # which stay when the channels that were sent here are gone
_clients_lock = threading.Lock()


def client_of(address: BrokerAddress, channel: str, capacity: int, num_producers: int) -> BrokerClient:
    with _clients_lock:
        client = _clients.get(channel)
        if client is None:
            client = _clients[channel] = BrokerClient(address, channel, capacity, num_producers)
        return client


def forget_clients(path: str) -> None:
    """Close this process's connections to the broker with this socket file, which has ended."""
    with _clients_lock:
        clients = {channel: client for channel, client in _clients.items() if client.path == path}
        for channel in clients:
            del _clients[channel]
            _used_clients.pop(channel, None)
    for client in clients.values():
        client.hang_up()


def _who() -> str:
    """Describe this process: the worker's group and rank, or the driver."""
    _, group, rank, *_ = [*os.environ.get(WORKER, "").split(":"), "", "", ""][:4]
    return f"{group}[{rank}] (pid {os.getpid()})" if group else f"driver (pid {os.getpid()})"


def _send(connection: socket.socket, kind: int, pieces: list[bytes], passed: Sequence[int] = ()) -> None:
    """Send a message; descriptors that are passed go with its first byte."""
    size = sum(map(len, pieces))
    pieces = [wire.HEAD.pack(kind, size), *pieces]
    if passed:
        sent = socket.send_fds(connection, pieces[:1], passed)
        pieces[0] = pieces[0][sent:]
    if size < 1 << 18:
        connection.sendall(b"".join(pieces))
    else:
        for piece in pieces:
            connection.sendall(piece)


def _receive(connection: socket.socket) -> tuple[int, memoryview, deque[int]]:
    """Receive a message: its kind, its payload, and the descriptors that came with its first byte."""
    head, descriptors = b"", deque[int]()
    if connection.family == socket.AF_UNIX:
        head, passed = wire.receive_with(connection, wire.HEAD.size)
        descriptors += passed
        if not head:
            raise ConnectionError("the connection was closed")
    try:
        kind, size = wire.HEAD.unpack(head + bytes(_read(connection, wire.HEAD.size - len(head))))
        return kind, _read(connection, size), descriptors
    except BaseException:
        while descriptors:
            os.close(descriptors.popleft())
        raise


def _read(connection: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    at = 0
    while at < size:
        count = connection.recv_into(buffer[at:])
        if not count:
            raise ConnectionError("the connection was closed")
        at += count
    return buffer
