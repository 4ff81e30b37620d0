"""The broker: a process that serves any number of queues to others over sockets.

It knows items as bytes only, and fails a queue when a process that used it ends without notice. It needs only
the standard library and starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import hmac
import json
import math
import os
import resource
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from hotseat.rlinf import wire
from hotseat.rlinf.bounded_queue import BoundedQueue, Record, Waiter
from hotseat.rlinf.wire import Kept, Memory

_MAX_HELLO = 1 << 16
_MAX_WITHDRAWN = 1000  # timers that are kept in any case


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


class _Waiting(NamedTuple):
    """The request of a client that has not been answered yet, what was asked, and its deadline."""

    waiter: Waiter
    source: BoundedQueue | Record
    timer: Timer


class _ClientConnection:
    """One client connection: proof, greeting, then one request at a time."""

    def __init__(self, server: BrokerServer, connection: socket.socket):
        self.stream = wire.Stream(connection)
        self._server = server
        nonce = secrets.token_bytes(wire.NONCE)
        self._unproven: bytes | None = nonce  # what the client has to answer; None once it has proved itself
        self._served: _Served | None = None
        self.client = self.who = ""  # one process, and what it is called
        self.is_producer = self.is_consumer = False
        self._waiting: _Waiting | None = None
        self._said_bye = False
        self._write(nonce)
        # A client that connects and never proves itself is dropped.
        self._greeting_timer = server.later(10.0, self.end)

    def on_readable(self) -> None:
        if not self.stream.receive():
            self.end()
            return
        if self._unproven is not None:
            self.stream.drop_passed()  # a stranger's are not kept
            if not self._check_proof(self._unproven):
                return
        received = self.stream.received
        while len(received) >= wire.HEAD.size:
            kind, length = wire.HEAD.unpack_from(received)
            if self._served is None and (kind != wire.HELLO or length > _MAX_HELLO):
                self.end()
                return
            if len(received) < wire.HEAD.size + length:
                return
            self.stream.take(wire.HEAD.size)
            self._handle(kind, self.stream.take(length))
            if self.stream.socket.fileno() < 0:  # it has ended
                return

    def on_writable(self) -> None:
        if not self.stream.flush():
            self.end()
        elif not self.stream.unsent:
            self._server.watch(self)

    def end(self, how: str = "went away without closing it") -> None:
        """End the connection, and fail the channel if the process at its other end left without notice."""
        self.stream.drop_passed()
        self._server.withdraw(self._greeting_timer)
        if not self._server.forget(self) or self._served is None:
            return
        self._served.connections.discard(self)
        self.stream.to_pass = []
        if self._waiting is not None:
            self._waiting.source.cancel(self._waiting.waiter)
            self._stop_waiting()
        is_missed_producer = self.is_producer and self.client not in self._served.done
        if not self._said_bye and (is_missed_producer or self.is_consumer):
            role = "producer" if is_missed_producer else "consumer"
            self._served.queue.fail(f"its {role} {self.who} {how}")
        self._server.free(self._served)

    def _check_proof(self, nonce: bytes) -> bool:
        if len(self.stream.received) < 2 * wire.NONCE:
            return False
        answer, theirs = self.stream.take(wire.NONCE), self.stream.take(wire.NONCE)
        if not hmac.compare_digest(answer, wire.proof(self._server.key, nonce, b"client")):
            self.end()
            return False
        self._unproven = None
        self._write(wire.proof(self._server.key, theirs, b"broker"))
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
        if kind == wire.BYE:
            return self._leave
        if self._waiting is not None:
            raise ValueError("a request before the answer to another")
        if kind == wire.HELLO:
            return self._greeting(json.loads(payload))
        served = self._served
        assert served is not None
        if kind == wire.PUT:
            timeout_s, weight = wire.ASK_PUT.unpack_from(payload)
            _check_numbers(timeout_s, weight)
            items = wire.unpack_items(memoryview(payload)[wire.ASK_PUT.size :], self.stream.passed)
            wire.check_passed(items)
            return functools.partial(self._put, served, self._server.held(items), timeout_s, weight)
        if kind == wire.GET:
            timeout_s, most, at_least, weight = wire.ASK_GET.unpack(payload)
            _check_numbers(timeout_s, weight)
            if not 1 <= at_least <= most:
                raise ValueError(f"{at_least} to {most} items")
            return functools.partial(self._get, served, timeout_s, most, at_least, weight)
        if kind == wire.CLOSE:
            return functools.partial(self._close, served)
        if kind == wire.FAIL:
            return functools.partial(self._close, served, payload.decode())
        if kind == wire.SIZE:
            return lambda: self._answer(wire.DONE, [served.facts()])
        if kind == wire.RECORD:
            replaces, length = wire.ASK_RECORD.unpack_from(payload)
            name, value = payload[wire.ASK_RECORD.size :][:length], payload[wire.ASK_RECORD.size + length :]
            if len(name) < length:
                raise ValueError(f"a name of {length} bytes in {len(payload)}")
            return functools.partial(self._record, served, name.decode(), value, replaces)
        if kind == wire.LOOK_UP:
            (timeout_s,) = wire.ASK_LOOK_UP.unpack_from(payload)
            _check_numbers(timeout_s)
            return functools.partial(self._look_up, served, payload[wire.ASK_LOOK_UP.size :].decode(), timeout_s)
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
            self._answer(wire.DONE, [])

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

    def _close(self, served: _Served, reason: str | None = None) -> None:
        if reason is None:
            served.done.add(self.client)
            served.queue.close()
        else:
            served.queue.fail(reason)
        self._answer(wire.DONE, [])

    def _record(self, served: _Served, name: str, value: bytes, replaces: bool) -> None:
        record = served.records[name]
        is_written = record.write(value, replaces=replaces)
        self._answer(wire.DONE, []) if is_written else self._give([record.value])

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
            if kind == wire.ITEMS:
                self._give(payload)
            else:
                self._answer(kind, [payload.encode()] if payload else [])

        def late() -> None:
            if not is_answered and source.cancel(waiter):
                self._stop_waiting()
                assert self._served is not None
                self._answer(wire.LATE, [self._served.facts()])

        waiter = ask(answer)
        if not is_answered:
            self._waiting = _Waiting(waiter, source, self._server.later(timeout_s, late))

    def _stop_waiting(self) -> None:
        """Forget the waiter, also in its timer, which would otherwise keep the items of a put until it runs out."""
        if self._waiting is not None:
            self._server.withdraw(self._waiting.timer)
        self._waiting = None

    def _give(self, items: list[Any]) -> None:
        """Answer with items. Memory is passed on this machine, as far as one message takes it, and else copied.

        So are tokens; where one is not passed, the item is sent with the bytes of its tensors once the producer has
        answered with them.
        """
        is_near = self.stream.socket.family == socket.AF_UNIX
        num_passed, num_asked = 0, 0

        def arrived(at: int, data: bytes) -> None:
            nonlocal num_asked
            items[at] = data
            num_asked -= 1
            if num_asked == 0:
                self._hand(items)

        fetched = []
        for at, item in enumerate(items):
            if not isinstance(item, wire.PASSED):
                continue
            num_descriptors = len(wire.passed_with([item]))
            if is_near and num_passed + num_descriptors <= wire.MAX_PASSED:
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
                    self._answer(wire.FAILED, [reason.encode()])
                    return
        num_asked = len(fetched)
        if not fetched:
            self._hand(items)
        for at, item in fetched:
            self._server.fetch(item, functools.partial(arrived, at))

    def _hand(self, items: list[Any]) -> None:
        self.stream.to_pass = [item for item in items if isinstance(item, wire.PASSED)]
        pieces = wire.pack_items(items)
        items.clear()  # or whoever called this later than `_give` would keep tokens open
        self._answer(wire.ITEMS, pieces)

    def _answer(self, kind: int, pieces: list[bytes]) -> None:
        self._write(b"".join([wire.HEAD.pack(kind, sum(map(len, pieces))), *pieces]))

    def _write(self, data: bytes) -> None:
        was_writing = bool(self.stream.unsent)
        self.stream.write(data)
        if self.stream.unsent and not was_writing:
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
        """Withdraw a call. Its deadline may be hours ahead, so withdrawn timers are dropped in bulk before it."""
        if timer.call is None:
            return
        timer.call = None
        self._num_withdrawn += 1
        if self._num_withdrawn > max(_MAX_WITHDRAWN, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._num_withdrawn = 0

    def held(self, items: list[wire.Packed | Kept]) -> list[Any]:
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
                _, descriptors = wire.receive_with(token, 4096)
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
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.stream.unsent else 0)
        self._selector.modify(connection.stream.socket, events, connection)

    def forget(self, connection: _ClientConnection) -> bool:
        """Close a connection; return False if it was closed before."""
        if connection.stream.socket.fileno() < 0:
            return False
        self._selector.unregister(connection.stream.socket)
        connection.stream.socket.close()
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
        wire.prepare(accepted)
        connection = _ClientConnection(self, accepted)
        self._selector.register(accepted, selectors.EVENT_READ, connection)


def main() -> None:
    """Read the task from standard input, write the port, and serve until standard input ends."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # to the end of the line, and no further
        task = json.loads(stdin.readline())
    server = BrokerServer(task["path"], task["host"], bytes.fromhex(task["key"]))
    print(server.port, flush=True)
    server.run(until_ended=0)


if __name__ == "__main__":
    main()
