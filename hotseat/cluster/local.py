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
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from hotseat.cluster.environment import environment, rank_env, restore_environment
from hotseat.cluster.group import WHOLE, Arguments, Pending, WorkerGroup, under_way_at_restart, worker_error
from hotseat.cluster.lease import Holder
from hotseat.cluster.node_facts import NodeFacts
from hotseat.cluster.ports import free_port
from hotseat.cluster.refs import Ref, resolve
from hotseat.cluster.runtime import ClusterNode, Launch, NodeService, RuntimeOptions
from hotseat.cluster.session import Session
from hotseat.cluster.worker_process import is_async, refuse_generator
from hotseat.errors import DeadlineError, UserError
from hotseat.processes.supervisor import process_state, start_time

T = TypeVar("T")
W_co = TypeVar("W_co", covariant=True)


class _Busy(DeadlineError):
    """The object was busy until the deadline; unlike a timeout that the object itself raises."""


class LocalRef(Ref[T]):
    def __init__(self, value: T):
        self._value = value

    def get(self, *, timeout_s: float = 600.0) -> T:
        return self._value


def _kept(result: Any, keep: int | None) -> Any:
    """Return what a call returns that keeps so many values, see `WorkerGroup._start`."""
    if keep is None:
        return result
    return LocalRef(result) if keep == WHOLE else [LocalRef(value) for value in result]


_GRACE_S = 5.0  # in which an object closes after an error


class _Loop:
    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2.0)


class _Threads:
    """Daemon threads for calls, each of which serves further ones: starting a thread takes longer than a short call.

    Not a pool of the standard library: its threads are waited for when the interpreter ends, and one of these may hang.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[tuple[SimpleQueue[Callable[[], None] | None], threading.Thread]] = []
        self._is_closed = False

    def run(self, work: Callable[[], None]) -> None:
        """Run work, which raises nothing, in a thread that is idle, or in a new one."""
        with self._lock:
            inbox = self._idle.pop()[0] if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := inbox.get()) is not None:
            work()
            del work  # or it would live until the next
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append((inbox, threading.current_thread()))

    def close(self) -> None:
        """End the idle threads; others end after their call."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for inbox, _ in idle:
            inbox.put(None)
        for _, thread in idle:
            if thread is not threading.current_thread():
                thread.join(_GRACE_S)


class LocalGroup(WorkerGroup[W_co]):
    """A group whose objects live in this process. rank_env: variables that are set while a rank's object is made."""

    def __init__(self, launch: Launch[W_co], rank_env: Callable[[int], Mapping[str, str]]):
        self.name = launch.name
        self.timeout_s = launch.timeout_s
        self._make = lambda rank: launch.cls(*launch.args, **launch.kwargs, **launch.per_rank[rank])
        self._processes = launch.processes
        self._num_threads = launch.num_threads
        self._rank_env = rank_env
        self.is_closed = False
        self._loop = _Loop(launch.name) if is_async(launch.cls) else None
        self._calls = _Threads(launch.name)
        self._slots = [threading.BoundedSemaphore(launch.max_concurrency) for _ in launch.processes]
        self._objects: list[Any] = [None] * len(launch.processes)
        for rank in self.ranks:
            self._construct(rank)

    @property
    def ranks(self) -> range:
        return range(len(self._processes))

    def _call(self, method: str, arguments: Arguments, timeout_s: float) -> list[Any]:
        if len(arguments) != 1 or self._loop:
            return super()._call(method, arguments, timeout_s)
        [(rank, (args, kwargs))] = arguments.items()
        self._refuse_if_closed(rank, method)
        started_s = time.time()
        try:
            return [self._run(rank, self._objects[rank], method, args, kwargs, timeout_s)]
        except _Busy:
            raise
        except Exception as error:
            self._raise(rank, method, error)
        finally:
            if self.on_call is not None:
                self.on_call(self.name, rank, method, started_s, time.time())

    def states(self) -> list[str]:
        """Return "gone" also for an object that says by `has_to_be_replaced` that it can do nothing any more."""
        useless = [self.is_closed or getattr(each, "has_to_be_replaced", False) for each in self._objects]
        return ["gone" if each else "running" for each in useless]

    def holders(self) -> tuple[Holder, ...]:
        pid = os.getpid()
        return tuple(Holder(self.name, process.rank, pid, start_time(pid), process.node) for process in self._processes)

    def restart(self, rank: int) -> None:
        replaced = self._objects[rank]
        self._construct(rank)
        if getattr(replaced, "has_to_be_replaced", False):  # it may never end what it does
            threading.Thread(target=self._close_object, args=(replaced.close, _GRACE_S), daemon=True).start()

    def restart_all(self) -> None:
        for rank in self.ranks:
            ask = getattr(self._objects[rank], "close", None)
            if ask is not None:
                self._close_stuck(ask)
        for rank in self.ranks:
            self._construct(rank)

    def close(self, *, grace_s: float = 5.0, idle_grace_s: float = 0.0) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for rank in self.ranks:
            ask = getattr(self._objects[rank], "close", None)
            if ask and grace_s > 0:
                self._close_object(ask, grace_s)
            elif ask:
                self._close_stuck(ask)
            self._objects[rank] = None
        if self._loop:
            self._loop.close()
        self._calls.close()

    def _close_stuck(self, ask: Callable[[], Any]) -> None:
        """Close an object after an error. What it has started would outlive it; if it is stuck it is left behind."""
        closing = threading.Thread(target=self._close_object, args=(ask, _GRACE_S), daemon=True)
        closing.start()
        closing.join(_GRACE_S)

    def _close_object(self, ask: Callable[[], Any], grace_s: float) -> None:
        with contextlib.suppress(Exception):
            if inspect.iscoroutinefunction(ask):
                assert self._loop is not None
                self._loop.submit(ask()).result(grace_s)
            else:
                ask()

    def _construct(self, rank: int) -> None:
        with self._threads(), environment(self._rank_env(rank)):
            try:
                self._objects[rank] = self._make(rank)
            except Exception as error:
                self._raise(rank, "__init__", error)

    def _start(self, method: str, arguments: Arguments, timeout_s: float, keep: int | None = None) -> Pending[Any]:
        futures = {}
        for rank, (args, kwargs) in arguments.items():
            self._refuse_if_closed(rank, method)
            futures[rank] = self._submit(rank, method, args, kwargs, timeout_s, keep)
        return Pending(self, method, futures, timeout_s)

    def _submit(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, keep: int | None
    ) -> Future[Any]:
        called = self._objects[rank]
        if self._loop:

            async def arun() -> Any:
                result = self._run(rank, called, method, args, kwargs, timeout_s, is_shared=True)
                if inspect.isawaitable(result):
                    result = await result
                    self._refuse_if_replaced(rank, called, method)
                return _kept(result, keep)

            return self._loop.submit(arun())
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = self._run(rank, called, method, args, kwargs, timeout_s)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(_kept(result, keep))

        self._calls.run(run)
        return future

    def _run(
        self,
        rank: int,
        called: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
        is_shared: bool = False,
    ) -> Any:
        """Call an object. As with processes, its replacement gets none of the calls made before, and they fail."""
        slot = self._slots[rank]
        if not is_shared and not slot.acquire(timeout=timeout_s):
            raise _Busy(
                f"{self.name} rank {rank}: {method!r} waited {timeout_s:.1f} s for another call to end;"
                " launch with a larger max_concurrency if the class allows several calls at once"
            )
        try:
            self._refuse_if_replaced(rank, called, method)
            with self._threads():
                result = getattr(called, method)(*resolve(args, timeout_s), **resolve(kwargs, timeout_s))
            self._refuse_if_replaced(rank, called, method)
            refuse_generator(method, result)
            return result
        finally:
            if not is_shared:
                slot.release()

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """Set the number of threads, on which sums depend, for the calling thread; restore it afterwards."""
        torch = sys.modules.get("torch")
        before = torch.get_num_threads() if torch else 0
        if torch and before != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            if torch and before != self._num_threads:
                torch.set_num_threads(before)

    def open(self, rank: int, method: str, future: Future[Any]) -> Any:
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, _Busy):
            raise error
        return self._raise(rank, method, error)

    def _raise(self, rank: int, method: str, error: BaseException) -> NoReturn:
        """Raise the same error as on Ray, with the original's traceback: a post-mortem ends in the worker's frame."""
        message = f"{method!r} raised {type(error).__qualname__}: {error}"
        raise worker_error(self.name, rank, method, message).with_traceback(error.__traceback__) from error

    def _refuse_if_replaced(self, rank: int, called: Any, method: str) -> None:
        if self._objects[rank] is not called and not self.is_closed:
            raise under_way_at_restart(self.name, rank, method)

    def _refuse_if_closed(self, rank: int, method: str) -> None:
        if self.is_closed:
            raise worker_error(self.name, rank, method, f"{method!r} was called, but the group is closed")

    def describe(self, rank: int) -> str:
        return f"works in this process, which is {process_state(os.getpid())}"


class LocalRuntime:
    """The `Runtime` in this process: one node, as many logical devices as asked for, no process but this one."""

    dashboard_url = None

    def __init__(self, num_devices: int):
        self.nodes = (ClusterNode(0, num_devices),)
        self.home = 0
        self._groups: dict[str, LocalGroup[Any]] = {}
        self._env_before: dict[str, str | None] = {}

    def reserve(self, devices: Mapping[int, Sequence[int]], timeout_s: float) -> None:
        """Do nothing: all devices are this process's."""

    def prepare(self, launch: Launch[Any]) -> None:
        """Do nothing: all objects are made in this process."""

    def launch(self, launch: Launch[T]) -> LocalGroup[T]:
        self._set_env(launch.name, launch.env_on(0))
        port = free_port("127.0.0.1")
        self._groups[launch.name] = group = LocalGroup(
            launch, lambda rank: rank_env(launch.processes, rank, "127.0.0.1", port)
        )
        return group

    def service(self, service: type[NodeService[Any]], node: int | None) -> None:
        """Return None: within a process no other serves."""

    def facts(self, nodes: Sequence[int], folder: str | None, paths: Sequence[str]) -> dict[int, NodeFacts]:
        """Return nothing: there is no other node."""
        return {}

    def device_memory(self, device: int) -> None:
        """Return None: there is no GPU behind a logical device."""

    def device_busy(self, device: int) -> None:
        """Return None: there is no GPU behind a logical device."""

    def is_gone(self, holder: Holder) -> bool:
        """Return False: all objects live as long as this process."""
        return False

    def close(self, grace_s: float) -> None:
        for group in self._groups.values():
            group.close(grace_s=grace_s)
        restore_environment(self._env_before)
        self._env_before = {}

    def end_leftovers(self) -> list[int]:
        return []

    def _set_env(self, group: str, env: Mapping[str, str]) -> None:
        """Set a group's variables. All groups share one environment: two that want different values cannot both have
        them."""
        for key, value in env.items():
            if key in self._env_before and os.environ.get(key) != value:
                raise UserError(
                    f"{group} sets {key}={value}, another group {key}={os.environ.get(key)}: with runtime 'local'"
                    " they share one environment; use runtime 'ray' or give both the same value"
                )
            self._env_before.setdefault(key, os.environ.get(key))
            os.environ[key] = value


def open_runtime(session: Session, options: RuntimeOptions) -> LocalRuntime:
    return LocalRuntime(1 if options.num_devices is None else options.num_devices)
