"""Bounds the connections of an HTTP server, so that clients without a token cannot keep its holders from being served.

A connection belongs to nobody until a request on it has shown a token; from then on to the holder of that token. There
are only so many connections of nobody: one more ends the oldest of them, so that those that stay open and send nothing
make way for a client that asks at once. Headers have a deadline, and a connection ends soon after an answer to nobody.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

_MAX_UNKNOWN = 4096  # connections of nobody: clients of many episodes may connect at once before they ask
_HEADERS_S = 20.0
_LEAVE_S = 2.0  # in which a client without a token may read its answer, while the rest of its request is discarded
_IDLE_S = 75.0  # between two requests

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def bound_at(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address and does not listen yet. Raises `OSError` if that cannot be used."""
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class TokenConnections:
    """The connections of one holder of a token, in the order in which they became its own."""

    def __init__(self) -> None:
        self._open: dict[_Connection, None] = {}

    @property
    def num_connections(self) -> int:
        return len(self._open)


class Connections:
    """Connections of one server. All methods are called in its event loop.

    headers_s: from the begin of a connection or a request to the end of its headers.
    """

    def __init__(self, max_unknown: int | None = None, headers_s: float = _HEADERS_S, leave_s: float = _LEAVE_S):
        if max_unknown is None:  # half of the files that this process may open are for others
            max_unknown = min(_MAX_UNKNOWN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._max_unknown = max_unknown
        self.unknown = TokenConnections()  # of those that have shown no token
        self.headers_s, self.leave_s = headers_s, leave_s

    def runner(self, app: web.Application, shutdown_s: float, *, ends_handlers: bool = False) -> web.AppRunner:
        """Return what runs an application. ends_handlers: a request ends when its client hangs up.

        Bodies are not unpacked, which a small one could make last for minutes: `encoding_problem` refuses them.
        """
        return web.AppRunner(
            app,
            handler_cancellation=ends_handlers,
            access_log=None,
            shutdown_timeout=shutdown_s,
            keepalive_timeout=_IDLE_S,
            auto_decompress=False,
        )

    async def listen(self, runner: web.AppRunner, bound: socket.socket, backlog: int) -> asyncio.Server:
        """Serve at a bound socket. The caller closes what is returned before it cleans the runner up."""
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Connection(self, server()), sock=bound, backlog=backlog)

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note for each request that its headers have come, and when its answer is made."""
        connection = _of(request)
        if connection is None:
            raise ConnectionResetError("the client has hung up")
        connection.begin()
        try:
            return await handler(request)
        finally:
            connection.finish()

    def admit(self, request: web.Request, holder: TokenConnections) -> None:
        """Give the connection of a request to the holder of the token that the request has shown."""
        connection = _of(request)
        if connection is not None:
            self._give(connection, holder)

    def release(self, holder: TokenConnections) -> None:
        """Take a token back: its connections are nobody's again, and those with a request in progress end soon."""
        for connection in list(holder._open):
            self._give(connection, self.unknown)
            connection.give_up()
        self._make_room()

    def add(self, connection: _Connection) -> None:
        self.unknown._open[connection] = None
        self._make_room()

    def _give(self, connection: _Connection, holder: TokenConnections) -> None:
        if connection.holder is not None:
            del connection.holder._open[connection]
            connection.holder = holder
            holder._open[connection] = None

    def _make_room(self) -> None:
        while self.unknown.num_connections > self._max_unknown:
            next(iter(self.unknown._open)).end()


class _Connection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol, and keeps the deadlines."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol):
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_busy = False  # a request is being answered
        self.holder: TokenConnections | None = None  # None: it has ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.holder = self._connections.unknown
        self._inner.connection_made(transport)
        self._end_within(self._connections.headers_s)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy and self._deadline is None:
            self._end_within(self._connections.headers_s)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin(self) -> None:
        self._is_busy = True
        self._withdraw()

    def finish(self) -> None:
        self._is_busy = False
        if self.holder is self._connections.unknown:
            self._end_within(self._connections.leave_s)

    def give_up(self) -> None:
        """End the connection soon if it has a request in progress, whose body may never come."""
        if self._is_busy:
            self._end_within(self._connections.leave_s)

    def end(self) -> None:
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def _forget(self) -> None:
        self._withdraw()
        if self.holder is not None:
            del self.holder._open[self]
            self.holder = None

    def _end_within(self, seconds: float) -> None:
        self._withdraw()
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.end)

    def _withdraw(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _of(request: web.Request) -> _Connection | None:
    transport = request.transport
    protocol = None if transport is None else transport.get_protocol()
    return protocol if isinstance(protocol, _Connection) else None


def encoding_problem(request: web.Request) -> str | None:
    """Return why the body of a request is not read: it is packed."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() in ("", "identity"):
        return None
    return f"Content-Encoding {encoding!r:.40} is not supported: send the body as it is"


async def expect_nothing_yet(request: web.Request) -> None:
    """Leave a client that asks whether to send its body without an answer, until `ask_for_body`."""


async def ask_for_body(request: web.Request) -> None:
    """Tell a client that waits for it to send the body of its request."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
