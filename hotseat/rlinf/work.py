"""Operations that run beside their caller, in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class AsyncWork:
    """An operation under way: `wait` for it, or `await work.async_wait()`."""

    def __init__(self, future: Future[Any]):
        self._future = future

    def wait(self) -> Any:
        """Wait for the end of the operation and return its result."""
        return self._future.result()

    async def async_wait(self) -> Any:
        """Do as `wait` does, in a coroutine: other tasks run meanwhile."""
        return await asyncio.wrap_future(self._future)

    def done(self) -> bool:
        return self._future.done()


class AsyncRouteWork:
    """Operations under way that have one result together, made from theirs: wait for it as for an `AsyncWork`."""

    def __init__(self, works: Sequence[AsyncWork], finish: Callable[[list[Any]], Any]):
        self._works = works
        self._finish = finish

    def wait(self) -> Any:
        """Wait for the end of all operations and return their result."""
        return self._finish([work.wait() for work in self._works])

    async def async_wait(self) -> Any:
        """Do as `wait` does, in a coroutine: other tasks run meanwhile."""
        return self._finish([await work.async_wait() for work in self._works])

    def done(self) -> bool:
        return all(work.done() for work in self._works)


_Tasks = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]  # None: there are no more


class Lane:
    """Runs operations one after another.

    Until the first one that is not waited for, they run in the thread of the caller; from then on in a thread of the
    lane, so that a later operation never overtakes an earlier one. That thread takes operations from a queue, sets
    their futures, and ends with the process or by `end`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: _Tasks | None = None

    def run(self, operation: Callable[[], Any]) -> Any:
        """Run the operation after those before it, and return its result."""
        return operation() if self._tasks is None else self.start(operation).wait()

    def start(self, operation: Callable[[], Any]) -> AsyncWork:
        """Have the operation run after those before it."""
        with self._lock:
            if self._tasks is None:
                self._tasks = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._tasks,), daemon=True).start()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # whoever stops waiting for the operation does not stop it
        self._tasks.put((_on_callers_streams(operation), future))
        return AsyncWork(future)

    def end(self) -> None:
        """End the lane's thread after the operations under way. No other can be run then."""
        with self._lock:
            if self._tasks is not None:
                self._tasks.put(None)


def _on_callers_streams(operation: Callable[[], Any]) -> Callable[[], Any]:
    """Have the operation run on the CUDA device and streams of the calling thread: each thread has its own."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return operation
    streams = [cuda.current_stream(device) for device in range(cuda.device_count())]
    current = cuda.current_stream()

    def run() -> Any:
        with contextlib.ExitStack() as entered:
            for stream in (*streams, current):  # the last one's device is the current one then
                entered.enter_context(cuda.stream(stream))
            return operation()

    return run


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        operation, future = task
        del task
        try:
            result = operation()
        except BaseException as error:  # it belongs to whoever waits for the operation
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del operation, future  # or this thread would keep what was put or taken until its next operation
