"""Failures of calls, for whoever waits for another call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from hotseat.rlinf.work import Lane


@dataclass
class Call:
    """A call to the workers of a group. is_reported: a failure of it was raised, so others of it are of no interest."""

    is_reported: bool = False


class Failures:
    """Opens the results of calls, and keeps the first failure of a call whose failures were not raised.

    That is done one after another in a thread of its own. It is not done where calls end: that is a thread of Ray, and
    a dead process is ended with Ray's help.
    """

    def __init__(self) -> None:
        self.first: Future[Any] = Future()  # has the failure
        self._failed = Call()  # whose failure it is
        self._lock = threading.Lock()
        self._lane = Lane()

    def watch(self, worker: Future[Any], opened: Callable[[Future[Any]], Any], call: Call) -> Future[Any]:
        """Return a future with the opened result of one worker in a call, or with its failure."""
        result = Future[Any]()
        worker.add_done_callback(lambda done: self._lane.start(partial(self._open, done, opened, result, call)))
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

    def _open(self, worker: Future[Any], opened: Callable[[Future[Any]], Any], result: Future[Any], call: Call) -> None:
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
