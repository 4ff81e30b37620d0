"""Failures of calls, for whoever waits for another call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass
class Call:
    """A call to the workers of a group. is_reported: a failure of it was raised, so others of it are of no interest."""

    is_reported: bool = False


# The result of one worker, how it is opened, the opened result, and the call that it belongs to.
_Task = tuple[Future[Any], Callable[[Future[Any]], Any], Future[Any], Call]


class Failures:
    """Opens the results of calls, and keeps the first failure of a call whose failures were not raised.

    One thread takes calls that have ended from a queue and opens them. It is not done where they end: that is a thread
    of Ray, and a dead process is ended with Ray's help. The thread waits for the queue and ends with the process.
    """

    def __init__(self) -> None:
        self.first: Future[Any] = Future()  # has the failure
        self._failed = Call()  # whose failure it is
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task] | None = None

    def watch(self, worker: Future[Any], opened: Callable[[Future[Any]], Any], call: Call) -> Future[Any]:
        """Return a future with the opened result of one worker in a call, or with its failure."""
        with self._lock:
            if self._tasks is None:
                self._tasks = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self._tasks,), daemon=True).start()
        tasks, result = self._tasks, Future[Any]()
        worker.add_done_callback(lambda done: tasks.put((done, opened, result, call)))
        return result

    def report(self, failure: BaseException, call: Call | None) -> None:
        """Forget a failure that is raised now, and all others of its call. None: it is `first`, of whatever call."""
        with self._lock:
            if call is None and self.first.done() and self.first.exception() is failure:
                call = self._failed
            if call is not None:
                call.is_reported = True
            if self.first.done() and self._failed.is_reported:
                self.first = Future()

    def _work(self, tasks: queue.SimpleQueue[_Task]) -> None:
        while True:
            worker, opened, result, call = tasks.get()
            try:
                value = opened(worker)
            except BaseException as failure:  # it belongs to whoever waits
                with self._lock:
                    if not call.is_reported and not self.first.done():
                        self._failed = call
                        self.first.set_exception(failure)
                    result.set_exception(failure)
            else:
                result.set_result(value)
