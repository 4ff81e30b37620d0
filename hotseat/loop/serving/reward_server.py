"""The HTTP server of a reward model: OpenRLHF's protocol, with health, metrics and a token."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hotseat.config.urls import is_loopback
from hotseat.connections import (
    Connections,
    TokenConnections,
    ask_for_body,
    bound_at,
    encoding_problem,
    expect_nothing_yet,
)
from hotseat.errors import RunError, UserError
from hotseat.loop.serving.batching import Batcher, Rejected, Round, ScoresTexts
from hotseat.rewards.addresses import TOKEN

ROUTE = "/get_reward"
_ROUTES = f"POST {ROUTE} (or /), GET /health, GET /metrics"
_BACKLOG = 1024  # connections that wait to be accepted
_MAX_CONNECTIONS = 4096  # of those that have the token

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ServerOptions:
    """Settings of a server. stop_timeout_s: how long open requests may take after it was stopped."""

    host: str = "127.0.0.1"
    port: int = 5000
    token: str | None = field(default=None, repr=False)
    max_batch_tokens: int = 16_384
    max_request_bytes: int = 16 << 20
    max_waiting: int = 1024
    stop_timeout_s: float = 30.0


def bound_socket(options: ServerOptions, hint: str = "--host 127.0.0.1") -> socket.socket:
    """Bind the server's address, before a model loads. It listens later.

    hint: the option by which only this machine is served. Raises `UserError` for an address that cannot be used, or
    that others can reach while there is no token.
    """
    if options.token is None and not is_loopback(options.host):
        raise UserError(
            f"host {options.host}: other machines could use the server, and there is no token: set the environment"
            f" variable {TOKEN} here and where requests come from, or serve only this machine ({hint})"
        )
    try:
        return bound_at(options.host, options.port)
    except OSError as error:
        raise UserError(f"cannot listen on port {options.port} of {options.host}: {error.strerror or error}") from None


class _Metrics:
    """Counts for Prometheus."""

    def __init__(self, num_waiting: Callable[[], float]):
        registry = CollectorRegistry()
        self.registry = registry
        self.requests = Counter("hotseat_rm_requests", "Requests, by status.", ["status"], registry=registry)
        self.texts = Counter("hotseat_rm_texts", "Texts scored.", registry=registry)
        self.tokens = Counter("hotseat_rm_tokens", "Tokens scored, without padding.", registry=registry)
        self.rounds = Counter("hotseat_rm_rounds", "Rounds of requests scored together.", registry=registry)
        self.forwards = Counter("hotseat_rm_forwards", "Forwards of the model.", registry=registry)
        self.seconds = Histogram("hotseat_rm_request_seconds", "Seconds from request to answer.", registry=registry)
        waiting = Gauge("hotseat_rm_waiting_requests", "Requests that wait for the next round.", registry=registry)
        waiting.set_function(num_waiting)

    def note(self, facts: Round) -> None:
        self.rounds.inc()
        self.texts.inc(facts.num_texts)
        self.tokens.inc(facts.num_tokens)
        self.forwards.inc(facts.num_forwards)


class RewardServer:
    """Answers requests with the rewards of a model."""

    def __init__(self, model: ScoresTexts, options: ServerOptions):
        self._options = options
        self._batcher = Batcher(model, options.max_batch_tokens, lambda facts: self._metrics.note(facts))
        self._metrics = _Metrics(lambda: self._batcher.num_waiting)
        self._connections, self._holder = Connections(), TokenConnections()

    async def serve(self, bound: socket.socket, stop: asyncio.Event, is_ready: Callable[[], object]) -> None:
        """Serve at a bound socket until `stop` is set; then finish the open requests. is_ready: called when it listens.

        Raises if the task that scores ends by itself.
        """
        middlewares = [self._connections.watch, self._with_reason, self._check]
        app = web.Application(client_max_size=self._options.max_request_bytes, middlewares=middlewares)
        app.router.add_post(ROUTE, self._reward, expect_handler=expect_nothing_yet)
        app.router.add_post("/", self._reward, expect_handler=expect_nothing_yet)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        runner = self._connections.runner(app, self._options.stop_timeout_s)
        server: asyncio.Server | None = None
        scoring = asyncio.create_task(self._batcher.run())
        stopped = asyncio.create_task(stop.wait())
        await runner.setup()
        try:
            server = await self._connections.listen(runner, bound, _BACKLOG)
            is_ready()
            await asyncio.wait([scoring, stopped], return_when=asyncio.FIRST_COMPLETED)
            if scoring.done():
                raise RunError("the thread that scores ended") from scoring.exception()
        finally:
            if server is not None:
                server.close()
            await runner.cleanup()
            for task in (scoring, stopped):
                task.cancel()
            await asyncio.gather(scoring, stopped, return_exceptions=True)

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        await ask_for_body(request)
        texts = _texts(await request.read())
        if isinstance(texts, str):
            return _error(422, texts)
        if self._batcher.num_waiting >= self._options.max_waiting:
            return _error(
                429, f"{self._batcher.num_waiting} requests wait already: send it again later", {"Retry-After": "1"}
            )
        if not texts:
            return web.json_response({"rewards": [], "scores": [], "extra_logs": {}})
        try:
            scored = await self._batcher.submit(texts)
        except Rejected as rejection:
            return _error(422, str(rejection))
        rewards = [reward if math.isfinite(reward) else None for reward in scored.rewards]
        return web.json_response({"rewards": rewards, "scores": rewards, "extra_logs": {}})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "waiting": self._batcher.num_waiting})

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @web.middleware
    async def _with_reason(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        begun_s = time.perf_counter()
        try:
            response = await handler(request)
        except web.HTTPRequestEntityTooLarge:
            mib = self._options.max_request_bytes / 2**20
            response = _error(413, f"the request is larger than {mib:g} MiB: send fewer texts at a time")
        except web.HTTPException as error:
            response = _error(error.status, f"{request.method} {request.path}: {error.reason}; there are {_ROUTES}")
        except Exception as error:
            response = _error(500, f"{type(error).__name__}: {error}")
        if request.method == "POST":
            self._metrics.requests.labels(str(response.status)).inc()
            self._metrics.seconds.observe(time.perf_counter() - begun_s)
        return response

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass on requests that have the token, and what asks for the health. No body of others is read."""
        if request.path == "/health":
            return await handler(request)
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        is_bearer = kind.lower() == "bearer"
        if self._options.token is not None and not (is_bearer and _is_same(token.strip(), self._options.token)):
            text = (
                f"the header 'Authorization: Bearer TOKEN' is missing or wrong; {TOKEN} has the token where this runs"
            )
            return _closing(_error(401, text, {"WWW-Authenticate": "Bearer"}))
        self._connections.admit(request, self._holder)
        if self._holder.num_connections > _MAX_CONNECTIONS:
            return _closing(_error(429, f"there are {_MAX_CONNECTIONS} connections already", {"Retry-After": "1"}))
        problem = encoding_problem(request)
        return await handler(request) if problem is None else _closing(_error(415, problem))


def _is_same(token: str, expected: str) -> bool:
    """Compare tokens in constant time; bytes of a header that are no UTF-8 are lone surrogates here."""
    return hmac.compare_digest(*(each.encode(errors="surrogateescape") for each in (token, expected)))


def _texts(body: bytes) -> list[str] | str:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"the request is no JSON: {error}"
    if not isinstance(message, dict) or "query" not in message:
        return "the request is no JSON object with 'query', the list of texts to score"
    texts = message["query"]
    if not isinstance(texts, list):
        return f"'query' is a {type(texts).__name__}, not a list of texts"
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            return f"query[{number}] is a {type(text).__name__}, not a text"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"query[{number}] has a lone surrogate, which is no character: {type(error).__name__}: {error}"
    for key in ("prompts", "labels"):
        values = message.get(key)
        if values is not None and (not isinstance(values, list) or len(values) != len(texts)):
            return f"{key!r} is no list with an entry for each of the {len(texts)} texts in 'query'"
    return texts


def _error(status: int, reason: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=headers)


def _closing(response: web.Response) -> web.Response:
    """Have an answer end its connection: the body of its request is not read."""
    response.force_close()
    return response


def run_server(
    model: ScoresTexts, bound: socket.socket, options: ServerOptions, is_ready: Callable[[], object]
) -> None:
    """Serve until SIGTERM or Ctrl-C, and then finish the open requests."""

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await RewardServer(model, options).serve(bound, stop, is_ready)

    asyncio.run(serve())
