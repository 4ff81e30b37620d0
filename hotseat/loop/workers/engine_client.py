"""Client of a rollout host for the engines: many concurrent requests, few calls.

Requests made in the same iteration of the event loop are submitted together. One fetch per engine waits for the next
completions. A request goes to the engine with the fewest requests in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from hotseat.cluster import Calling, WorkerGroup
from hotseat.errors import DeadlineError
from hotseat.types import Completion, Request

FETCH_WAIT_S = 5.0  # a fetch without completions returns after this: every wait is bounded


class TakesRequests(Protocol):
    """Calls that a client makes to an engine's process."""

    def submit(self, client: str, requests: Sequence[Request]) -> None:
        """Take requests of a client."""

    def fetch(self, client: str, wait_s: float) -> list[Completion]:
        """Return the completions for a client, waiting at most `wait_s` for the first."""


class EngineClient:
    """Sends requests from one event loop to the engines. A failed engine fails all requests that wait for it."""

    _numbers = itertools.count()

    def __init__(self, engines: WorkerGroup[TakesRequests], *, timeout_s: float):
        self._engines = engines
        self._timeout_s = timeout_s
        self._fetch_wait_s = min(FETCH_WAIT_S, timeout_s / 4)
        self._name = f"{os.getpid()}-{next(self._numbers)}"
        self._outbox: dict[int, list[Request]] = {rank: [] for rank in engines.ranks}
        # By request id, oldest first.
        self._in_flight: dict[int, dict[str, asyncio.Future[Completion]]] = {rank: {} for rank in engines.ranks}
        self._since_s: dict[str, float] = {}
        self._fetching: dict[int, asyncio.Task[None]] = {}
        self._submitting: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Completion:
        """Return the completion of one request."""
        rank = min(self._in_flight, key=lambda rank: len(self._in_flight[rank]))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._in_flight[rank][request.id] = future
        self._since_s[request.id] = time.monotonic()
        if not self._outbox[rank]:
            task = asyncio.create_task(self._submit(rank))
            self._submitting.add(task)
            task.add_done_callback(self._submitting.discard)
        self._outbox[rank].append(request)
        try:
            return await future
        finally:
            self._in_flight[rank].pop(request.id, None)
            del self._since_s[request.id]

    async def _submit(self, rank: int) -> None:
        """Send the requests made in this iteration of the event loop."""
        await asyncio.sleep(0)
        requests, self._outbox[rank] = self._outbox[rank], []
        try:
            await self._engine(rank).acall(TakesRequests.submit, self._name, requests)
        except Exception as error:
            self._fail([self._in_flight[rank].get(request.id) for request in requests], error)
            return
        fetching = self._fetching.get(rank)
        if fetching is None or fetching.done():
            self._fetching[rank] = asyncio.create_task(self._fetch(rank))

    async def _fetch(self, rank: int) -> None:
        """Fetch completions until no request is in flight."""
        waiting = self._in_flight[rank]
        try:
            while waiting:
                [completions] = await self._engine(rank).acall(TakesRequests.fetch, self._name, self._fetch_wait_s)
                for completion in completions:
                    future = waiting.pop(completion.request_id, None)
                    if future is not None and not future.done():
                        future.set_result(completion)
                self._fail_overdue(rank)
        except Exception as error:
            self._fail(waiting.values(), error)

    def _engine(self, rank: int) -> Calling[TakesRequests]:
        return self._engines.on(rank).within(self._timeout_s)

    def _fail_overdue(self, rank: int) -> None:
        now = time.monotonic()
        for name, future in list(self._in_flight[rank].items()):
            if now - self._since_s[name] < self._timeout_s:
                return
            error = DeadlineError(f"engine {rank}: request {name} had no answer in {self._timeout_s:.0f} s")
            self._fail([future], error)

    def _fail(self, futures: Iterable[asyncio.Future[Completion] | None], error: Exception) -> None:
        for future in list(futures):
            if future is not None and not future.done():
                future.set_exception(error)
