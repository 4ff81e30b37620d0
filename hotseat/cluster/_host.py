"""What runs inside a worker process: one object of the user's plain class, and the calls to it.

An exception does not leave the process as an exception: many cannot be pickled, and one that kills its carrier on the
way would be seen as something else. It leaves as a `Failure`, which is text, and the exception itself only if it
survives the journey there and back.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import inspect
import os
import pickle
import random
import shutil
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hotseat import faults
from hotseat.cluster import _guard, activity
from hotseat.cluster.channel import Broker

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
        """The exception itself, where it could travel."""
        try:
            return pickle.loads(self.pickled) if self.pickled else None
        except BaseException:
            return None


def _shortened(text: str) -> str:
    """Both ends of a text that is too long to print."""
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]}\n... ({len(text)} characters) ...\n{text[-half:]}"


def _own_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on: how the call got there is of no help."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename.endswith((__file__, "ray/util/tracing/tracing_helper.py")):
        frame = frame.tb_next
    return frame or error.__traceback__


@dataclass(frozen=True)
class Facts:
    """Which process this is."""

    pid: int
    started: int | None
    hostname: str


def facts() -> Facts:
    return Facts(os.getpid(), _guard.start_time(os.getpid()), socket.gethostname())


def run(call: Callable[[], Any]) -> Any:
    """The result of the call, or the Failure it ended in."""
    try:
        return call()
    except BaseException as error:  # SystemExit too: a library that exits must not look like a crash
        return Failure.of(error)


def refuse_generator(method: str, result: Any) -> None:
    """Its items could not follow the answer; a channel can carry them."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(f"{method!r} returns a generator; return a list, or put the items into a channel")


def _spare_collector() -> None:
    """What imports and the constructor made stays for good: without this every full collection goes through all of it,
    some 50 ms with torch and transformers loaded."""
    gc.collect()
    gc.freeze()


class Host:
    """Carries one object in a worker process. `resolve` puts the value in the place of what stands for it."""

    def __init__(self, resolve: Callable[[Any, float], Any]):
        mark = os.environ.get(_guard.WORKER, "")
        _guard.mark_this_process(mark.partition(":")[0], mark)
        if mark:
            name, rank = mark.split(":")[1:3]
            faults.register(f"{name}:{rank}")
            directory = os.environ.get(activity.DIRECTORY)
            if directory:
                activity.activity.keep_in(directory, f"{name}-{rank}")
                activity.show_stacks_on_signal(directory)
        self._resolve = resolve
        self._object: Any = None

    def construct(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Facts | Failure:
        def make() -> Facts:
            self._object = cls(*self._resolve(args, timeout_s), **self._resolve(kwargs, timeout_s))
            _spare_collector()
            return facts()

        with activity.activity.doing("its start"):
            return run(make)

    def invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        with activity.activity.doing(repr(method)):
            return run(lambda: self._call(method, args, kwargs, timeout_s))

    def invoke_and_keep(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> tuple[Failure | None, Any]:
        """As two results, so that the caller learns how it went without fetching what came of it."""
        result = self.invoke(method, args, kwargs, timeout_s)
        return (result, None) if isinstance(result, Failure) else (None, result)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        result = getattr(self._object, method)(*self._resolve(args, timeout_s), **self._resolve(kwargs, timeout_s))
        refuse_generator(method, result)
        return result


class AsyncHost(Host):
    """For a class with coroutine methods. All of its methods run on one event loop, the plain ones too."""

    async def construct(  # type: ignore[override]  # Ray awaits it
        self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Facts | Failure:
        return Host.construct(self, cls, args, kwargs, timeout_s)

    async def invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Any:
        with activity.activity.doing(repr(method)):
            try:
                result = self._call(method, args, kwargs, timeout_s)
                return await result if inspect.isawaitable(result) else result
            except BaseException as error:
                return Failure.of(error)

    async def invoke_and_keep(  # type: ignore[override]
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> tuple[Failure | None, Any]:
        result = await self.invoke(method, args, kwargs, timeout_s)
        return (result, None) if isinstance(result, Failure) else (None, result)


def is_async(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(cls))


class NodeAgent:
    """On each node but the driver's: looks after our processes there, and goes when the driver goes.

    Ray ends this process with the driver's job; its guard then ends what our workers there have left behind.
    """

    def __init__(self, session: str, shm_prefix: str, directory: str):
        _guard.mark_this_process(session)
        self._session = session
        self._shm_prefix = shm_prefix
        self._directory = directory
        self._guard = _guard.start_guard(session, shm_prefix, [directory])
        self._broker: Broker | None = None

    def facts(self) -> Facts:
        return facts()

    def free_port(self, host: str) -> int:
        return free_port(host)

    def process_state(self, pid: int, started: int | None) -> str:
        return _guard.process_state(pid, started)

    def end_workers(self, workers: list[str]) -> None:
        _guard.end_marked(_guard.WORKER, workers, timeout_s=5.0)

    def start_broker(self, host: str) -> tuple[Any, bytes]:
        os.makedirs(self._directory, mode=0o700)
        self._broker = Broker(self._directory, host=host, env={_guard.SESSION: self._session})
        return self._broker.address, self._broker.key

    def end_session(self) -> None:
        """Everything of this session on this node but this process, which `ray.kill` ends."""
        if self._broker:
            self._broker.close()
        killed = _guard.end_marked(_guard.SESSION, [self._session], timeout_s=5.0, spare=[os.getpid()])
        _guard.remove_segments(self._shm_prefix, killed)
        shutil.rmtree(self._directory, ignore_errors=True)
        _guard.dismiss_guard(self._guard)


_given_ports: set[int] = set()


def free_port(host: str) -> int:
    """A port that nobody uses, and that nobody gets by chance meanwhile: below the range the kernel gives out."""
    # Not by the random numbers of the run: several processes may have the same.
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        if port in _given_ports:
            continue
        try:
            for address in dict.fromkeys((host, "")):
                with socket.socket(socket.AF_INET) as probe:
                    probe.bind((address, port))
        except OSError:
            continue
        _given_ports.add(port)
        return port
    raise OSError(f"no free port on {host} between 20000 and 32000")


def stderr_tail(log_directory: str, pid: int, num_lines: int = 20) -> str:
    """The last lines that a worker wrote to its standard error, as far as they can be read from here."""
    lines: list[str] = []
    for path in glob.glob(f"{glob.escape(log_directory)}/worker-*-{pid}.err"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 16384))
            lines += file.read().decode(errors="replace").splitlines()
    # Ray writes its own bookkeeping into the same file, and the addresses of its frames.
    told = [line for line in lines if line.strip() and not line.startswith(":") and "    @ " not in line]
    return "\n".join(told[-num_lines:])
