"""The state of a bounded queue, and the process that serves queues to other processes.

`BoundedQueue` is a pure state machine: no threads, no sockets, no clock. A request is answered by calling what was
passed with it, at once or later. In one process, `queues.py` puts a lock around it. Run as a program, this file is
the broker: it serves any number of queues over sockets, knows items as bytes only, and fails a queue when a process
that used it goes away without saying so. It needs only the standard library and starts in a few hundredths of a
second.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import heapq
import hmac
import json
import math
import os
import resource
import secrets
import selectors
import socket
import stat
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

# --- what is said between a client and the broker: KIND, LENGTH, PAYLOAD ----------------------------------------------

HEAD = struct.Struct("!BQ")
COUNT = struct.Struct("!I")
LENGTH = struct.Struct("!Q")
ASK_PUT = struct.Struct("!dd")  # timeout, weight of each item; then the items
ASK_GET = struct.Struct("!dIId")  # timeout, most, at least, weight of the batch (0: it has no limit)
ASK_RECORD = struct.Struct("!?I")  # whether it replaces one that is there, length of the name; then name and value
ASK_LOOK_UP = struct.Struct("!d")  # timeout; then the name

MAX_COUNT = (1 << 32) - 1
IN_MEMORY = 1 << 63  # added to the length of an item whose bytes are not in the message, but in memory that it passes
KEPT = 1 << 62  # added to the length of an item with a token, which the message passes
MAX_PASSED = 64  # descriptors in one message; the system takes 253

HELLO, PUT, GET, CLOSE, FAIL, SIZE, BYE, RECORD, LOOK_UP = range(1, 10)  # asked
DONE, ITEMS, CLOSED, FAILED, LATE = range(32, 37)  # answered

NONCE = 32
_MAX_HELLO = 1 << 16
_MAX_WITHDRAWN = 1000  # timers that are kept in any case


def proof(key: bytes, nonce: bytes, side: bytes) -> bytes:
    """Compute the proof that this side knows the key, which itself is not sent."""
    return hmac.digest(key, side + nonce, hashlib.sha256)


class Memory:
    """An item in memory of its own, without a name, which processes of this machine pass to each other.

    The system frees it when the last process that has its descriptor closes it, or ends.
    """

    def __init__(self, descriptor: int, size: int):
        self.descriptor = descriptor
        self.size = size

    @classmethod
    def empty(cls, size: int) -> Memory:
        """Make new memory."""
        memory = cls(os.memfd_create("hotseat-item"), size)
        os.ftruncate(memory.descriptor, size)
        return memory

    @classmethod
    def of(cls, data: bytes) -> Memory:
        """Write an item to new memory."""
        memory = cls(os.memfd_create("hotseat-item"), len(data))
        view = memoryview(data)
        while view:
            view = view[os.write(memory.descriptor, view) :]
        return memory

    def read(self) -> bytes:
        """Copy the item out of its memory."""
        pieces, at = [], 0
        while at < self.size:
            pieces.append(os.pread(self.descriptor, self.size - at, at))
            if not pieces[-1]:
                raise OSError(errno.ENODATA, f"memory of {self.size} bytes ends after {at}")
            at += len(pieces[-1])
        return b"".join(pieces)

    def __del__(self) -> None:
        os.close(self.descriptor)


Packed = bytes | memoryview | Memory


class Kept:
    """An item whose tensors are in device memory, which its producer keeps as long as any process has the token.

    The token is a descriptor of a socket. Asked through it by any byte, the producer answers with memory that has the
    tensors' bytes; its end of the socket is closed when it ends.
    """

    def __init__(self, data: Packed, token: int):
        self.data = data
        self.token = token

    def detach_token(self) -> int:
        """Return the token, which the caller now has to close."""
        token, self.token = self.token, -1
        return token

    def __del__(self) -> None:
        if self.token >= 0:
            os.close(self.token)


PASSED = (Memory, Kept)  # what has descriptors


def pack_items(items: list[Any]) -> list[bytes]:
    """Return the pieces of a payload: the number of items, then each item after its length.

    Of an item in `Memory` the payload has the length alone.
    """
    pieces: list[Any] = [COUNT.pack(len(items))]
    for item in items:
        if not isinstance(item, PASSED):
            pieces += (LENGTH.pack(len(item)), item)
            continue
        flags, data = (KEPT, item.data) if isinstance(item, Kept) else (0, item)
        if isinstance(data, Memory):
            pieces.append(LENGTH.pack(data.size | IN_MEMORY | flags))
        else:
            pieces += (LENGTH.pack(len(data) | flags), data)
    return pieces


def unpack_items(payload: memoryview, passed: deque[int]) -> list[Packed | Kept]:
    """Return the items of a payload. passed: descriptors that came with it, of which it takes its own.

    Raises `ValueError`, `IndexError` or `struct.error` if they do not make up the payload.
    """
    (count,) = COUNT.unpack_from(payload)
    items: list[Packed | Kept] = []
    at = COUNT.size
    for _ in range(count):
        (length,) = LENGTH.unpack_from(payload, at)
        at += LENGTH.size
        if length < KEPT:
            items.append(payload[at : at + length])
            at += length
            continue
        size = length & ~(IN_MEMORY | KEPT)
        data: Packed
        if length & IN_MEMORY:
            data = Memory(passed.popleft(), size)
        else:
            data = payload[at : at + size]
            at += size
        items.append(Kept(data, passed.popleft()) if length & KEPT else data)
    if at != len(payload):
        raise ValueError(f"{len(payload)} bytes with items of {at}")
    return items


def check_passed(items: list[Any]) -> None:
    """Raise `ValueError` for descriptors that are no memory of the stated size, or no token."""
    for item in items:
        data = item.data if isinstance(item, Kept) else item
        if isinstance(data, Memory):
            facts = os.fstat(data.descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size < data.size:
                raise ValueError(f"no memory of {data.size} bytes")
        if isinstance(item, Kept) and not stat.S_ISSOCK(os.fstat(item.token).st_mode):
            raise ValueError("a token that is no socket")


def receive_with(connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive at most `size` bytes, and the descriptors that come with them."""
    # Programs that this process starts are not to have them.
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, descriptors, flags, _ = socket.recv_fds(connection, size, MAX_PASSED, flags)
    if flags & socket.MSG_CTRUNC:  # the system has dropped the others
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, "this process has too many open files to take the memory that was passed")
    return data, descriptors


def passed_with(items: list[Any]) -> list[int]:
    """Return the descriptors to be passed with these items."""
    descriptors = []
    for item in items:
        data = item.data if isinstance(item, Kept) else item
        if isinstance(data, Memory):
            descriptors.append(data.descriptor)
        if isinstance(item, Kept):
            descriptors.append(item.token)
    return descriptors


# --- the queue --------------------------------------------------------------------------------------------------------


class Waiter:
    """A request that has not been answered yet."""

    __slots__ = ("answer", "at_least", "batch", "most", "weight")

    def __init__(
        self, answer: Callable[[int, Any], None], batch: list[Any], most: int, at_least: int, weight: float = 0.0
    ):
        self.answer = answer
        self.batch = batch
        self.most = most
        self.at_least = at_least
        self.weight = weight  # of each item that is put; of the whole batch that is taken


class BoundedQueue:
    """Queue of at most `capacity` items; puts and gets are served in the order in which they came.

    A batch goes in whole or not at all. Answers: (DONE, None), (ITEMS, list), (CLOSED, None), (FAILED, reason).
    """

    def __init__(self, capacity: int, num_producers: int = 1):
        self.capacity = capacity
        self.items: deque[Any] = deque()
        self._weights: deque[float] = deque()  # one per item
        self.reason: str | None = None  # why it failed
        self._num_producers = self._producers_left = num_producers
        self._putters: deque[Waiter] = deque()
        self._getters: deque[Waiter] = deque()

    @property
    def is_closed(self) -> bool:
        return self._producers_left <= 0

    @property
    def is_as_new(self) -> bool:
        """Tell whether it is as it was made, so that a new one can take its place."""
        is_idle = not (self.items or self._putters or self._getters)
        return is_idle and self.reason is None and self._producers_left == self._num_producers

    def put(self, batch: list[Any], answer: Callable[[int, Any], None], weight: float = 0.0) -> Waiter:
        waiter = Waiter(answer, batch, 0, 0, weight)
        self._putters.append(waiter)
        self._settle()
        return waiter

    def get(self, most: int, at_least: int, answer: Callable[[int, Any], None], weight: float = 0.0) -> Waiter:
        """Ask for items. With a weight, wait until that much is there, and take no item that would exceed it."""
        waiter = Waiter(answer, [], most, at_least, weight)
        self._getters.append(waiter)
        self._settle()
        return waiter

    def cancel(self, waiter: Waiter) -> bool:
        """Withdraw a request; False if it has been answered."""
        for queue in (self._putters, self._getters):
            if waiter in queue:
                queue.remove(waiter)
                self._settle()  # it may have stood in front of one that can be served
                return True
        return False

    def close(self) -> None:
        """Record that a producer is done. The last one ends the stream."""
        self._producers_left -= 1
        self._settle()

    def fail(self, reason: str) -> None:
        """Wake everybody with the reason. The first reason stays; a stream that ended well and was read cannot fail."""
        if self.reason is None and not (self.is_closed and not self.items):
            self.reason = reason
            self.items.clear()
            self._weights.clear()
            self._settle()

    def _settle(self) -> None:
        if self.reason is not None:
            self._wake(self._putters, FAILED, self.reason)
            self._wake(self._getters, FAILED, self.reason)
            return
        if self.is_closed:
            self._wake(self._putters, CLOSED, None)
        moved = True
        while moved:
            moved = self._serve_getter() or self._serve_putter()

    def _serve_getter(self) -> bool:
        if not self._getters:
            return False
        getter = self._getters[0]
        if self.is_closed and not self.items:
            self._wake(self._getters, CLOSED, None)
            return False
        num_taken = self._num_by_weight(getter.weight) if getter.weight > 0 else self._num_by_count(getter)
        if num_taken == 0:
            return False
        self._getters.popleft()
        for _ in range(num_taken):
            self._weights.popleft()
        getter.answer(ITEMS, [self.items.popleft() for _ in range(num_taken)])
        return True

    def _num_by_count(self, getter: Waiter) -> int:
        """Return how many items the getter can take now; 0: it waits for more."""
        if len(self.items) < getter.at_least and not self.is_closed:
            return 0
        return min(getter.most, len(self.items))

    def _num_by_weight(self, limit: float) -> int:
        """Return how many items weigh `limit`, or less if the next would exceed it; 0: wait. One may be too heavy."""
        total = 0.0
        for number, weight in enumerate(self._weights):
            if number and total + weight > limit:
                return number
            total += weight
            if total >= limit:
                return number + 1
        return len(self.items) if self.is_closed else 0

    def _serve_putter(self) -> bool:
        if not self._putters:
            return False
        putter = self._putters[0]
        # A getter waits here only if it wants more than there is; its answer takes what is above the capacity.
        # Otherwise a batch that does not fit and a getter that wants more would wait for each other.
        if len(self.items) + len(putter.batch) > self.capacity and not self._getters:
            return False
        self._putters.popleft()
        self.items.extend(putter.batch)
        self._weights.extend([putter.weight] * len(putter.batch))
        putter.answer(DONE, None)
        return True

    @staticmethod
    def _wake(waiters: deque[Waiter], kind: int, payload: Any) -> None:
        while waiters:
            waiters.popleft().answer(kind, payload)


class Record:
    """A value that stays, for any number of processes to read; who asks before it is there waits.

    The end of a process that wrote or read it has no effect. Answers: (ITEMS, [value]).
    """

    def __init__(self) -> None:
        self.value: Any = None
        self._waiters: list[Waiter] = []

    def write(self, value: Any, *, replaces: bool) -> bool:
        """Set the value; unless it replaces one, only if there is none. Tell whether it was set."""
        if self.value is not None and not replaces:
            return False
        self.value = value
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.answer(ITEMS, [value])
        return True

    def read(self, answer: Callable[[int, Any], None]) -> Waiter:
        waiter = Waiter(answer, [], 1, 1)
        if self.value is None:
            self._waiters.append(waiter)
        else:
            answer(ITEMS, [self.value])
        return waiter

    def cancel(self, waiter: Waiter) -> bool:
        """Withdraw a request; False if it has been answered."""
        if waiter not in self._waiters:
            return False
        self._waiters.remove(waiter)
        return True


# --- the broker -------------------------------------------------------------------------------------------------------


class Timer:
    """A call that is to be made later; None: it was withdrawn."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]):
        self.call: Callable[[], None] | None = call

    def run(self) -> None:
        """Make the call, and forget it with all that it refers to."""
        call, self.call = self.call, None
        if call is not None:
            call()


class _Served:
    """A queue, records beside it, and the connections to both."""

    def __init__(self, name: str, queue: BoundedQueue):
        self.name = name
        self.queue = queue
        self.records: defaultdict[str, Record] = defaultdict(Record)
        self.connections: set[_ClientConnection] = set()
        self.done: set[str] = set()  # clients that closed: they are allowed to go

    def facts(self) -> bytes:
        return json.dumps(
            {
                "size": len(self.queue.items),
                "producers": sorted({c.who for c in self.connections if c.is_producer and c.client not in self.done}),
                "consumers": sorted({c.who for c in self.connections if c.is_consumer}),
            }
        ).encode()


class _ClientConnection:
    """One client connection: proof, greeting, then one request at a time."""

    def __init__(self, server: BrokerServer, connection: socket.socket):
        self.socket = connection
        self._server = server
        nonce = secrets.token_bytes(NONCE)
        self._unproven: bytes | None = nonce  # what the client has to answer; None once it has proved itself
        self._received = bytearray()
        self._passed: deque[int] = deque()  # descriptors that came, and belong to no item yet
        self._unsent = bytearray()
        self._to_pass: list[Memory | Kept] = []  # goes with the first byte that is sent next
        self._served: _Served | None = None
        self.client = self.who = ""  # one process, and what it is called
        self.is_producer = self.is_consumer = False
        self._waiter: Waiter | None = None
        self._waits_for: BoundedQueue | Record | None = None
        self._timer: Timer | None = None  # of the waiter
        self._said_bye = False
        self._write(nonce)
        # A client that connects and never proves itself is dropped.
        self._greeting_timer = server.later(10.0, self.end)

    @property
    def is_writing(self) -> bool:
        """Tell whether there is more to send than the socket takes."""
        return bool(self._unsent)

    def on_readable(self) -> None:
        try:
            data = self._receive()
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end()
            return
        self._received += data
        if self._unproven is not None and not self._check_proof(self._unproven):
            return
        while len(self._received) >= HEAD.size:
            kind, length = HEAD.unpack_from(self._received)
            if self._served is None and (kind != HELLO or length > _MAX_HELLO):
                self.end()
                return
            if len(self._received) < HEAD.size + length:
                return
            payload = bytes(memoryview(self._received)[HEAD.size : HEAD.size + length])
            del self._received[: HEAD.size + length]
            self._handle(kind, payload)
            if self.socket.fileno() < 0:  # it has ended
                return

    def _receive(self) -> bytes:
        if self.socket.family != socket.AF_UNIX:
            return self.socket.recv(1 << 18)
        data, descriptors = receive_with(self.socket, 1 << 18)
        self._passed += descriptors
        if self._unproven is not None:  # a stranger's are not kept
            self._drop_passed()
        return data

    def _drop_passed(self) -> None:
        while self._passed:
            os.close(self._passed.popleft())

    def _send(self, data: memoryview) -> int:
        """Send what the socket takes, with the memory that is to be passed."""
        if not self._to_pass:
            return self.socket.send(data)
        sent = socket.send_fds(self.socket, [data], passed_with(self._to_pass))
        self._to_pass = []
        return sent

    def on_writable(self) -> None:
        try:
            del self._unsent[: self._send(memoryview(self._unsent)[: 1 << 20])]
        except BlockingIOError:
            return
        except OSError:
            self.end()
            return
        if not self._unsent:
            self._server.watch(self)

    def end(self, how: str = "went away without closing it") -> None:
        """End the connection, and fail the channel if the process at its other end left without notice."""
        self._drop_passed()
        self._server.withdraw(self._greeting_timer)
        if not self._server.forget(self) or self._served is None:
            return
        self._served.connections.discard(self)
        self._to_pass = []
        if self._waiter and self._waits_for:
            self._waits_for.cancel(self._waiter)
            self._stop_waiting()
        is_missed_producer = self.is_producer and self.client not in self._served.done
        if not self._said_bye and (is_missed_producer or self.is_consumer):
            role = "producer" if is_missed_producer else "consumer"
            self._served.queue.fail(f"its {role} {self.who} {how}")
        self._server.free(self._served)

    def _check_proof(self, nonce: bytes) -> bool:
        if len(self._received) < 2 * NONCE:
            return False
        answer, theirs = bytes(self._received[:NONCE]), bytes(self._received[NONCE : 2 * NONCE])
        del self._received[: 2 * NONCE]
        if not hmac.compare_digest(answer, proof(self._server.key, nonce, b"client")):
            self.end()
            return False
        self._unproven = None
        self._write(proof(self._server.key, theirs, b"broker"))
        return True

    def _handle(self, kind: int, payload: bytes) -> None:
        """Carry out a request. One that makes no sense ends the connection: no other process has to do with it."""
        try:
            carry_out = self._understood(kind, payload)
        except (ValueError, TypeError, LookupError, struct.error, RecursionError, OSError) as error:
            self.end(f"sent a message that makes no sense ({type(error).__name__}: {error})")
            return
        carry_out()

    def _understood(self, kind: int, payload: bytes) -> Callable[[], None]:
        """Return what a request asks for, after a check of all that it says. Nothing is changed before."""
        if kind == BYE:
            return self._leave
        if self._waiter is not None:
            raise ValueError("a request before the answer to another")
        if kind == HELLO:
            return self._greeting(json.loads(payload))
        served = self._served
        assert served is not None
        if kind == PUT:
            timeout_s, weight = ASK_PUT.unpack_from(payload)
            _check_numbers(timeout_s, weight)
            items = unpack_items(memoryview(payload)[ASK_PUT.size :], self._passed)
            check_passed(items)
            return functools.partial(self._put, served, self._server.held(items), timeout_s, weight)
        if kind == GET:
            timeout_s, most, at_least, weight = ASK_GET.unpack(payload)
            _check_numbers(timeout_s, weight)
            if not 1 <= at_least <= most:
                raise ValueError(f"{at_least} to {most} items")
            return functools.partial(self._get, served, timeout_s, most, at_least, weight)
        if kind == CLOSE:
            return functools.partial(self._close, served)
        if kind == FAIL:
            return functools.partial(self._fail, served, payload.decode())
        if kind == SIZE:
            return lambda: self._answer(DONE, [served.facts()])
        if kind == RECORD:
            replaces, length = ASK_RECORD.unpack_from(payload)
            name, value = payload[ASK_RECORD.size :][:length], payload[ASK_RECORD.size + length :]
            if len(name) < length:
                raise ValueError(f"a name of {length} bytes in {len(payload)}")
            return functools.partial(self._record, served, name.decode(), value, replaces)
        if kind == LOOK_UP:
            (timeout_s,) = ASK_LOOK_UP.unpack_from(payload)
            _check_numbers(timeout_s)
            return functools.partial(self._look_up, served, payload[ASK_LOOK_UP.size :].decode(), timeout_s)
        raise ValueError(f"kind {kind}")

    def _greeting(self, hello: dict[str, Any]) -> Callable[[], None]:
        if self._served is not None:
            raise ValueError("a second greeting")
        texts = [hello[name] for name in ("client", "who", "channel")]
        numbers = [hello[name] for name in ("capacity", "num_producers")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"names {texts}")
        for text in texts:
            text.encode()  # others are to read it
        if any(type(number) is not int or number < 1 for number in numbers):
            raise ValueError(f"capacity and num_producers {numbers}")

        def greet() -> None:
            self.client, self.who, channel = texts
            self._served = self._server.served(channel, *numbers)
            self._served.connections.add(self)
            self._server.withdraw(self._greeting_timer)
            self._answer(DONE, [])

        return greet

    def _leave(self) -> None:
        self._said_bye = True
        self.end()

    def _put(self, served: _Served, batch: list[Any], timeout_s: float, weight: float) -> None:
        self.is_producer = True
        self._wait(served.queue, timeout_s, lambda answer: served.queue.put(batch, answer, weight))

    def _get(self, served: _Served, timeout_s: float, most: int, at_least: int, weight: float) -> None:
        self.is_consumer = True
        self._wait(served.queue, timeout_s, lambda answer: served.queue.get(most, at_least, answer, weight))

    def _close(self, served: _Served) -> None:
        served.done.add(self.client)
        served.queue.close()
        self._answer(DONE, [])

    def _fail(self, served: _Served, reason: str) -> None:
        served.queue.fail(reason)
        self._answer(DONE, [])

    def _record(self, served: _Served, name: str, value: bytes, replaces: bool) -> None:
        record = served.records[name]
        is_written = record.write(value, replaces=replaces)
        self._answer(DONE, []) if is_written else self._give([record.value])

    def _look_up(self, served: _Served, name: str, timeout_s: float) -> None:
        record = served.records[name]
        self._wait(record, timeout_s, record.read)

    def _wait(
        self, source: BoundedQueue | Record, timeout_s: float, ask: Callable[[Callable[[int, Any], None]], Waiter]
    ) -> None:
        is_answered = False

        def answer(kind: int, payload: Any) -> None:
            nonlocal is_answered
            is_answered = True
            self._stop_waiting()
            if kind == ITEMS:
                self._give(payload)
            else:
                self._answer(kind, [payload.encode()] if payload else [])

        def late() -> None:
            if not is_answered and source.cancel(waiter):
                self._stop_waiting()
                assert self._served is not None
                self._answer(LATE, [self._served.facts()])

        waiter = ask(answer)
        if not is_answered:
            self._waiter, self._waits_for = waiter, source
            self._timer = self._server.later(timeout_s, late)

    def _stop_waiting(self) -> None:
        """Forget the waiter, also in its timer, which would otherwise keep the items of a put until it runs out."""
        if self._timer is not None:
            self._server.withdraw(self._timer)
        self._waiter = self._waits_for = self._timer = None

    def _give(self, items: list[Any]) -> None:
        """Answer with items. Memory is passed on this machine, as far as one message takes it, and else copied.

        So are tokens; where one is not passed, the item is sent with the bytes of its tensors once the producer has
        answered with them.
        """
        is_near = self.socket.family == socket.AF_UNIX
        num_passed, num_asked = 0, 0

        def arrived(at: int, data: bytes) -> None:
            nonlocal num_asked
            items[at] = data
            num_asked -= 1
            if num_asked == 0:
                self._hand(items)

        fetched = []
        for at, item in enumerate(items):
            if not isinstance(item, PASSED):
                continue
            num_descriptors = len(passed_with([item]))
            if is_near and num_passed + num_descriptors <= MAX_PASSED:
                num_passed += num_descriptors
            elif isinstance(item, Kept):
                fetched.append((at, item))
            else:
                try:
                    items[at] = item.read()
                except OSError as error:  # its producer has shortened it since
                    assert self._served is not None
                    reason = f"an item of it cannot be read ({error})"
                    self._served.queue.fail(reason)
                    self._answer(FAILED, [reason.encode()])
                    return
        num_asked = len(fetched)
        if not fetched:
            self._hand(items)
        for at, item in fetched:
            self._server.fetch(item, functools.partial(arrived, at))

    def _hand(self, items: list[Any]) -> None:
        self._to_pass = [item for item in items if isinstance(item, PASSED)]
        pieces = pack_items(items)
        items.clear()  # or whoever called this later than `_give` would keep tokens open
        self._answer(ITEMS, pieces)

    def _answer(self, kind: int, pieces: list[bytes]) -> None:
        self._write(b"".join([HEAD.pack(kind, sum(map(len, pieces))), *pieces]))

    def _write(self, data: bytes) -> None:
        if not self._unsent:
            try:
                sent = self._send(memoryview(data))
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the socket will be readable, and end this connection in its turn
            if sent == len(data):
                return
            data = data[sent:]
        was_writing = self.is_writing
        self._unsent += data
        if not was_writing:
            self._server.watch(self)


def _check_numbers(timeout_s: float, weight: float = 0.0) -> None:
    """Raise `ValueError` for numbers by which nothing can be ordered: a timer that is none would stop all others."""
    if not (math.isfinite(timeout_s) and timeout_s >= 0 and weight >= 0):
        raise ValueError(f"timeout {timeout_s}, weight {weight}")


class BrokerServer:
    """One thread that serves every queue: on a socket file, and on a port of `host` where other nodes take part."""

    def __init__(self, path: str, host: str | None, key: bytes):
        self.key = key
        self.port = 0
        self._selector = selectors.DefaultSelector()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        self._listen(listener)
        if host is not None:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listener.bind((host, 0))
            self.port = listener.getsockname()[1]
            self._listen(listener)
        self._queues: dict[str, _Served] = {}
        self._memory: weakref.WeakSet[Memory | Kept] = weakref.WeakSet()
        self._max_memory = 0
        if hasattr(os, "memfd_create"):  # otherwise nobody passes any
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            self._max_memory = min(most, 1 << 16) // 2  # the rest is for connections
        self._timers: list[tuple[float, int, Timer]] = []
        self._num_timers = 0  # that were ever made
        self._num_withdrawn = 0  # among those that are left

    def run(self, until_ended: int) -> None:
        """Serve until the file descriptor `until_ended` is closed at its other end."""
        self._selector.register(until_ended, selectors.EVENT_READ, None)
        while True:
            # Selectors refuse to wait for weeks at a time.
            wait_s = min(max(0.0, self._timers[0][0] - time.monotonic()), 3600.0) if self._timers else None
            for key, events in self._selector.select(wait_s):
                if key.data is None:
                    if not os.read(until_ended, 1024):
                        return
                elif isinstance(key.data, _ClientConnection):
                    if events & selectors.EVENT_WRITE:
                        key.data.on_writable()
                    if events & selectors.EVENT_READ:
                        key.data.on_readable()
                else:
                    key.data()
            while self._timers and self._timers[0][0] <= time.monotonic():
                _, _, timer = heapq.heappop(self._timers)
                self._num_withdrawn -= timer.call is None
                timer.run()

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._num_timers += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._num_timers, timer))
        return timer

    def withdraw(self, timer: Timer) -> None:
        """Have a call not be made. Deadlines may be hours away: withdrawn timers are dropped before, in bulk."""
        if timer.call is None:
            return
        timer.call = None
        self._num_withdrawn += 1
        if self._num_withdrawn > max(_MAX_WITHDRAWN, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._num_withdrawn = 0

    def held(self, items: list[Packed | Kept]) -> list[Any]:
        """Return items as queues hold them: where too many are in memory of their own, copied out of it."""
        for at, item in enumerate(items):
            if isinstance(item, Kept):  # of which a process has not many
                self._memory.add(item)
                if isinstance(item.data, Memory):
                    self._memory.add(item.data)
            elif isinstance(item, Memory):
                if len(self._memory) >= self._max_memory:
                    items[at] = item.read()
                else:
                    self._memory.add(item)
        return items

    def fetch(self, item: Kept, answer: Callable[[bytes], None]) -> None:
        """Ask the producer of an item for the bytes of its tensors, and answer with both.

        If the producer has ended, the answer lacks the bytes, which the receiver notices.
        """
        token = socket.socket(fileno=item.detach_token())
        token.setblocking(False)

        def on_readable() -> None:
            try:
                _, descriptors = receive_with(token, 4096)
            except BlockingIOError:
                return
            except OSError:
                descriptors = []
            self._selector.unregister(token)
            token.close()
            memories = [Memory(descriptor, os.fstat(descriptor).st_size) for descriptor in descriptors]
            data = b""
            with contextlib.suppress(OSError):  # of what is no memory, too, nothing is there
                data = item.data.read() if isinstance(item.data, Memory) else bytes(item.data)
                for memory in memories:
                    data += memory.read()
            answer(data)

        with contextlib.suppress(OSError):  # it may have sent them, and ended
            token.send(b"host")
        self._selector.register(token, selectors.EVENT_READ, on_readable)

    def served(self, channel: str, capacity: int, num_producers: int) -> _Served:
        if channel not in self._queues:
            self._queues[channel] = _Served(channel, BoundedQueue(capacity, num_producers))
        return self._queues[channel]

    def free(self, served: _Served) -> None:
        """Forget a queue that nobody is connected to, if the next one that connects finds the same in a new one."""
        if not (served.connections or served.done or served.records) and served.queue.is_as_new:
            del self._queues[served.name]

    def watch(self, connection: _ClientConnection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_writing else 0)
        self._selector.modify(connection.socket, events, connection)

    def forget(self, connection: _ClientConnection) -> bool:
        """Close a connection; return False if it was closed before."""
        if connection.socket.fileno() < 0:
            return False
        self._selector.unregister(connection.socket)
        connection.socket.close()
        return True

    def _listen(self, listener: socket.socket) -> None:
        listener.listen(512)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        accepted.setblocking(False)
        prepare(accepted)
        connection = _ClientConnection(self, accepted)
        self._selector.register(accepted, selectors.EVENT_READ, connection)


def prepare(connection: socket.socket) -> None:
    """Set the socket to send at once, and to notice a machine that vanished in some ten seconds."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def main() -> None:
    """Read the task from standard input, write the port, and serve until standard input ends."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # to the end of the line, and no further
        task = json.loads(stdin.readline())
    server = BrokerServer(task["path"], task["host"], bytes.fromhex(task["key"]))
    print(server.port, flush=True)
    server.run(until_ended=0)


if __name__ == "__main__":
    main()
