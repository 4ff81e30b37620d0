"""A checkpoint that is completed in a thread while the run continues."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager

from hotseat.errors import CheckpointError, DeadlineError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class BackgroundSave:
    """Checkpoint that a thread completes while the run continues.

    The thread calls `is_written` until the ranks have written their shares, then `commit`, which has to make the
    checkpoint current inside the context that it gets. An error of either ends it, and is raised by `wait`. One that
    is given up is current already, or never will be.
    """

    def __init__(
        self,
        step: int,
        is_written: Callable[[], bool],
        commit: Callable[[AbstractContextManager[None]], object],
        timeout_s: float,
    ):
        self.step = step
        self.done: Future[None] = Future()
        self._is_written = is_written
        self._commit = commit
        self._timeout_s = timeout_s
        self._is_given_up = threading.Event()
        self._current = threading.Lock()  # held while the checkpoint becomes current, or is given up
        threading.Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the checkpoint is complete. Raises if it failed or is late."""
        concurrent.futures.wait([self.done], timeout=timeout_s)
        if not self.done.done():
            raise self._late(timeout_s)
        self.done.result()

    def give_up(self) -> None:
        """Stop waiting for the ranks, and commit nothing unless it is done."""
        with self._current:
            self._is_given_up.set()

    @contextmanager
    def _unless_given_up(self) -> Iterator[None]:
        with self._current:
            if self._is_given_up.is_set():
                raise CheckpointError(f"the checkpoint of step {self.step} was given up")
            yield

    def _run(self) -> None:
        try:
            if self._wait_for_ranks():
                self._commit(self._unless_given_up())
        except BaseException as error:  # torch raises errors that are no `Exception`; `wait` raises them again
            self.done.set_exception(error)
        else:
            self.done.set_result(None)

    def _wait_for_ranks(self) -> bool:
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while not self._is_written():
            if time.monotonic() > until:
                raise self._late(self._timeout_s)
            if self._is_given_up.wait(pause_s):
                break
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)
        return not self._is_given_up.is_set()

    def _late(self, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"the checkpoint of step {self.step} was not written in {timeout_s:.1f} s: set cluster.call_timeout_s"
            " higher if the disk takes that long"
        )
