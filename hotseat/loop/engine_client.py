"""A host's way to the engines: many concurrent requests, few calls.

Each engine has one exchange under way at a time: it takes the requests that have come up since the last one and brings
back what has finished. A request goes to the engine with the fewest in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence

from hotseat.cluster.group import Group
from hotseat.errors import DeadlineError
from hotseat.types import Completion, Request

EXCHANGE_WAIT_S = 1.0  # an exchange that brings nothing back returns after this, so that new requests get through


class EngineClient:
    """Belongs to one event loop. `close` fails what is still in flight."""

    _numbers = itertools.count()

    def __init__(self, engines: Group, *, timeout_s: float):
        self._engines = engines
        self._timeout_s = timeout_s
        self._name = f"{os.getpid()}-{next(self._numbers)}"
        self._outbox: dict[int, list[Request]] = {rank: [] for rank in engines.ranks}
        self._in_flight: dict[int, dict[str, asyncio.Future[Completion]]] = {rank: {} for rank in engines.ranks}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def generate(self, request: Request) -> Completion:
        """The completion of one request."""
        rank = min(self._in_flight, key=lambda rank: len(self._in_flight[rank]))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._in_flight[rank][request.id] = future
        self._outbox[rank].append(request)
        task = self._tasks.get(rank)
        if task is None or task.done():
            self._tasks[rank] = asyncio.create_task(self._exchange(rank))
        try:
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"engine {rank}: request {request.id} had no answer in {self._timeout_s:.0f} s"
            ) from None
        finally:
            self._in_flight[rank].pop(request.id, None)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _exchange(self, rank: int) -> None:
        """Exchange with one engine until nothing is in flight there. A failure reaches everybody who waits for it."""
        waiting = self._in_flight[rank]
        try:
            # Requests that are made in the same turn of the event loop travel together.
            await asyncio.sleep(0)
            while waiting:
                requests, self._outbox[rank] = self._outbox[rank], []
                [completions] = await self._engines.acall(
                    "exchange", self._name, requests, EXCHANGE_WAIT_S, ranks=[rank], timeout_s=self._timeout_s
                )
                self._settle(waiting, completions)
                await asyncio.sleep(0)
        except Exception as error:
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)

    def _settle(self, waiting: dict[str, asyncio.Future[Completion]], completions: Sequence[Completion]) -> None:
        for completion in completions:
            future = waiting.get(completion.request_id)
            if future is not None and not future.done():
                future.set_result(completion)
