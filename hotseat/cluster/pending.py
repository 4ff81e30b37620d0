"""Calls under way: waiting for their results, and the errors that say which process failed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from hotseat.cluster.activity import activity
from hotseat.cluster.worker_process import Failure
from hotseat.errors import DeadlineError, RunError, WorkerError

Result_co = TypeVar("Result_co", covariant=True)

CallObserver = Callable[[str, int, str, float, float], object]  # group, rank, method, start and end (`time.time`)


class Callee(Protocol):
    """The group whose processes were called, as far as a `Pending` knows it."""

    name: str
    on_call: CallObserver | None

    def deadline(self, timeout_s: float | None) -> float:
        """Return the seconds to wait; None stands for the group's default."""

    def open(self, rank: int, method: str, future: Future[Any]) -> Any:
        """Return the result in a future that is done; raise `WorkerError` if the call failed."""

    def describe(self, rank: int) -> str:
        """Describe what the process of a silent rank is doing, as far as can be seen from outside."""


class Pending(Generic[Result_co]):
    """Calls that were started. `result` waits for them; so does `await`."""

    def __init__(self, group: Callee, method: str, futures: Mapping[int, Future[Any]], timeout_s: float | None = None):
        self._group = group
        self._method = method
        self._timeout_s = timeout_s
        self.futures = dict(futures)
        self._notify_observer()

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that were called, in the order of the results."""
        return sorted(self.futures)

    def done(self) -> bool:
        """Tell whether every rank has returned or failed."""
        return all(future.done() for future in self.futures.values())

    def result(self, timeout_s: float | None = None) -> list[Result_co]:
        """Return one result per rank, in rank order. Waits at most `timeout_s` from now; None: as started."""
        timeout_s = self._group.deadline(self._timeout_s if timeout_s is None else timeout_s)
        until, waiting = time.monotonic() + timeout_s, set(self.futures.values())
        results: dict[int, Any] = {}
        with self._waiting():
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, timeout=max(0.0, until - time.monotonic()), return_when=concurrent.futures.FIRST_COMPLETED
                )
                if not done:
                    raise self._late(timeout_s, results)
                self._open(done, results)
        return [results[rank] for rank in sorted(results)]

    async def aresult(self, timeout_s: float | None = None) -> list[Result_co]:
        """Do as `result` does, in a coroutine: other tasks run while this one waits."""
        timeout_s = self._group.deadline(self._timeout_s if timeout_s is None else timeout_s)
        until, loop = time.monotonic() + timeout_s, asyncio.get_running_loop()
        answered: asyncio.Queue[Future[Any]] = asyncio.Queue()

        def enqueue(future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so nothing waits any more
                loop.call_soon_threadsafe(answered.put_nowait, future)

        for future in self.futures.values():
            future.add_done_callback(enqueue)
        results: dict[int, Any] = {}
        with self._waiting():
            while len(results) < len(self.futures):
                try:
                    future = await asyncio.wait_for(answered.get(), max(0.0, until - time.monotonic()))
                except TimeoutError:
                    raise self._late(timeout_s, results) from None
                self._open({future}, results)
        return [results[rank] for rank in sorted(results)]

    def __await__(self) -> Generator[Any, None, list[Result_co]]:
        return self.aresult().__await__()

    def _notify_observer(self) -> None:
        """Have the group's observer called when each of these calls ends."""
        observer, name, method, started_s = self._group.on_call, self._group.name, self._method, time.time()
        if observer is None:
            return

        def notify(rank: int) -> Callable[[Future[Any]], object]:
            return lambda _: observer(name, rank, method, started_s, time.time())

        for rank, future in self.futures.items():
            future.add_done_callback(notify(rank))

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        whom = [f"{self._group.name} rank {rank}" for rank in self.ranks]
        return activity.doing(f"waits for {', '.join(whom)} to answer {self._method!r}", whom)

    def _open(self, done: set[Future[Any]], results: dict[int, Any]) -> None:
        for rank, future in sorted(self.futures.items()):
            if future in done:
                results[rank] = self._group.open(rank, self._method, future)

    def _late(self, waited_s: float, results: Mapping[int, Any]) -> DeadlineError:
        missing = sorted(set(self.futures) - set(results))
        states = "; ".join(f"rank {rank} {self._group.describe(rank)}" for rank in missing[:8])
        error = DeadlineError(
            f"{self._group.name} rank {missing[0]}: no answer to {self._method!r} in {waited_s:.1f} s"
            f" ({len(results)} of {len(self.futures)} ranks answered; missing: {states}"
            f"{', ...' if len(missing) > 8 else ''}). Set cluster.call_timeout_s higher if the work takes that long."
        )
        error.awaited = tuple(f"{self._group.name} rank {rank}" for rank in missing)
        return error


def worker_error(group: str, rank: int, method: str, message: str, remote_traceback: str = "") -> WorkerError:
    """Make a WorkerError with the attributes `group`, `rank`, `method` and `remote_traceback`."""
    error = WorkerError(f"{group} rank {rank}: {message}" + (f"\n{remote_traceback}" if remote_traceback else ""))
    error.group, error.rank, error.method, error.remote_traceback = group, rank, method, remote_traceback
    return error


def under_way_at_restart(group: str, rank: int, method: str) -> WorkerError:
    """Make the error of a call whose process was replaced: it reports a death."""
    error = worker_error(group, rank, method, f"{method!r} was under way when the rank was restarted")
    error.is_death = True
    return error


def reports_death(error: BaseException | None) -> bool:
    """Tell whether an error, raised here or in a worker, reports the death of a process."""
    while error is not None:
        if isinstance(error, RunError) and error.is_death:
            return True
        error = error.__cause__
    return False


def raise_failure(group: str, rank: int, method: str, failure: Failure) -> None:
    """Raise what happened in the worker, with the exception itself as the cause where it could travel."""
    raise worker_error(
        group, rank, method, f"{method!r} raised {failure.kind}: {failure.message}", failure.traceback
    ) from failure.exception()
