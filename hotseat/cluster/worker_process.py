"""The inside of a worker process: one object of the user's plain class, and the calls to it.

An exception does not leave the process as an exception: many cannot be pickled, and one that kills its carrier on the
way would be seen as something else. It leaves as a `Failure`, which is text, and the exception itself only if it
survives the journey there and back.
"""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hotseat import faults
from hotseat.caches import keep_compiled
from hotseat.cluster import activity
from hotseat.cluster.environment import take_passed_on
from hotseat.cluster.refs import resolve
from hotseat.processes import supervisor

_MAX_TEXT = 40_000


@dataclass(frozen=True)
class Failure:
    """An exception, in a form that travels."""

    kind: str
    message: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        try:
            whole = pickle.dumps(error)
            pickle.loads(whole)
            pickled = whole if len(whole) < _MAX_TEXT else None
        except BaseException:  # whatever a user's exception does when it is pickled
            pickled = None
        try:
            message = str(error)
        except BaseException as unprintable:
            message = f"(its message cannot be printed: {type(unprintable).__name__})"
        try:
            text = "".join(traceback.format_exception(type(error), error, _own_frames(error))).rstrip()
        except BaseException as unprintable:
            text = f"(its traceback cannot be printed: {type(unprintable).__name__})"
        return cls(type(error).__qualname__, _shortened(message), _shortened(text), pickled)

    def exception(self) -> BaseException | None:
        """Return the exception itself, where it could travel."""
        try:
            return pickle.loads(self.pickled) if self.pickled else None
        except BaseException:
            return None


def _shortened(text: str) -> str:
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]}\n... ({len(text)} characters) ...\n{text[-half:]}"


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first frame on: how the call got there is of no help."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename.endswith((__file__, "ray/util/tracing/tracing_helper.py")):
        frame = frame.tb_next
    return frame or error.__traceback__


@dataclass(frozen=True)
class ProcessIdentity:
    """Names a process. Pid and start time together do: pids are used again."""

    pid: int
    started: int | None
    hostname: str


def run(call: Callable[[], Any]) -> Any:
    """Return the result of the call, or the Failure it ended in."""
    try:
        return call()
    except BaseException as error:  # SystemExit too: a library that exits must not look like a crash
        return Failure.of(error)


def refuse_generator(method: str, result: Any) -> None:
    """Raise if a method returned a generator: its items could not follow the answer, but a channel can carry them."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(f"{method!r} returns a generator; return a list, or put the items into a channel")


def _spare_collector(threshold: int | None) -> None:
    """Exempt what imports and the constructor made from garbage collection: it stays for good.

    Otherwise every full collection goes through all of it, some 50 ms with torch and transformers loaded. threshold: so
    many new objects are awaited before any are looked through; None: Python's default.
    """
    gc.collect()
    gc.freeze()
    if threshold is not None:
        gc.set_threshold(threshold, *gc.get_threshold()[1:])


class ObjectHost:
    """Carries one object in a worker process."""

    def __init__(self) -> None:
        take_passed_on()
        keep_compiled()
        mark = os.environ.get(supervisor.WORKER, "")
        supervisor.mark_this_process(mark.partition(":")[0], mark)
        if mark:
            name, rank = mark.split(":")[1:3]
            faults.register(f"{name}:{rank}")
            directory = os.environ.get(activity.DIRECTORY)
            if directory:
                activity.activity.keep_in(directory, f"{name}-{rank}")
                activity.show_stacks_on_signal(directory)
        self._object: Any = None

    def prepare(self, cls: type) -> None:
        """Do nothing more: the module of the class is loaded, because the class has arrived here."""

    def construct(
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> ProcessIdentity | Failure:
        def make() -> ProcessIdentity:
            self._object = cls(*resolve(args, timeout_s), **resolve(kwargs, timeout_s))
            _spare_collector(getattr(cls, "garbage_threshold", None))
            return ProcessIdentity(os.getpid(), supervisor.start_time(os.getpid()), socket.gethostname())

        with activity.activity.doing("its start"):
            return run(make)

    def invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        with activity.activity.doing(repr(method)):
            return run(lambda: self._call(method, args, kwargs, timeout_s))

    def invoke_and_keep(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, count: int
    ) -> tuple[Any, ...]:
        """Return failure and values as results apart: the caller learns of a failure without fetching a value.

        count: the values that the method returns; 0: its result is one value.
        """
        return apart(self.invoke(method, args, kwargs, timeout_s), method, count)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        result = getattr(self._object, method)(*resolve(args, timeout_s), **resolve(kwargs, timeout_s))
        refuse_generator(method, result)
        return result


class AsyncObjectHost(ObjectHost):
    """Carries an object of a class with coroutine methods. All its methods run on one event loop, plain ones too."""

    async def invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        with activity.activity.doing(repr(method)):
            try:
                result = self._call(method, args, kwargs, timeout_s)
                return await result if inspect.isawaitable(result) else result
            except BaseException as error:
                return Failure.of(error)

    async def invoke_and_keep(  # type: ignore[override]
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, count: int
    ) -> tuple[Any, ...]:
        return apart(await self.invoke(method, args, kwargs, timeout_s), method, count)


def apart(result: Any, method: str, count: int) -> tuple[Any, ...]:
    """Return the failure of a call, or None, and then its `count` values; 0: the result is one value."""
    if isinstance(result, Failure):
        return (result, *[None] * max(1, count))
    if count == 0:
        return None, result
    assert len(result) == count, f"{method!r} returned {len(result)} values, and {count} were to be kept"
    return (None, *result)


def is_async(cls: type) -> bool:
    """Tell whether a class has coroutine methods."""
    return any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(cls))
