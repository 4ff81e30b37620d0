"""Processes that have loaded a file of functions, and the thread that owns them.

The thread that starts the process has to outlive it: the kernel ends the process with the thread, not with the program.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotseat import faults
from hotseat.closing import on_failure
from hotseat.errors import RunError
from hotseat.openmp import wait_policy
from hotseat.processes import ChildProcess, Closed, WorkerTimeout

_WORKER = Path(__file__).with_name("function_worker.py")


class NotLoaded(Exception):
    """The user's file cannot be loaded; the message says why."""


class LoadedTooLate(NotLoaded):
    """The user's file was still being loaded at the deadline."""


@dataclass(eq=False)
class Tracebacks:
    """Shows the traceback of each cause once, whichever process raised it, and a count at the 10th, 100th, ... time."""

    show: Callable[[str], object]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _times_raised: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Mapping[str, Any]) -> None:
        """Count the error in an answer, and show what is new of it."""
        if "traceback" not in answer:
            return
        with self._lock:
            self._times_raised[answer["cause"]] += 1
            count = self._times_raised[answer["cause"]]
        if count == 1:
            self.show(answer["traceback"])
        elif re.fullmatch("10+", str(count)):
            self.show(f"raised {count:,} times by now, the last time: {answer['error']}")


@dataclass(eq=False)
class FunctionProcess:
    """The process of an owner thread that has loaded the user's file, if any. After a failed call it is ended, and the
    next call starts another. It also ends with its owner thread, or with this program.

    is_closed: waits raise `Closed` once it returns True.
    """

    file: str
    function: str
    start_timeout_s: float
    is_closed: Callable[[], bool]
    tracebacks: Tracebacks
    max_memory_bytes: int | None = None
    is_silent: bool = False  # its output is dropped
    extra_path: tuple[str, ...] = ()  # folders to import from, besides those of this process
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the function
    process: ChildProcess | None = None
    takes_names: bool = False  # the function is called by names

    def start(self) -> None:
        output = subprocess.DEVNULL if self.is_silent else 2
        self.process = ChildProcess(
            _WORKER,
            {
                "file": self.file,
                "function": self.function,
                "kwargs": dict(self.kwargs),
                "path": [*sys.path, *self.extra_path],
            },
            stdout=output,
            stderr=output,
            env={**os.environ, **wait_policy()},
            dies_with_thread=True,
            max_memory_bytes=self.max_memory_bytes,
            is_closed=self.is_closed,
        )
        try:
            answer = self.process.receive(self.start_timeout_s)
            if "error" in answer:
                self.tracebacks.add(answer)
                raise NotLoaded(answer["error"])
        except WorkerTimeout:
            self.end()
            raise LoadedTooLate(f"it did not load within {self.start_timeout_s:g} s") from None
        except BaseException:
            self.end()
            raise
        self.takes_names = bool(answer.get("takes_names"))
        faults.register("rewards", self.process.pid)

    def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self.process is not None and not self.process.is_alive():
            self.end()  # it died between two calls, so neither of them is to blame
        if self.process is None:
            self.start()
        assert self.process is not None
        with on_failure(self.end):
            answer: dict[str, Any] = self.process.call(message, timeout_s)
        self.tracebacks.add(answer)
        return answer

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None


class OwnerThread:
    """A thread that owns worker processes: starts them, works on jobs one after another, and ends them.

    It takes jobs in the order of `submit`, and gives what `work` returns or raises to their futures. `close` wakes it:
    jobs without a result then raise `unfinished`, also the current one, where `work` raises `Closed`. lock: held by
    whoever submits several things that `close` must not come between.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[FunctionProcess],
        work: Callable[[Any], Any],
        unfinished: Callable[[Any], RunError],
    ):
        self.is_closed = False
        self.lock = threading.RLock()
        self._workers, self._work, self._unfinished = workers, work, unfinished
        self._jobs: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._begun: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, timeout_s: float | None = None) -> None:
        """Start the thread, and return when all workers have started; raises why one did not."""
        self._thread.start()
        self._begun.result(timeout_s)

    def submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            if self.is_closed:
                raise RunError(f"{self._thread.name}: closed")
            self._jobs.put((job, future))
        return future

    def close(self) -> bool:
        """End the thread; return whether this is the first call."""
        with self.lock:
            is_first, self.is_closed = not self.is_closed, True
        self._jobs.put(None)
        if is_first and self._thread is not threading.current_thread():
            self._thread.join(10.0)
        return is_first

    def _run(self) -> None:
        try:
            for worker in self._workers:
                worker.start()
            self._begun.set_result(None)
            while not self.is_closed and (taken := self._jobs.get()) is not None:
                job, future = taken
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(self._work(job))
                except Closed:
                    future.set_exception(self._unfinished(job))
                except BaseException as error:
                    future.set_exception(error)
        except BaseException as error:
            self._begun.set_exception(error)
        finally:
            for worker in self._workers:
                worker.end()
            with contextlib.suppress(queue.Empty):
                while True:
                    left = self._jobs.get_nowait()
                    if left is not None and left[1].set_running_or_notify_cancel():
                        left[1].set_exception(self._unfinished(left[0]))
