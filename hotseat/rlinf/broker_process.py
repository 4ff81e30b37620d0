"""The broker: a process that serves any number of queues to others over sockets.

It knows items as bytes only, and fails a queue when a process that used it ends without notice. It needs only the
standard library and starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import math
import os
import resource
import secrets
import socket
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any

from hotseat.processes.child import FrameChannel
from hotseat.rlinf import wire
from hotseat.rlinf.bounded_queue import Answer, BoundedQueue, Record
from hotseat.rlinf.wire import Kept, Memory

_MAX_HELLO = 1 << 16
_CHUNK = 1 << 16  # bytes received at a time: memory for more would come from the system each time
_GREETING_S = 10.0  # a client that connects and does not prove itself within it is dropped
_ROLES = {wire.PUT: "producer", wire.GET: "consumer"}
_MALFORMED = (ValueError, TypeError, LookupError, struct.error, RecursionError, OSError)


class _Served:
    """A queue, records beside it, and the connections to both."""

    def __init__(self, name: str, capacity: int):
        self.name = name
        self.queue = BoundedQueue(capacity)
        self.records: defaultdict[str, Record] = defaultdict(Record)
        self.connections: set[_ClientConnection] = set()

    def facts(self) -> bytes:
        users = {
            f"{role}s": sorted({each.who for each in self.connections if role in each.roles})
            for role in _ROLES.values()
        }
        return json.dumps({"size": len(self.queue.items), **users}).encode()


class _ClientConnection:
    """One client connection: proof, greeting, then one request at a time."""

    def __init__(self, server: BrokerServer, connection: socket.socket):
        self._server = server
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._received = asyncio.StreamReader()
        self._passed: deque[int] = deque()  # descriptors that came, and belong to no item yet
        self._unsent = bytearray()
        self._to_pass: list[Memory | Kept] = []  # goes with the first byte that is sent next
        self._served: _Served | None = None
        self._source: BoundedQueue | Record | None = None  # of the request that has not been answered yet
        self._timer: asyncio.TimerHandle | None = None  # of its deadline
        self.who = ""  # what the client's process is called
        self.roles: set[str] = set()
        self._loop.add_reader(connection, self._receive)

    async def serve(self) -> None:
        """Serve the client to its end. A message that makes no sense concerns only its queue."""
        how: str | None = None
        try:
            async with asyncio.timeout(_GREETING_S):
                self._served = await self._greeted()
            while how is None:
                how = self._handle(self._served, *await self._message())
        except EOFError:
            how = "went away without closing it"
        except TimeoutError:
            pass
        finally:
            self._end(how)

    async def _greeted(self) -> _Served:
        """Check that the client knows the key, show that this side does, and return the queue that it asks for."""
        nonce = secrets.token_bytes(wire.NONCE)
        self._write(nonce)
        proof = await self._received.readexactly(wire.NONCE)
        theirs = await self._received.readexactly(wire.NONCE)
        self._drop_passed()  # a stranger's are not kept
        if not hmac.compare_digest(proof, wire.proof(self._server.key, nonce, b"client")):
            raise EOFError
        self._write(wire.proof(self._server.key, theirs, b"broker"))
        kind, payload = await self._message(_MAX_HELLO)
        try:
            hello = json.loads(payload) if kind == wire.HELLO else {}
            self.who, channel, capacity = (hello[name] for name in ("who", "channel", "capacity"))
            (self.who + channel).encode()  # others are to read it
            if type(capacity) is not int or capacity < 1:
                raise ValueError(f"capacity {capacity}")
        except _MALFORMED as error:
            raise EOFError from error
        served = self._server.served(channel, capacity)
        served.connections.add(self)
        self._answer(wire.DONE, [])
        return served

    async def _message(self, max_bytes: int | None = None) -> tuple[int, bytes]:
        kind, length = wire.HEAD.unpack(await self._received.readexactly(wire.HEAD.size))
        if max_bytes is not None and length > max_bytes:
            raise EOFError
        return kind, await self._received.readexactly(length)

    def _handle(self, served: _Served, kind: int, payload: bytes) -> str | None:
        """Carry out a request, or return how it ends the connection: in good order if the text is empty."""
        if kind == wire.BYE:
            return ""
        try:
            timeout_s, weight, items = self._understood(kind, payload)
        except _MALFORMED as error:
            return f"sent a message that makes no sense ({type(error).__name__}: {error})"
        if kind in _ROLES:
            self.roles.add(_ROLES[kind])
        if kind == wire.PUT:
            self._wait(served.queue, functools.partial(served.queue.put, items.pop(), weight), timeout_s)
        elif kind == wire.GET:
            self._wait(served.queue, functools.partial(served.queue.get, weight), timeout_s)
        elif kind == wire.SIZE:
            self._answer(wire.DONE, [served.facts()])
        else:
            record = served.records[items[0]]
            if kind != wire.LOOK_UP:
                record.write(items[1], replaces=kind == wire.REPLACE)
            self._wait(record, record.read, timeout_s)
        return None

    def _understood(self, kind: int, payload: bytes) -> tuple[float, float, list[Any]]:
        """Return timeout, weight and items of a request, after a check of all that it says."""
        if self._source is not None:
            raise ValueError("a request before the answer to another")
        if kind not in wire.NUM_ITEMS:
            raise ValueError(f"kind {kind}")
        timeout_s, weight = wire.ASK.unpack_from(payload)
        if not (math.isfinite(timeout_s) and timeout_s >= 0 and weight >= 0):
            raise ValueError(f"timeout {timeout_s}, weight {weight}")
        items = wire.unpack_items(memoryview(payload)[wire.ASK.size :], self._passed)
        wire.check_passed(items)
        if len(items) != wire.NUM_ITEMS[kind]:
            raise ValueError(f"{len(items)} items")
        if kind == wire.PUT:
            return timeout_s, weight, [self._server.held(items.pop())]
        if items:  # name of a record, and its value
            items = [str(items[0], "utf-8"), *map(bytes, items[1:])]
        return timeout_s, weight, items

    def _wait(self, source: BoundedQueue | Record, ask: Callable[[Answer], None], timeout_s: float) -> None:
        self._source = source
        ask(self._on_answer)
        if self._source is not None:
            self._timer = self._loop.call_later(timeout_s, self._late)

    def _stop_waiting(self) -> None:
        self._source = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_answer(self, kind: int, payload: Any) -> None:
        self._stop_waiting()
        if kind == wire.ITEMS:
            self._give(payload)
        else:
            self._answer(kind, [payload.encode()] if payload else [])

    def _late(self) -> None:
        if self._source is not None and self._source.cancel(self._on_answer):
            self._stop_waiting()
            assert self._served is not None
            self._answer(wire.LATE, [self._served.facts()])

    def _end(self, how: str | None) -> None:
        """Close the connection, and fail the queue if the process at its other end left without notice."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._drop_passed()
        self._to_pass = []
        if self._source is not None:
            self._source.cancel(self._on_answer)
            self._stop_waiting()
        if self._served is not None:
            self._served.connections.discard(self)
            if how and self.roles:
                self._served.queue.fail(f"its {max(self.roles)} {self.who} {how}")
            self._server.free(self._served)

    # --- what is sent ---------------------------------------------------------------------------------------------

    def _give(self, items: list[Any]) -> None:
        """Answer with items. Memory and tokens are passed on this machine, as far as one message takes them."""
        room = wire.MAX_PASSED if self._socket.family == socket.AF_UNIX else 0
        not_passed = []
        for at, item in enumerate(items):
            if isinstance(item, wire.PASSED):
                num_descriptors = len(wire.passed_with([item]))
                if num_descriptors <= room:
                    room -= num_descriptors
                else:
                    not_passed.append(at)
        if not_passed:
            self._server.start(self._give_copies(items, not_passed))
        else:
            self._hand(items)

    async def _give_copies(self, items: list[Any], not_passed: list[int]) -> None:
        try:
            for at in not_passed:
                items[at] = await _in_host_memory(items[at])
        except OSError as error:  # its producer has shortened it since
            assert self._served is not None
            reason = f"an item of it cannot be read ({error})"
            self._served.queue.fail(reason)
            self._answer(wire.FAILED, [reason.encode()])
        else:
            self._hand(items)

    def _hand(self, items: list[Any]) -> None:
        self._to_pass = [item for item in items if isinstance(item, wire.PASSED)]
        pieces = wire.pack_items(items)
        items.clear()  # or whoever called this would keep tokens open
        self._answer(wire.ITEMS, pieces)

    def _answer(self, kind: int, pieces: list[bytes]) -> None:
        self._write(b"".join([wire.HEAD.pack(kind, sum(map(len, pieces))), *pieces]))

    def _write(self, data: bytes) -> None:
        """Send what the socket takes now, and the rest when it takes more."""
        if self._unsent:
            self._unsent += data
            return
        sent = self._send(memoryview(data))
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._socket, self._flush)

    def _flush(self) -> None:
        del self._unsent[: self._send(memoryview(self._unsent)[: 1 << 20])]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _send(self, data: memoryview) -> int:
        try:
            if not self._to_pass:
                return self._socket.send(data)
            sent = socket.send_fds(self._socket, [data], wire.passed_with(self._to_pass))
        except BlockingIOError:
            return 0
        except OSError:  # the socket will be readable, and end its connection in its turn
            return len(data)
        self._to_pass = []
        return sent

    # --- what comes -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            if self._socket.family == socket.AF_UNIX:
                data, descriptors = wire.receive_with(self._socket, _CHUNK)
                self._passed += descriptors
            else:
                data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._received.feed_data(data)
        else:
            self._loop.remove_reader(self._socket)
            self._received.feed_eof()

    def _drop_passed(self) -> None:
        while self._passed:
            os.close(self._passed.popleft())


async def _in_host_memory(item: Memory | Kept) -> bytes:
    """Return the bytes of an item, with those of tensors that its producer keeps.

    If the producer has ended, theirs are missing, which the receiver notices.
    """
    if isinstance(item, Memory):
        return item.read()
    loop, answered = asyncio.get_running_loop(), asyncio.Event()
    with socket.socket(fileno=item.detach_token()) as token:
        token.setblocking(False)
        with contextlib.suppress(OSError):  # it may have sent them, and ended
            token.send(b"host")
        loop.add_reader(token, answered.set)
        try:
            await answered.wait()
        finally:
            loop.remove_reader(token)
        descriptors: list[int] = []
        with contextlib.suppress(OSError):
            _, descriptors = wire.receive_with(token, 4096)
    memories = [Memory(descriptor, os.fstat(descriptor).st_size) for descriptor in descriptors]
    data = b""
    with contextlib.suppress(OSError):  # of what is no memory, too, nothing is there
        data = item.data.read() if isinstance(item.data, Memory) else bytes(item.data)
        for memory in memories:
            data += memory.read()
    return data


class BrokerServer:
    """One thread that serves every queue: on a socket file, and on a port of `host` where other nodes take part."""

    def __init__(self, path: str, host: str | None, key: bytes):
        self.key = key
        self.port = 0
        self._listeners = [_listener(socket.AF_UNIX, path)]
        if host is not None:
            self._listeners.append(_listener(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0)))
            self.port = self._listeners[1].getsockname()[1]
        self._queues: dict[str, _Served] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # which an event loop itself does not keep
        self._memory: weakref.WeakSet[Memory | Kept] = weakref.WeakSet()
        self._max_memory = 0
        if hasattr(os, "memfd_create"):  # otherwise nobody passes any
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            self._max_memory = min(most, 1 << 16) // 2  # the rest is for connections

    def run(self, until_ended: int) -> None:
        """Serve until the file descriptor `until_ended` is closed at its other end."""
        asyncio.run(self._run(until_ended))

    async def _run(self, until_ended: int) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def look() -> None:
            if not os.read(until_ended, 1024):
                ended.set()

        loop.add_reader(until_ended, look)
        for listener in self._listeners:
            loop.add_reader(listener, self._accept, listener)
        await ended.wait()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def held(self, item: Any) -> Any:
        """Return an item as queues hold it: where too many are in memory of their own, copied out of it.

        Items with tokens stay as they are: a process has not many.
        """
        if isinstance(item, Memory) and len(self._memory) >= self._max_memory:
            return item.read()
        for passed in (item, item.data) if isinstance(item, Kept) else (item,):
            if isinstance(passed, wire.PASSED):
                self._memory.add(passed)
        return item

    def served(self, channel: str, capacity: int) -> _Served:
        if channel not in self._queues:
            self._queues[channel] = _Served(channel, capacity)
        return self._queues[channel]

    def free(self, served: _Served) -> None:
        """Forget a queue that nobody is connected to, if the next one that connects finds the same in a new one."""
        if not (served.connections or served.records) and served.queue.is_as_new:
            del self._queues[served.name]

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        accepted.setblocking(False)
        wire.prepare(accepted)
        self.start(_ClientConnection(self, accepted).serve())


def _listener(family: socket.AddressFamily, address: Any) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen(512)
    listener.setblocking(False)
    return listener


def main(channel: FrameChannel, task: dict[str, Any]) -> None:
    """Send the port, and serve until the process at the other end of the channel ends or hangs up."""
    server = BrokerServer(task["path"], task["host"], bytes.fromhex(task["key"]))
    channel.send({"port": server.port})
    server.run(until_ended=channel.socket.fileno())
