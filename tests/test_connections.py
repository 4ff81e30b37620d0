"""Connections of HTTP servers: deadlines, and who makes way for whom. With real sockets, on loopback."""

import asyncio
import contextlib
import socket

from aiohttp import web

from hotseat.connections import Connections, TokenConnections

WAIT_S = 300.0


class Server:
    """A server whose token is "x"; /hold is answered when `may_answer` is set."""

    def __init__(self, **options):
        self.connections, self.holder = Connections(**options), TokenConnections()
        self.may_answer = asyncio.Event()

    async def __aenter__(self):
        app = web.Application(middlewares=[self.connections.watch])
        app.router.add_get("/", self._answer)
        app.router.add_get("/hold", self._answer)
        self._runner = self.connections.runner(app, 0.1, ends_handlers=True)
        await self._runner.setup()
        bound = socket.create_server(("127.0.0.1", 0))
        self._port = bound.getsockname()[1]
        self._server = await self.connections.listen(self._runner, bound, 100)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        await self._runner.cleanup()

    async def _answer(self, request):
        if request.headers.get("Authorization") == "x":
            self.connections.admit(request, self.holder)
        if request.path == "/hold":
            await self.may_answer.wait()
        return web.Response(text="fine")

    async def connect(self):
        return Client(*await asyncio.open_connection("127.0.0.1", self._port))

    @property
    def num_connections(self):
        return self.connections.unknown.num_connections, self.holder.num_connections


class Client:
    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    def send(self, text):
        self._writer.write(text.replace("\n", "\r\n").encode())

    async def ask(self, path="/", token="x"):
        self.send(f"GET {path} HTTP/1.1\nHost: x\nAuthorization: {token}\n\n")
        text = (await asyncio.wait_for(self._reader.readuntil(b"fine"), WAIT_S)).decode()
        return text.split()[1]

    async def ended(self):
        """Wait until the server ends the connection."""
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(self._reader.read(), WAIT_S) == b""
        self._writer.close()

    def close(self):
        self._writer.close()


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_headers_have_a_deadline_in_the_first_request_and_in_later_ones():
    async def main():
        async with Server(headers_s=0.2) as server:
            silent, half, later = [await server.connect() for _ in range(3)]
            half.send("GET / HTTP/1.1\nHost:")
            assert await later.ask() == "200"
            later.send("GET / HTTP/1.1\nHost:")
            for client in (silent, half, later):
                await client.ended()
            assert server.num_connections == (0, 0)

    asyncio.run(main())


def test_a_connection_of_a_holder_may_be_idle_and_work_longer_than_headers_may_take():
    async def main():
        async with Server(headers_s=0.2, leave_s=0.2) as server:
            idle, working, silent = [await server.connect() for _ in range(3)]
            assert await idle.ask() == "200"
            answer = asyncio.ensure_future(working.ask("/hold"))
            await silent.ended()  # the deadline of the others would have passed, too
            server.may_answer.set()
            assert (await answer, await idle.ask()) == ("200", "200")
            for client in (idle, working):
                client.close()

    asyncio.run(main())


def test_a_client_without_a_token_gets_its_answer_and_leaves():
    async def main():
        async with Server(leave_s=0.1) as server:
            client = await server.connect()
            assert await client.ask(token="y") == "200"
            await client.ended()

    asyncio.run(main())


def test_the_oldest_without_a_token_make_way_and_holders_never_do():
    async def main():
        async with Server(max_unknown=3) as server:
            holders = []
            for _ in range(5):
                holders.append(await server.connect())
                assert await holders[-1].ask() == "200"
            assert server.num_connections == (0, 5)
            strangers = []
            for number in range(1, 8):
                strangers.append(await server.connect())
                await until(lambda number=number: server.num_connections[0] == min(number, 3))
            for client in strangers[:4]:
                await client.ended()
            assert await strangers[4].ask() == "200"  # one that shows a token now
            assert server.num_connections == (2, 6)
            for client in holders:
                assert await client.ask() == "200"
            server.connections.release(server.holder)  # its token is over: all are strangers, the last of which stay
            assert server.num_connections == (3, 0)
            for client in (*holders, *strangers[4:]):
                client.close()

    asyncio.run(main())
