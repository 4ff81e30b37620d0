"""The HTTP server of the gateway, in the event loop of the agents."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from hotseat.agents.gateway import anthropic_messages, chat_completions, responses
from hotseat.agents.gateway.fields import BadRequest
from hotseat.agents.gateway.program_session import ProgramSession
from hotseat.agents.gateway.reply import Begin, Reply
from hotseat.closing import on_failure
from hotseat.connections import Connections, TokenConnections, ask_for_body, encoding_problem, expect_nothing_yet
from hotseat.errors import UserError

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 32 << 20  # of a request; where programs send images, one of the largest comes on top
_MAX_OPEN = 512  # requests of one episode at a time
_MAX_OPEN_BYTES = 64 << 20  # of their bodies together, and two images on top
_MAX_CONNECTIONS = 1024  # of one episode
_MAX_KEPT = 4096  # replies, of one episode
_SHUTDOWN_S = 1.0
_BACKLOG = 4096  # connections that wait to be accepted; where there is no room, a client tries again after a second
_ACCEPTED = 16  # of them at a time: each takes as long as a small request
_STREAM_BYTES = 1 << 16  # of a stream that are written at a time

Handler = Callable[[Mapping[str, Any], ProgramSession, Begin | None], Coroutine[Any, Any, Reply]]

_COUNT = "/v1/messages/count_tokens"

_HANDLERS: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions.chat,
    "/v1/completions": chat_completions.completions,
    "/v1/responses": responses.create,
    "/v1/messages": anthropic_messages.create,
}


@dataclass(eq=False)
class _Work:
    """The work on a request, for which several clients may wait: the first one, and its retries."""

    task: asyncio.Task[Reply]
    digest: bytes  # of path and body
    begun: asyncio.Future[Reply] | None = None  # of a stream: has the reply as soon as it can be read
    num_waiting: int = 0
    is_delivered: bool = False


@dataclass(eq=False)
class _Same:
    """The work on requests that cannot be told apart."""

    works: list[_Work] = field(default_factory=list)
    num_given_up: int = 0

    def of_retry(self) -> _Work | None:
        if self.num_given_up:
            self.num_given_up -= 1
            return None
        complete = [work for work in self.works if work.task.done()]
        lost = [work for work in complete if not work.is_delivered]
        if lost:
            return lost[0]
        busy = [work for work in self.works if not work.task.done()]
        return min(busy, key=lambda work: work.num_waiting) if busy else complete[-1] if complete else None


class _Replies:
    """The work on the requests of one episode, and which of it a request that is sent again belongs to.

    With an Idempotency-Key that is exact. Without one, a client says by `x-stainless-retry-count` that it sends a
    request again, but not which: a program may have several equal ones. So of those with the same body a retry gets, in
    this order:

        a new sample   for one that was given up because its client hung up: nobody has its answer
        an answer      that is complete and was not delivered, the oldest first
        the answer     that is still being worked on for the fewest clients, the oldest first
        the answer     that was delivered last: the client did not get it all the same
    """

    def __init__(self) -> None:
        self._by_name: dict[str, _Same] = {}
        self._num_kept = 0

    def find(self, name: str) -> _Work | None:
        """Return the work that a request which is sent again belongs to; None if it has to be done anew."""
        same = self._by_name.get(name)
        return None if same is None else same.of_retry()

    def begin(
        self, name: str, digest: bytes, work: Coroutine[Any, Any, Reply], begun: asyncio.Future[Reply] | None = None
    ) -> _Work:
        """Start work. begun: in which it puts its reply before that is complete, if it is a stream."""
        added = _Work(asyncio.ensure_future(work), digest, begun)
        self._by_name.setdefault(name, _Same()).works.append(added)
        self._num_kept += 1
        if self._num_kept > _MAX_KEPT:
            oldest = next(iter(self._by_name))
            self._num_kept -= len(self._by_name.pop(oldest).works)
        return added

    async def wait(self, name: str, work: _Work, deliver: Callable[[Reply], Coroutine[Any, Any, Any]]) -> Any:
        """Wait for work, and deliver its reply to one client. What nobody waits for is given up and not remembered."""
        work.num_waiting += 1
        try:
            if work.begun is None:
                result = await deliver(await asyncio.shield(work.task))
            else:
                await asyncio.wait({work.task, work.begun}, return_when=asyncio.FIRST_COMPLETED)
                result = await deliver(work.begun.result() if work.begun.done() else work.task.result())
                await asyncio.wait({work.task})  # all of it was read, so it ends now
            work.is_delivered = True
            return result
        finally:
            work.num_waiting -= 1
            task = work.task
            is_given_up = not task.done() and work.num_waiting == 0
            if is_given_up:
                task.cancel()
            if is_given_up or (task.done() and (task.cancelled() or task.exception() is not None)):
                self._forget(name, work, is_given_up)

    def _forget(self, name: str, work: _Work, is_given_up: bool) -> None:
        same = self._by_name.get(name)
        if same is None or work not in same.works:
            return
        same.works.remove(work)
        same.num_given_up += is_given_up
        self._num_kept -= 1

    def cancel(self) -> None:
        for same in self._by_name.values():
            for work in same.works:
                work.task.cancel()


@dataclass(eq=False)
class _Open:
    """An episode that can be reached, and its replies."""

    session: ProgramSession
    holder: TokenConnections = field(default_factory=TokenConnections)
    replies: _Replies = field(default_factory=_Replies)
    num_open: int = 0
    num_open_bytes: int = 0


class Gateway:
    """Serves episodes to programs that speak OpenAI's or Anthropic's protocol. Each has a random token of its own.

    bind: host, or host:port, to listen at. advertise_url: where programs reach it, if that is another address.
    max_image_bytes: of an image in a request, as it is stored; 0: requests have none.
    All methods are called in one event loop.
    """

    def __init__(self, bind: str = "127.0.0.1", advertise_url: str | None = None, max_image_bytes: int = 0):
        host, _, port = bind.rpartition(":") if bind.count(":") == 1 else (bind, "", "")
        self._host, self._port = host.strip("[]"), int(port or 0)
        self._advertise_url = advertise_url
        encoded = 4 * -(-max_image_bytes // 3)  # in base64
        self._max_body_bytes, self._max_open_bytes = _MAX_BODY_BYTES + encoded, _MAX_OPEN_BYTES + 2 * encoded
        self._episodes: dict[str, _Open] = {}
        self._connections = Connections()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self.url = ""  # without `/v1`, once an episode was opened
        self._starting = asyncio.Lock()

    async def open(self, session: ProgramSession) -> str:
        """Make an episode reachable, at `url`; return its token."""
        async with self._starting:
            if self._runner is None:
                await self._start()
        token = secrets.token_urlsafe(32)
        self._episodes[token] = _Open(session)
        return token

    def end(self, token: str) -> None:
        """End an episode: its token is worth nothing from now on, and requests in progress are given up."""
        episode = self._episodes.pop(token, None)
        if episode is not None:
            episode.replies.cancel()
            self._connections.release(episode.holder)

    async def close(self) -> None:
        if self._runner is not None and self._server is not None:
            runner, self._runner = self._runner, None
            self._server.close()
            await runner.cleanup()
            self._starting = asyncio.Lock()  # a lock belongs to the loop that waited for it

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._connections.watch, _errors, self._check])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        for path in _HANDLERS:
            app.router.add_post(path, self._answer, expect_handler=expect_nothing_yet)
        app.router.add_post(_COUNT, self._answer, expect_handler=expect_nothing_yet)
        runner = self._connections.runner(app, _SHUTDOWN_S, ends_handlers=True)
        await runner.setup()
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listening = socket.create_server((self._host, self._port), family=family)
            with on_failure(listening.close):
                # The loop accepts as many connections in one go as it lets wait, so that is set apart.
                self._server = await self._connections.listen(runner, listening, _ACCEPTED)
                listening.listen(_BACKLOG)
        except OSError as error:
            await runner.cleanup()
            where = f"{self._host}:{self._port}" if self._port else self._host
            raise UserError(f"agent.gateway.bind: cannot listen at {where}: {error.strerror or error}") from error
        self._runner = runner
        name, port = self._server.sockets[0].getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        self.url = (self._advertise_url or f"http://{shown}:{port}").rstrip("/").removesuffix("/v1")

    # --- requests -----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _check(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        """Pass on requests that have a token. Those without one are answered by a 401 before anything else is read."""
        episode = self._episode(request)
        self._connections.admit(request, episode.holder)
        if episode.holder.num_connections > _MAX_CONNECTIONS:
            shown = f"the episode has more than {_MAX_CONNECTIONS} connections"
            raise BadRequest(shown, status=429, code="rate_limit_exceeded")
        problem = encoding_problem(request)
        if problem is not None:
            raise BadRequest(problem, status=415)
        return await handler(request)

    def _episode(self, request: web.Request) -> _Open:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        episode = self._episodes.get(token)
        if episode is None:
            raise BadRequest("no episode has this token, or it is over", status=401, code="invalid_api_key")
        return episode

    async def _models(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name")
        model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "hotseat"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        if episode.num_open >= _MAX_OPEN:
            raise BadRequest(f"the episode has {_MAX_OPEN} open requests", status=429, code="rate_limit_exceeded")
        episode.num_open += 1
        raw = bytearray()
        try:
            await self._read(request, episode, raw)
            try:
                body = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"the body is not JSON: {error}") from None
            if not isinstance(body, dict):
                raise BadRequest("the body is not a JSON object")
            if request.path == _COUNT:
                return web.json_response(await anthropic_messages.count_tokens(body, episode.session))
            return await self._reply(episode, request, bytes(raw), body)
        finally:
            episode.num_open -= 1
            episode.num_open_bytes -= len(raw)

    async def _read(self, request: web.Request, episode: _Open, raw: bytearray) -> None:
        """Read the body of a request piece by piece, within the bounds of a request and of its episode."""
        await ask_for_body(request)
        async for piece in request.content.iter_any():
            raw += piece
            episode.num_open_bytes += len(piece)
            if len(raw) > self._max_body_bytes:
                raise BadRequest(f"the body has more than {self._max_body_bytes >> 20} MiB", status=413)
            if episode.num_open_bytes > self._max_open_bytes:
                shown = f"{self._max_open_bytes >> 20} MiB of open requests"
                raise BadRequest(f"the episode has {shown}", status=429, code="rate_limit_exceeded")

    async def _reply(
        self, episode: _Open, request: web.Request, raw: bytes, body: dict[str, Any]
    ) -> web.StreamResponse:
        """Answer a request, or hand out the first answer to a request that is sent again."""
        digest = hashlib.blake2b(request.path.encode() + b"\0" + raw, digest_size=16).digest()
        idempotency_key = request.headers.get("Idempotency-Key")
        name = f"key {idempotency_key}" if idempotency_key else f"body {digest.hex()}"
        retry_count = request.headers.get("x-stainless-retry-count", "0")
        is_again = bool(idempotency_key) or (retry_count.isdecimal() and int(retry_count) > 0)
        work = episode.replies.find(name) if is_again else None
        if work is not None and work.digest != digest:
            raise BadRequest(f"the Idempotency-Key {idempotency_key!r:.80} was used for another request", status=422)
        if work is None:
            begun = asyncio.get_running_loop().create_future() if body.get("stream") else None
            begin = None if begun is None else begun.set_result
            handling = _HANDLERS[request.path](body, episode.session, begin)
            work = episode.replies.begin(name, digest, handling, begun)
        send = _stream if body.get("stream") else _whole
        return await episode.replies.wait(name, work, lambda reply: send(request, reply))


async def _whole(request: web.Request, reply: Reply) -> web.StreamResponse:
    response = web.json_response(reply.body())
    await response.prepare(request)
    await response.write_eof()
    return response


async def _stream(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Send a reply in pieces: each at once while its answer is sampled; what is complete, in few writes."""
    await reply.begun()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    events = bytearray()
    try:
        async for event in reply.events():
            events += event
            if not reply.is_complete or len(events) > _STREAM_BYTES:
                await response.write(bytes(events))
                events.clear()
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # the engine's, which `ProgramSession.failure` passes on, or the episode is out of time
        events += reply.error(str(error))
    await response.write(bytes(events))
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> web.StreamResponse:
    """Put errors into the form that the client of the protocol reads."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(request, error.status, str(error), error.param, error.code)
    except web.HTTPNotFound:
        return _error(request, 404, f"{request.path}: not served; this gateway has {', '.join(_HANDLERS)}, /v1/models")
    except web.HTTPException as error:
        return _error(request, error.status, error.text or error.reason)
    except Exception as error:  # if it is the engine's, `ProgramSession.failure` passes it on
        logger.warning("a request to the gateway failed", exc_info=True)
        return _error(request, 500, f"this request failed: {type(error).__name__}: {error}", is_retried=False)


def _error(
    request: web.Request,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    *,
    is_retried: bool = True,
) -> web.Response:
    kind = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}.get(
        status, "api_error" if status >= 500 else "invalid_request_error"
    )
    headers = {} if is_retried else {"x-should-retry": "false"}
    if request.path.startswith("/v1/messages"):
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    response = web.json_response(body, status=status, headers=headers)
    if status in (401, 413, 415, 429):
        response.force_close()  # nothing of such a client is kept open
    return response
