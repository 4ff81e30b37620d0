"""The background thread that owns an engine's model: steps while there is work, runs commands between steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hotseat.errors import DeadlineError, HotseatError, RunError, WorkerError
from hotseat.rollout.open_requests import set_outcome

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """The work of the thread besides commands.

    can_step: whether there is something to step now; called with and without the lock. step: one step. end: frees what
    the thread held. abandon: returns the futures of all unfinished requests, at the end; called under the lock.
    """

    can_step: Callable[[], bool]
    step: Callable[[], None]
    end: Callable[[], None]
    abandon: Callable[[], Sequence[Future[Any]]]


class EngineThread:
    """Runs commands and steps on one thread, in turn. Callers on other threads leave commands and wait.

    wake: the lock of everything that threads share; notified when there is something to do. num_threads: of torch, on
    this thread; None leaves it to torch. call_timeout_s: how long a caller waits for a command.
    """

    def __init__(
        self,
        wake: threading.Condition,
        device: torch.device,
        num_threads: int | None,
        call_timeout_s: float,
    ):
        self._work: Work | None = None  # between `start` and the first moment of the thread
        self._wake = wake
        self._device = device
        self._num_threads = num_threads
        self._call_timeout_s = call_timeout_s
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_closing = False
        self._error: HotseatError | None = None  # why it is gone
        self.thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)

    def start(self, work: Work) -> None:
        """Start the thread. It alone holds `work`, so that an engine that is closed is freed at once."""
        self._work = work
        self.thread.start()

    def raise_if_gone(self) -> None:
        """Raise if the thread has ended, with the reason, or is about to."""
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        if self._is_closing:
            raise RunError("the engine is closed")

    def refuse_own_thread(self, operation: str) -> None:
        """Raise if the caller is this thread, which would wait for itself."""
        if threading.current_thread() is self.thread:
            raise RunError(f"{operation} was called from a callback of a future, where it would wait for itself")

    def call(self, operation: str, function: Callable[[], T]) -> T:
        """Run a function on the thread between two steps, and wait for its result."""
        self.refuse_own_thread(operation)
        future: Future[T] = Future()
        with self._wake:
            self.raise_if_gone()
            self._commands.append((function, future))
            self._wake.notify_all()
        try:
            return future.result(self._call_timeout_s)
        except FutureTimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(
                f"{operation}: the engine's thread did not answer in {self._call_timeout_s:g} s"
            ) from None

    def close(self, timeout_s: float) -> None:
        """End the thread. Called by the thread itself, it ends after the current turn."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        if threading.current_thread() is self.thread:
            return
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise DeadlineError(f"close: the engine's thread did not end in {timeout_s:g} s")

    def _run(self) -> None:
        """Take commands and steps in turn until `close`.

        Waits without limit only when there is nothing to do; woken by requests, by commands and by `close`. Whatever
        ends it, every future that is still pending fails with the reason.
        """
        work, self._work = self._work, None
        assert work is not None
        error: HotseatError = RunError("the engine was closed")
        try:
            if self._num_threads is not None:
                # At a thread's first query or parallel operation torch gives it the process's default, even if another
                # number was set before: query first.
                torch.get_num_threads()
                torch.set_num_threads(self._num_threads)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._turn(work):
                pass
        except BaseException as cause:
            error = WorkerError(f"the engine's thread died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        try:
            work.end()
        except Exception as cause:
            if error.__cause__ is None:  # otherwise keep the first error
                error = WorkerError(f"the engine's thread failed at its end: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
        with self._wake:
            self._error = error
            futures: list[Future[Any]] = [future for _, future in self._commands]
            futures += work.abandon()
            self._commands.clear()
        for future in futures:
            set_outcome(future, error=error)

    def _turn(self, work: Work) -> bool:
        """Run all commands, then one step if there is one to do. False: the thread is to end."""
        with self._wake:
            while not (self._commands or self._is_closing or work.can_step()):
                self._wake.wait()
            if self._is_closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for index, (function, future) in enumerate(commands):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except Exception as error:
                set_outcome(future, error=error)
            except BaseException as error:
                with self._wake:
                    self._commands.extendleft(reversed(commands[index:]))
                raise error
            else:
                set_outcome(future, result=result)
        if work.can_step():
            with torch.inference_mode():
                work.step()
        return True
