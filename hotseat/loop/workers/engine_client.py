"""Client of a rollout host for the engines: many concurrent requests, few calls.

Requests made in the same iteration of the event loop are submitted together. One fetch per engine waits for the next
completions. A request goes to the engine with the fewest requests in flight, of those that this host prefers if any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotseat.cluster import Calling, WorkerGroup, reports_death
from hotseat.errors import DeadlineError, RunError
from hotseat.types import Completion, Request, WhenSampled

FETCH_WAIT_S = 5.0  # a fetch without completions returns after this: every wait is bounded


@dataclass(frozen=True)
class FailedRequest:
    """The outcome of a request that its engine refused or could not finish."""

    request_id: str
    error: Exception


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of a request that streams, before it is complete. start: how many were sampled before them."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]


class TakesRequests(Protocol):
    """Calls that a client makes to an engine's process."""

    def submit(self, client: str, requests: Sequence[Request]) -> None:
        """Take requests of a client."""

    def fetch(self, client: str, wait_s: float) -> list[Completion | FailedRequest | SampledTokens]:
        """Return the outcomes of a client's requests, waiting at most `wait_s` for the first.

        Of requests that stream, tokens are returned as they are sampled.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that are not waited for any more."""


@dataclass(eq=False)
class _OpenRequest:
    """A request that is waited for. since_s: when it was sent or ended last. among: those of the same engine, by id."""

    request: Request
    future: asyncio.Future[Completion]
    when_sampled: WhenSampled | None = None
    token_ids: tuple[int, ...] = ()  # of a request that streams, so far
    since_s: float = 0.0
    among: dict[str, _OpenRequest] = field(default_factory=dict)


class EngineClient:
    """Sends requests from one event loop to the engines.

    When an engine dies, its requests alone are sent again, to the other engines; without any they wait. `rejoin` brings
    its replacement in. Every other error fails the requests that it concerns, and no others.

    name: distinguishes this client from others of the same engines. preferred: ranks of the engines that get requests
    as long as one of them is alive; none: all.
    when_lost: called in the event loop with the death of an engine, and whether any is left.
    """

    def __init__(
        self,
        engines: WorkerGroup[TakesRequests],
        name: str,
        *,
        timeout_s: float,
        when_lost: Callable[[Exception, bool], object] = lambda error, is_any_left: None,
        preferred: Collection[int] = (),
    ):
        self._engines = engines
        self._timeout_s = timeout_s
        self._when_lost = when_lost
        self._preferred = frozenset(preferred)
        self._fetch_wait_s = min(FETCH_WAIT_S, timeout_s / 4)
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first request
        # By request id, oldest first. A rank that is not here is dead.
        self._in_flight: dict[int, dict[str, _OpenRequest]] = {rank: {} for rank in engines.ranks}
        self._without_engine: dict[str, _OpenRequest] = {}
        self._listening: dict[str, WhenSampled] = {}
        self._outbox: dict[int, list[_OpenRequest]] = {}
        self._fetching: dict[int, dict[str, _OpenRequest]] = {}  # for which of `_in_flight` a fetch is on its way
        self._tasks: set[asyncio.Task[None]] = set()  # to which the event loop refers only weakly
        self._to_abort: dict[int, dict[str, None]] = {}  # by rank, each id once
        self.num_sent_again = 0

    @property
    def has_engines(self) -> bool:
        """Tell whether an engine is left. Called in the event loop."""
        return bool(self._in_flight)

    async def generate(self, request: Request) -> Completion:
        """Return the completion of one request. If the caller is cancelled, the request is aborted."""
        self._loop = asyncio.get_running_loop()
        opened = _OpenRequest(request, self._loop.create_future(), self._listening.pop(request.id, None))
        self._send([opened])
        try:
            return await opened.future
        except asyncio.CancelledError:
            self._abort_later(opened)
            raise
        finally:
            opened.among.pop(request.id, None)

    def listen(self, request_id: str, when_sampled: WhenSampled) -> None:
        """Call a function with all tokens of the next request of this id that streams, whenever there are more of them.

        Called in the event loop, as the function is. After the death of an engine the tokens begin anew: they are the
        same, as far as the other engine gives the same tokens for the same seed.
        """
        self._listening[request_id] = when_sampled

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: their completions have the tokens sampled so far. Called in the event loop."""
        for name in request_ids:
            for waiting in self._in_flight.values():
                if name in waiting:
                    # A new limit: who ends a request at the old one still waits for what was sampled.
                    waiting[name].since_s = time.monotonic()
                    self._abort_later(waiting[name])
            if name in self._without_engine:
                self._without_engine[name].future.cancel()

    def rejoin(self, engines: WorkerGroup[TakesRequests], ranks: Sequence[int]) -> None:
        """Send requests to engines that were replaced, and hold the weights that are served. Called in any thread."""
        if self._loop is None:
            self._replace(engines, ranks)
            return
        with suppress(RuntimeError):  # the event loop is closed, so nothing waits any more
            self._loop.call_soon_threadsafe(self._replace, engines, ranks)

    def _replace(self, engines: WorkerGroup[TakesRequests], ranks: Sequence[int]) -> None:
        self._engines = engines
        # The driver may have seen a death before this client did.
        orphans = [opened for rank in ranks for opened in self._take_from(rank)]
        self._in_flight |= {rank: {} for rank in ranks}
        without, self._without_engine = self._without_engine, {}
        self._send([*without.values(), *orphans])

    def _take_from(self, rank: int) -> list[_OpenRequest]:
        self._outbox.pop(rank, None)
        opened = [opened for opened in self._in_flight.pop(rank, {}).values() if not opened.future.done()]
        self.num_sent_again += len(opened)
        return opened

    def _send(self, requests: Sequence[_OpenRequest]) -> None:
        now = time.monotonic()
        for opened in requests:
            ranks = [rank for rank in self._in_flight if rank in self._preferred] or self._in_flight
            rank = min(ranks, key=lambda rank: len(self._in_flight[rank]), default=None)
            opened.since_s = now
            opened.among = self._without_engine if rank is None else self._in_flight[rank]
            opened.among[opened.request.id] = opened
            if rank is None:
                continue
            if rank not in self._outbox:
                self._outbox[rank] = []
                self._begin(self._submit(rank))
            self._outbox[rank].append(opened)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, rank: int) -> None:
        await asyncio.sleep(0)
        outbox, waiting = self._outbox.pop(rank, []), self._in_flight.get(rank)
        requests = [opened.request for opened in outbox if not opened.future.done()]
        if waiting is None or not requests:
            return  # it died, and they were sent elsewhere
        try:
            await self._engine(rank).acall(TakesRequests.submit, self.name, requests)
        except Exception as error:
            self._handle(error, rank, waiting, outbox)
            return
        # A fetch of the engine that this one replaced may still be on its way.
        if self._in_flight.get(rank) is waiting and self._fetching.get(rank) is not waiting:
            self._fetching[rank] = waiting
            self._begin(self._fetch(rank, waiting))

    async def _fetch(self, rank: int, waiting: dict[str, _OpenRequest]) -> None:
        try:
            while waiting and self._in_flight.get(rank) is waiting:
                [outcomes] = await self._engine(rank).acall(TakesRequests.fetch, self.name, self._fetch_wait_s)
                for outcome in outcomes:
                    if isinstance(outcome, SampledTokens):
                        shown = waiting.get(outcome.request_id)
                        if shown is not None and shown.among is waiting:  # not sent to another engine since
                            _show(shown, outcome)
                        continue
                    opened = waiting.pop(outcome.request_id, None)
                    if opened is None or opened.future.done():
                        continue
                    if isinstance(outcome, FailedRequest):
                        opened.future.set_exception(outcome.error)
                    else:
                        opened.future.set_result(outcome)
                self._fail_overdue(rank, waiting)
        except Exception as error:
            self._handle(error, rank, waiting, list(waiting.values()))
        finally:
            if self._fetching.get(rank) is waiting:
                del self._fetching[rank]

    def _engine(self, rank: int) -> Calling[TakesRequests]:
        return self._engines.on(rank).within(self._timeout_s)

    def _handle(
        self, error: Exception, rank: int, waiting: dict[str, _OpenRequest], concerned: Sequence[_OpenRequest]
    ) -> None:
        """Send the requests of an engine that died elsewhere; fail those that another error concerns."""
        if self._in_flight.get(rank) is not waiting:
            return  # its death was seen before, and its requests have been sent again
        if not reports_death(error):
            _fail(concerned, error)
            return
        orphans = self._take_from(rank)
        self._send(orphans)
        self._when_lost(error, bool(self._in_flight))

    def _fail_overdue(self, rank: int, waiting: dict[str, _OpenRequest]) -> None:
        now = time.monotonic()
        for name, opened in list(waiting.items()):
            if now - opened.since_s < self._timeout_s:
                continue
            error = DeadlineError(f"engine {rank}: request {name} had no answer in {self._timeout_s:.0f} s")
            _fail([opened], error)

    def _abort_later(self, opened: _OpenRequest) -> None:
        """Abort a request together with all others of this iteration of the event loop."""
        for rank, waiting in self._in_flight.items():
            if opened.among is waiting:
                if not self._to_abort:
                    asyncio.get_running_loop().call_soon(self._send_aborts)
                self._to_abort.setdefault(rank, {})[opened.request.id] = None

    def _send_aborts(self) -> None:
        to_abort, self._to_abort = self._to_abort, {}
        for rank, names in to_abort.items():
            with suppress(RunError):  # an engine that is gone has nothing to abort
                self._engine(rank).start(TakesRequests.abort, list(names))


def _show(opened: _OpenRequest, sampled: SampledTokens) -> None:
    if opened.when_sampled is not None and not opened.future.done():
        opened.token_ids = opened.token_ids[: sampled.start] + sampled.token_ids
        opened.when_sampled(opened.token_ids)


def engines_of_host(host: int, num_hosts: int, num_engines: int) -> Sequence[int]:
    """Return the engines that a host with simulators prefers, so that its stages are answered by few of them, at once.

    Without it every engine would get a few requests of each stage of each host, and answer them one after another. It
    takes hosts and engines of which one number divides the other; none: all engines.
    """
    if num_hosts % num_engines == 0:
        return (host % num_engines,)
    if num_engines % num_hosts == 0:
        each = num_engines // num_hosts
        return range(host * each, (host + 1) * each)
    return ()


def _fail(requests: Iterable[_OpenRequest], error: Exception) -> None:
    for opened in requests:
        if not opened.future.done():
            opened.future.set_exception(error)
