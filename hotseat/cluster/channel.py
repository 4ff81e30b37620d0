"""Channels: bounded, typed queues that close and carry failures, between processes and within one.

`put` waits while the channel is full, so a fast producer is held back by a slow consumer. `close` ends the stream:
what was put before is still delivered, then every `get` raises `ChannelClosed`. `fail` wakes every waiter at once
with the reason, and so does the death of a process that used the channel, unless it was a producer that had closed
it. Every wait has a deadline.

Between processes an item crosses two sockets, by way of a broker (`_broker.py`). Sockets, not actor calls: one closes
when the process at its other end is killed, which is how the others learn of it, and it is several times as fast. Of a
large item on one machine only a descriptor crosses them: the producer writes its bytes to memory without a name, which
the consumer maps, and which the system frees with the last process that has it. CUDA tensors inside items stay on their
device (`device_items/`).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from hotseat.cluster import _broker as wire
from hotseat.cluster import device_items
from hotseat.errors import DeadlineError, RunError, WorkerError
from hotseat.processes.supervisor import WORKER

__all__ = ["Broker", "Channel", "ChannelClosed", "ChannelDirectory", "forget_clients"]

Item = TypeVar("Item")

Address = tuple[str, str | None, int]  # socket file, host or None, port

# The broker answers at the deadline. A client that hears nothing for this much longer takes the broker for stuck. Long,
# because a loaded machine may hold it up that much; one that died is noticed at once, by its sockets.
_BROKER_GRACE_S = 60.0


class ChannelClosed(RunError):
    """The stream ended: its producers closed it and everything put before has been taken."""


class Channel(Generic[Item]):
    """A queue of at most `capacity` items of `item_type`. `Cluster.channel` makes it.

    Pass it to the workers that use it as an argument. Any number of them may put and get; they are served in the order
    in which they ask. `num_producers` of them have to close it to end the stream.
    """

    def __init__(
        self,
        name: str,
        item_type: type[Item] | tuple[type, ...],
        capacity: int,
        *,
        num_producers: int = 1,
        timeout_s: float = 600.0,
        broker: tuple[Address, bytes] | None = None,
        token: str | None = None,
    ):
        """Make a channel of its own; with a token, that of the same name and token in any process."""
        if capacity < 1 or num_producers < 1:
            raise ValueError(
                f"channel {name!r}: capacity {capacity} and num_producers {num_producers} must be at least 1"
            )
        self.name = name
        self.item_type = item_type
        self.capacity = capacity
        self.num_producers = num_producers
        self.timeout_s = timeout_s
        if broker is None:
            self._link: _LocalQueue | _BrokerClient = _LocalQueue(capacity, num_producers)
        else:
            self._link = _client_of(*broker, f"{name}/{token or secrets.token_hex(8)}", capacity, num_producers)

    def put(self, item: Item, *, weight: float = 0.0, timeout_s: float | None = None) -> None:
        """Wait for room, then put the item in. Its weight counts in `get_weight`."""
        self.put_many([item], weight=weight, timeout_s=timeout_s)

    def put_many(self, items: Sequence[Item], *, weight: float = 0.0, timeout_s: float | None = None) -> None:
        """Put items in together, in one message: all or, if the deadline passes first, none. Each has the weight."""
        for item in items:
            if not isinstance(item, self.item_type):
                raise TypeError(
                    f"channel {self.name!r} takes {_type_names(self.item_type)}, not {_type_names(type(item))}"
                )
        if len(items) > self.capacity:
            raise ValueError(f"channel {self.name!r} has room for {self.capacity} items, not for {len(items)} at once")
        waits = self._deadline(timeout_s)
        kind, payload = self._link.put(list(items), waits, weight)
        if kind != wire.DONE:
            raise self._error(kind, payload, f"to put {len(items)} items", waits)

    def get(self, *, timeout_s: float | None = None) -> Item:
        """Wait for an item and take it out."""
        return self.get_many(1, timeout_s=timeout_s)[0]

    def get_many(self, most: int, *, at_least: int = 1, timeout_s: float | None = None) -> list[Item]:
        """Wait for `at_least` items, or the end of the stream, and take up to `most`; at the deadline take none."""
        if not 1 <= at_least <= min(most, self.capacity):
            raise ValueError(
                f"channel {self.name!r} holds {self.capacity} items: cannot wait for {at_least} to take {most}"
            )
        waits = self._deadline(timeout_s)
        kind, payload = self._link.get(most, at_least, waits)
        if kind != wire.ITEMS:
            raise self._error(kind, payload, f"for {at_least} items", waits)
        return payload

    def get_weight(self, weight: float, *, timeout_s: float | None = None) -> list[Item]:
        """Take items until they weigh that much together, or until the next one would exceed it.

        An item that is too heavy by itself is taken alone. At the end of the stream, what is left is taken.
        """
        if not weight > 0:
            raise ValueError(f"channel {self.name!r}: a batch of weight {weight}; it must be above 0")
        waits = self._deadline(timeout_s)
        kind, payload = self._link.get(self.capacity, 1, waits, weight)
        if kind != wire.ITEMS:
            raise self._error(kind, payload, f"for items of weight {weight}", waits)
        return payload

    def __iter__(self) -> Iterator[Item]:
        """Yield items until the stream ends, each waited for at most `timeout_s` of the channel."""
        with contextlib.suppress(ChannelClosed):
            while True:
                yield self.get()

    def close(self) -> None:
        """Declare that this producer puts nothing more. When `num_producers` have said so, the stream ends."""
        self._link.close()

    def leave(self) -> None:
        """Stop using the channel in this process, so that the end of the process is no failure of the channel.

        What this process put in stays there. It may use the channel again.
        """
        self._link.leave()

    def fail(self, error: BaseException | str) -> None:
        """End the stream for everybody, now, with this reason. What was not taken is dropped."""
        if isinstance(error, BaseException):
            error = "".join(traceback.format_exception(error)).rstrip()
        self._link.fail(error)

    def size(self) -> int:
        """Return how many items wait to be taken."""
        return self._link.facts()["size"]

    def _deadline(self, timeout_s: float | None) -> float:
        waits = self.timeout_s if timeout_s is None else timeout_s
        if not (waits >= 0 and math.isfinite(waits)):
            raise ValueError(f"channel {self.name!r}: timeout_s is {waits}; every wait has a deadline, in seconds")
        return waits

    def _error(self, kind: int, payload: Any, purpose: str, waited_s: float) -> Exception:
        if kind == wire.CLOSED:
            return ChannelClosed(f"channel {self.name!r} is closed")
        if kind == wire.FAILED:
            return WorkerError(f"channel {self.name!r} failed: {payload}")
        ends = "".join(
            f"; {role} {', '.join(payload[role])}" for role in ("producers", "consumers") if payload.get(role)
        )
        return DeadlineError(
            f"channel {self.name!r}: waited {waited_s:.1f} s {purpose}; it has {payload['size']} of {self.capacity}"
            f"{ends}"
        )


class ChannelDirectory:
    """Opens channels by name: in all processes of a cluster, one name is one channel. `Cluster.channels` makes it.

    It can be sent to workers. Whoever opens a name first decides its capacity. It also has records, which are values by
    name; the end of a process that wrote or read one, at whatever point, has no effect on it.
    """

    def __init__(self, broker: tuple[Address, bytes] | None, timeout_s: float):
        self.timeout_s = timeout_s
        self._broker = broker
        self.token = secrets.token_hex(8)
        self._local: _LocalChannels | None = _LocalChannels() if broker is None else None

    def open(self, name: str, capacity: int) -> Channel[Any]:
        """Return the channel of this name."""
        if self._local is not None:
            return self._local.open(name, capacity, self.timeout_s)
        return Channel(name, object, capacity, timeout_s=self.timeout_s, broker=self._broker, token=self.token)

    def forget(self, channel: Channel[Any]) -> None:
        """Free what this directory itself keeps of a channel, unless something is in it.

        Nobody may use the object any more then; the same name opens another.
        """
        if self._local is not None:
            self._local.forget(channel)

    def record(self, name: str, value: Any, *, replaces: bool = True) -> Any:
        """Have all processes find a value by this name, and return it.

        replaces: in place of one that is there. Otherwise that one stays and is returned.
        """
        return self._records().record(name, value, replaces)

    def look_up(self, name: str, *, timeout_s: float | None = None) -> Any:
        """Return the value that was recorded by this name, or will be soon."""
        waits = self.timeout_s if timeout_s is None else timeout_s
        kind, values = self._records().look_up(name, waits)
        if kind != wire.ITEMS:
            raise DeadlineError(f"waited {waits:.1f} s for {name!r}, which nobody has recorded")
        return values[0]

    def _records(self) -> _LocalChannels | _BrokerClient:
        if self._local is not None:
            return self._local
        assert self._broker is not None
        return _client_of(*self._broker, f"records/{self.token}", 1, 1)


class _LocalChannels:
    """The channels of a directory in this process."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel[Any]] = {}
        self._records: defaultdict[str, wire.Record] = defaultdict(wire.Record)
        self._lock = threading.Lock()

    def open(self, name: str, capacity: int, timeout_s: float) -> Channel[Any]:
        with self._lock:
            if name not in self._channels:
                self._channels[name] = Channel(name, object, capacity, timeout_s=timeout_s)
            return self._channels[name]

    def forget(self, channel: Channel[Any]) -> None:
        with self._lock:
            if isinstance(channel._link, _LocalQueue) and channel._link.is_as_new():
                del self._channels[channel.name]

    def record(self, name: str, value: Any, replaces: bool) -> Any:
        with self._lock:
            record = self._records[name]
            record.write(value, replaces=replaces)
            return record.value

    def look_up(self, name: str, timeout_s: float) -> tuple[int, Any]:
        with self._lock:
            record = self._records[name]
        return _answered(self._lock, record, record.read, timeout_s) or (wire.LATE, None)

    def __len__(self) -> int:
        return len(self._channels)


def _type_names(types: type | tuple[type, ...]) -> str:
    return " or ".join(kind.__qualname__ for kind in (types if isinstance(types, tuple) else (types,)))


# --- within a process -------------------------------------------------------------------------------------------------


def _answered(
    lock: threading.Lock, source: wire.BoundedQueue | wire.Record, ask: Callable[[Any], wire.Waiter], timeout_s: float
) -> tuple[int, Any] | None:
    """Ask with the lock held, and wait for the answer without it; None: the request was withdrawn at the deadline."""
    is_answered, answers = threading.Event(), []

    def answer(kind: int, payload: Any) -> None:
        answers.append((kind, payload))
        is_answered.set()

    with lock:
        waiter = ask(answer)
    if not is_answered.wait(timeout_s):
        with lock:
            if source.cancel(waiter):
                return None
    return answers[0]


class _LocalQueue:
    """The queue, with a lock around it."""

    def __init__(self, capacity: int, num_producers: int):
        self._queue = wire.BoundedQueue(capacity, num_producers)
        self._lock = threading.Lock()

    def put(self, items: list[Any], timeout_s: float, weight: float) -> tuple[int, Any]:
        return self._ask(lambda answer: self._queue.put(items, answer, weight), timeout_s)

    def get(self, most: int, at_least: int, timeout_s: float, weight: float = 0.0) -> tuple[int, Any]:
        return self._ask(lambda answer: self._queue.get(most, at_least, answer, weight), timeout_s)

    def leave(self) -> None:
        """Do nothing: a queue of this process ends with it."""

    def close(self) -> None:
        with self._lock:
            self._queue.close()

    def fail(self, reason: str) -> None:
        with self._lock:
            self._queue.fail(reason)

    def facts(self) -> dict[str, Any]:
        with self._lock:
            return {"size": len(self._queue.items)}

    def is_as_new(self) -> bool:
        with self._lock:
            return self._queue.is_as_new

    def _ask(self, ask: Any, timeout_s: float) -> tuple[int, Any]:
        return _answered(self._lock, self._queue, ask, timeout_s) or (wire.LATE, self.facts())

    def __reduce__(self) -> Any:
        raise TypeError(
            "a channel of the local runtime stays in its process; make it with a cluster on Ray to send it to another"
        )


# --- between processes ------------------------------------------------------------------------------------------------


class Broker:
    """A broker process, started here. It ends when this process does, or at `close`.

    It listens on a socket file in `directory`, and on a port of `host` for processes on other machines; without `host`
    no port is open. Whoever connects has to prove that it knows the key, which travels inside the channels.
    """

    def __init__(
        self, directory: str, *, host: str | None = None, env: dict[str, str] | None = None, timeout_s: float = 30.0
    ):
        self.key = secrets.token_bytes(32)
        self._path = os.path.join(directory, f"channels-{secrets.token_hex(4)}")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(wire.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            cwd="/",
            start_new_session=True,
        )
        # Through the pipe, because the arguments of a process are for everybody to read.
        task = {"path": self._path, "host": host, "key": self.key.hex()}
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
        self.address: Address = (self._path, host, int(port))
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


class _BrokerClient:
    """The client of a broker. Each thread that waits has a connection to itself; idle ones are kept for the next.

    There is one for each channel in a process, however often the channel is sent there. Once it is used, it lasts as
    long as the process, the stream or the broker, or until `leave`: a worker that returns from one call and continues
    in the next has not left.
    """

    def __init__(self, address: Address, key: bytes, channel: str, capacity: int, num_producers: int):
        self._address = address
        self._key = key
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
        return self._address[0]

    def __reduce__(self) -> Any:
        hello = self._hello
        return _client_of, (self._address, self._key, hello["channel"], hello["capacity"], hello["num_producers"])

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
        """Tell whether the broker is on this machine."""
        path, host, _ = self._address
        return host is None or os.path.exists(path)

    def _connect(self, opened: contextlib.ExitStack) -> socket.socket:
        path, host, port = self._address
        if host is not None and not self._is_near():
            return opened.enter_context(socket.create_connection((host, port), timeout=_BROKER_GRACE_S))
        connection = opened.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(_BROKER_GRACE_S)
        connection.connect(path)
        return connection

    def _greet(self, connection: socket.socket) -> None:
        wire.prepare(connection)
        mine = secrets.token_bytes(wire.NONCE)
        connection.sendall(wire.proof(self._key, bytes(_read(connection, wire.NONCE)), b"client") + mine)
        if not hmac.compare_digest(bytes(_read(connection, wire.NONCE)), wire.proof(self._key, mine, b"broker")):
            raise ConnectionError("what answers is not the broker")
        _send(connection, wire.HELLO, [json.dumps({**self._hello, "client": self._client, "who": _who()}).encode()])
        _receive(connection)


_clients: weakref.WeakValueDictionary[str, _BrokerClient] = weakref.WeakValueDictionary()
_used_clients: dict[str, _BrokerClient] = {}  # which stay when the channels that were sent here are gone
_clients_lock = threading.Lock()


def _client_of(address: Address, key: bytes, channel: str, capacity: int, num_producers: int) -> _BrokerClient:
    with _clients_lock:
        client = _clients.get(channel)
        if client is None:
            client = _clients[channel] = _BrokerClient(address, key, channel, capacity, num_producers)
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
