"""Calls of user code that may block, made from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)

_FINISH_S = 2.0


class OwnThread:
    """A thread for the blocking calls of one episode: always the same one, since some libraries insist on that.

    It takes calls from `call`, gives each result to the loop that waits for it, waits for the next, and ends at `end`.
    A call that never returns blocks only its thread, which is a daemon; the loop is not affected.
    """

    def __init__(self, name: str):
        self._name = name
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and return its result: coroutine functions run in the loop, others in the thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        self._calls.put((loop, result, partial(contextvars.copy_context().run, function), args, kwargs))
        value = await result
        return await value if inspect.isawaitable(value) else value

    async def finish(self, function: Callable[[], Any]) -> None:
        """Call a clean-up function and wait for it at most `_FINISH_S`. Errors are logged, not raised."""
        try:
            await asyncio.wait_for(self.call(function), _FINISH_S)
        except TimeoutError:
            logger.warning("%s: %s did not end within %g s", self._name, function.__qualname__, _FINISH_S)
        except Exception:
            logger.warning("%s: %s failed", self._name, function.__qualname__, exc_info=True)

    def end(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            loop, result, function, args, kwargs = call
            try:
                value, error = function(*args, **kwargs), None
            except BaseException as raised:  # raised again in the loop that waits for it
                value, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(_settle, result, value, error)
            del call, result, value, error


def _settle(result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(value)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        result.set_exception(error)
    else:
        # With its traceback, which names the user's line.
        result.set_exception(RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__))
