"""The work on an episode's requests, and which of it a request that is sent again belongs to.

With an Idempotency-Key that is exact. Without one, a client says by `x-stainless-retry-count` that it sends a request
again, but not which: a program may have several equal ones. So of those with the same body a retry gets, in this order:

    a new sample   for one that was given up because its client hung up: nobody has its answer
    an answer      that is complete and was not delivered, the oldest first
    the answer     that is still being worked on for the fewest clients, the oldest first
    the answer     that was delivered last: the client did not get it all the same
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hotseat.agents.gateway.reply import Reply

_MAX_KEPT = 4096  # replies of one episode


@dataclass(eq=False)
class Work:
    """The work on a request, for which several clients may wait: the first one, and its retries."""

    task: asyncio.Task[Reply]
    digest: bytes  # of path and body
    begun: asyncio.Future[Reply] | None = None  # of a stream: has the reply as soon as it can be read
    num_waiting: int = 0
    is_delivered: bool = False


@dataclass(eq=False)
class _Same:
    """The work on requests that cannot be told apart."""

    works: list[Work] = field(default_factory=list)
    num_given_up: int = 0

    def of_retry(self) -> Work | None:
        if self.num_given_up:
            self.num_given_up -= 1
            return None
        complete = [work for work in self.works if work.task.done()]
        lost = [work for work in complete if not work.is_delivered]
        if lost:
            return lost[0]
        busy = [work for work in self.works if not work.task.done()]
        return min(busy, key=lambda work: work.num_waiting) if busy else complete[-1] if complete else None


class Replies:
    """The work of one episode, by what identifies a request."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Same] = {}
        self._num_kept = 0

    def find(self, name: str) -> Work | None:
        """Return the work that a request which is sent again belongs to; None if it has to be done anew."""
        same = self._by_name.get(name)
        return None if same is None else same.of_retry()

    def begin(
        self,
        name: str,
        digest: bytes,
        work: Coroutine[Any, Any, Reply],
        begun: asyncio.Future[Reply] | None = None,
    ) -> Work:
        """Start work. begun: in which it puts its reply before that is complete, if it is a stream."""
        added = Work(asyncio.ensure_future(work), digest, begun)
        self._by_name.setdefault(name, _Same()).works.append(added)
        self._num_kept += 1
        if self._num_kept > _MAX_KEPT:
            oldest = next(iter(self._by_name))
            self._num_kept -= len(self._by_name.pop(oldest).works)
        return added

    async def wait(self, name: str, work: Work, deliver: Callable[[Reply], Coroutine[Any, Any, Any]]) -> Any:
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

    def _forget(self, name: str, work: Work, is_given_up: bool) -> None:
        same = self._by_name.get(name)
        if same is None or work not in same.works:
            return
        same.works.remove(work)
        same.num_given_up += is_given_up
        self._num_kept -= 1

    def cancel(self) -> None:
        """Give up everything that is in progress."""
        for same in self._by_name.values():
            for work in same.works:
                work.task.cancel()
