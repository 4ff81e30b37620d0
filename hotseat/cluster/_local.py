"""The local runtime: every worker is an object in this process. For tests, and for a debugger.

A call to one rank runs in the thread that makes it, so that a breakpoint or a post-mortem is where the user looks.
Its deadline is not enforced then: nobody waits, the caller itself works. Calls to several ranks, and those that were
started, run in threads, as they would run in processes, and have their deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from hotseat.cluster._guard import process_state, start_time
from hotseat.cluster._host import is_async, refuse_generator
from hotseat.cluster.group import Calls, Group, Pending, ProcessLike, Ref, resolve, worker_error
from hotseat.cluster.lease import Holder
from hotseat.errors import DeadlineError, UserError


class _Busy(DeadlineError):
    """The wait for the object itself ran out; what the object raises is something else."""


class LocalRef(Ref):
    def __init__(self, value: Any):
        self._value = value

    def get(self, *, timeout_s: float = 600.0) -> Any:
        return self._value


class _Loop:
    """An event loop in a thread of its own, for classes with coroutine methods."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2.0)


class LocalGroup(Group):
    def __init__(
        self,
        name: str,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        per_rank: Sequence[Mapping[str, Any]],
        processes: Sequence[ProcessLike],
        *,
        timeout_s: float,
        num_threads: int,
        max_concurrency: int,
        rank_env: Callable[[int], Mapping[str, str]],
    ):
        self.name = name
        self.timeout_s = timeout_s
        self._make = lambda rank: cls(*args, **kwargs, **per_rank[rank])
        self._processes = processes
        self._num_threads = num_threads
        self._rank_env = rank_env
        self.is_closed = False
        self._loop = _Loop(name) if is_async(cls) else None
        self._slots = [threading.BoundedSemaphore(max_concurrency) for _ in processes]
        self._objects: list[Any] = [None] * len(processes)
        for rank in self.ranks:
            self._construct(rank)

    @property
    def ranks(self) -> range:
        return range(len(self._processes))

    def call(
        self, method: str, *args: Any, ranks: Any = None, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        chosen = self._chosen(ranks)
        if len(chosen) > 1 or self._loop:
            return super().call(method, *args, ranks=chosen, timeout_s=timeout_s, **kwargs)
        timeout_s = self._deadline(timeout_s)
        self._refuse_if_closed(chosen[0], method)
        started_s = time.time()
        try:
            return [self._run(chosen[0], method, args, kwargs, timeout_s)]
        except _Busy:
            raise
        except Exception as error:
            self._raise(chosen[0], method, error)
        finally:
            if self.on_call is not None:
                self.on_call(self.name, chosen[0], method, started_s, time.time())

    def alive(self) -> list[bool]:
        return [not self.is_closed for _ in self.ranks]

    def holders(self) -> tuple[Holder, ...]:
        pid = os.getpid()
        return tuple(Holder(self.name, process.rank, pid, start_time(pid), process.node) for process in self._processes)

    def restart(self, rank: int, *, timeout_s: float | None = None) -> None:
        self._construct(rank)

    def close(self, *, grace_s: float = 5.0) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for rank in self.ranks:
            ask = getattr(self._objects[rank], "close", None)
            if ask and grace_s > 0:
                with contextlib.suppress(Exception):
                    if inspect.iscoroutinefunction(ask):
                        assert self._loop is not None
                        self._loop.submit(ask()).result(grace_s)
                    else:
                        ask()
            self._objects[rank] = None
        if self._loop:
            self._loop.close()

    def _construct(self, rank: int) -> None:
        with self._threads(), _environment(self._rank_env(rank)):
            try:
                self._objects[rank] = self._make(rank)
            except Exception as error:
                self._raise(rank, "__init__", error)

    def _start(self, method: str, calls: Calls, timeout_s: float, keep: bool) -> Pending:
        futures = {}
        for rank, (args, kwargs) in calls.items():
            self._refuse_if_closed(rank, method)
            futures[rank] = self._submit(rank, method, args, kwargs, timeout_s, keep)
        return Pending(self, method, futures)

    def _submit(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, keep: bool
    ) -> Future[Any]:
        if self._loop:

            async def arun() -> Any:
                result = self._run(rank, method, args, kwargs, timeout_s, is_shared=True)
                result = await result if inspect.isawaitable(result) else result
                return LocalRef(result) if keep else result

            return self._loop.submit(arun())
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = self._run(rank, method, args, kwargs, timeout_s)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(LocalRef(result) if keep else result)

        # Not a pool: its threads would be waited for when the interpreter ends, and one of these may hang.
        threading.Thread(target=run, name=f"{self.name}[{rank}].{method}", daemon=True).start()
        return future

    def _run(
        self,
        rank: int,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
        is_shared: bool = False,
    ) -> Any:
        slot = self._slots[rank]
        if not is_shared and not slot.acquire(timeout=timeout_s):
            raise _Busy(
                f"{self.name} rank {rank}: {method!r} waited {timeout_s:.1f} s for another call to end;"
                " launch with a larger max_concurrency if the class allows several calls at once"
            )
        try:
            with self._threads():
                result = getattr(self._objects[rank], method)(*resolve(args, timeout_s), **resolve(kwargs, timeout_s))
                refuse_generator(method, result)
                return result
        finally:
            if not is_shared:
                slot.release()

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """Sums depend on the number of threads, so it is set, not inherited. It belongs to the calling thread."""
        torch = sys.modules.get("torch")
        before = torch.get_num_threads() if torch else 0
        if torch and before != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            if torch and before != self._num_threads:
                torch.set_num_threads(before)

    def _open(self, rank: int, method: str, future: Future[Any]) -> Any:
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, _Busy):
            raise error
        return self._raise(rank, method, error)

    def _raise(self, rank: int, method: str, error: BaseException) -> NoReturn:
        """The same error as on Ray, with the original's traceback: a post-mortem ends in the worker's frame."""
        message = f"{method!r} raised {type(error).__qualname__}: {error}"
        raise worker_error(self.name, rank, method, message).with_traceback(error.__traceback__) from error

    def _refuse_if_closed(self, rank: int, method: str) -> None:
        if self.is_closed:
            raise worker_error(self.name, rank, method, f"{method!r} was called, but the group is closed")

    def _describe(self, rank: int) -> str:
        return f"works in this process, which is {process_state(os.getpid())}"


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        restore_environment(before)


def restore_environment(before: Mapping[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


class LocalRuntime:
    """One node, as many devices as it is said to have, no process but this one."""

    def __init__(self, num_devices: int):
        self.num_devices = num_devices
        self._env: dict[str, str | None] = {}

    def set_env(self, group: str, env: Mapping[str, str]) -> None:
        """The environment is one for all groups here; two that want different values cannot both have them."""
        for key, value in env.items():
            if key in self._env and os.environ.get(key) != value:
                raise UserError(
                    f"{group} sets {key}={value}, another group {key}={os.environ.get(key)}: with runtime 'local'"
                    " they share one environment; use runtime 'ray' or give both the same value"
                )
            self._env.setdefault(key, os.environ.get(key))
            os.environ[key] = value

    def close(self) -> None:
        restore_environment(self._env)
        self._env = {}
