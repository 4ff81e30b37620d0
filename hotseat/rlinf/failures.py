"""Failures of calls, for whoever waits for another call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Failures"]

_Task = tuple[
    Future[Any], Callable[[Future[Any]], Any], Future[Any]
]  # a call, how its result is opened, and its result


class Failures:
    """Opens the results of calls, and keeps the first failure that nobody has been told of.

    One thread takes calls that have ended from a queue and opens them. It is not done where they end: that is a thread
    of Ray, and a dead process is ended with Ray's help. The thread waits for the queue and ends with the process.
    """

    def __init__(self) -> None:
        self.first: Future[Any] = Future()  # has the failure
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task] | None = None

    def watch(self, call: Future[Any], opened: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Return a future with the opened result of the call, or with its failure."""
        with self._lock:
            if self._tasks is None:
                self._tasks = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self._tasks,), daemon=True).start()
        tasks, result = self._tasks, Future[Any]()
        call.add_done_callback(lambda done: tasks.put((done, opened, result)))
        return result

    def tell(self, failure: BaseException) -> None:
        """Forget a failure: it is raised to whoever waits for the call that failed."""
        with self._lock:
            if self.first.done() and self.first.exception() is failure:
                self.first = Future()

    def _work(self, tasks: queue.SimpleQueue[_Task]) -> None:
        while True:
            call, opened, result = tasks.get()
            try:
                value = opened(call)
            except BaseException as failure:  # it belongs to whoever waits
                with self._lock:
                    if not self.first.done():
                        self.first.set_exception(failure)
                    result.set_exception(failure)
            else:
                result.set_result(value)
