"""A group: the processes of one role, called together.

`call` asks every rank, or some, and returns their results in rank order. Every call has a deadline. What goes wrong
is raised at the first rank where it is seen, without waiting for the others: `WorkerError` for an exception or a dead
process, `DeadlineError` for silence. Both name group, rank and method.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hotseat.cluster._host import Failure
from hotseat.cluster.activity import activity
from hotseat.cluster.lease import Holder
from hotseat.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    from hotseat.cluster.cluster import Cluster

__all__ = ["Group", "GroupSpec", "Pending", "Process", "Ref", "Worker", "create_group"]


class ProcessLike(Protocol):
    """Where one process of a group runs. The planner's processes look like this, and so does `Process`."""

    @property
    def rank(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]:
        """By their number in the whole cluster."""


@dataclass(frozen=True)
class Process:
    """One process of a group: its rank, the node it runs on and the devices it sees."""

    rank: int
    node: int = 0
    devices: tuple[int, ...] = ()


class Ref(ABC):
    """Stands for a value that stays where it was made. Passed to a call of any group, it arrives as the value."""

    @abstractmethod
    def get(self, *, timeout_s: float = 600.0) -> Any:
        """Fetch the value to this process."""


def resolve(arguments: Any, timeout_s: float, depth: int = 2) -> Any:
    """Put values in the place of the `Ref`s among a call's arguments, and in lists, tuples and dicts among them."""
    if isinstance(arguments, Ref):
        return arguments.get(timeout_s=timeout_s)
    if depth and type(arguments) in (list, tuple):
        return type(arguments)([resolve(value, timeout_s, depth - 1) for value in arguments])
    if depth and type(arguments) is dict:
        return {key: resolve(value, timeout_s, depth - 1) for key, value in arguments.items()}
    return arguments


Calls = Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]]  # arguments by rank
CallObserver = Callable[[str, int, str, float, float], object]  # group, rank, method, start and end (`time.time`)


class Pending:
    """Calls that were started. `result` waits for them; so does `await`."""

    def __init__(self, group: Group, method: str, futures: Mapping[int, Future[Any]]):
        self._group = group
        self._method = method
        self._futures = dict(futures)
        group.observe(method, self._futures)

    @property
    def ranks(self) -> list[int]:
        """In the order of the results."""
        return sorted(self._futures)

    def done(self) -> bool:
        """Whether every rank has answered, well or not."""
        return all(future.done() for future in self._futures.values())

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """One result per rank, in rank order. Waits at most `timeout_s` from now (the group's, if None)."""
        timeout_s = self._group._deadline(timeout_s)
        until, waiting = time.monotonic() + timeout_s, set(self._futures.values())
        results: dict[int, Any] = {}
        with self._waiting():
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, timeout=max(0.0, until - time.monotonic()), return_when=concurrent.futures.FIRST_COMPLETED
                )
                if not done:
                    raise self._late(timeout_s, results)
                self._open(done, results)
        return [results[rank] for rank in sorted(results)]

    async def aresult(self, timeout_s: float | None = None) -> list[Any]:
        """`result` for a coroutine: other tasks run while this one waits."""
        timeout_s = self._group._deadline(timeout_s)
        until, loop = time.monotonic() + timeout_s, asyncio.get_running_loop()
        answered: asyncio.Queue[Future[Any]] = asyncio.Queue()

        def tell(future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(answered.put_nowait, future)

        for future in self._futures.values():
            future.add_done_callback(tell)
        results: dict[int, Any] = {}
        with self._waiting():
            while len(results) < len(self._futures):
                try:
                    future = await asyncio.wait_for(answered.get(), max(0.0, until - time.monotonic()))
                except TimeoutError:
                    raise self._late(timeout_s, results) from None
                self._open({future}, results)
        return [results[rank] for rank in sorted(results)]

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        whom = [f"{self._group.name} rank {rank}" for rank in self.ranks]
        return activity.doing(f"waits for {', '.join(whom)} to answer {self._method!r}", whom)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.aresult().__await__()

    def _open(self, done: set[Future[Any]], results: dict[int, Any]) -> None:
        for rank, future in sorted(self._futures.items()):
            if future in done:
                results[rank] = self._group._open(rank, self._method, future)

    def _late(self, waited_s: float, results: Mapping[int, Any]) -> DeadlineError:
        missing = sorted(set(self._futures) - set(results))
        states = "; ".join(f"rank {rank} {self._group._describe(rank)}" for rank in missing[:8])
        error = DeadlineError(
            f"{self._group.name} rank {missing[0]}: no answer to {self._method!r} in {waited_s:.1f} s"
            f" ({len(results)} of {len(self._futures)} ranks answered; missing: {states}"
            f"{', ...' if len(missing) > 8 else ''}). Give the call a longer timeout_s if the work takes that long."
        )
        error.group, error.rank, error.method = self._group.name, missing[0], self._method  # type: ignore[attr-defined]
        error.missing = missing  # type: ignore[attr-defined]
        return error


class Group(ABC):
    """The processes of one role. `Cluster.launch` makes it."""

    name: str
    timeout_s: float
    is_closed: bool = False
    on_call: CallObserver | None = None  # told of every call from this process that has ended

    @property
    @abstractmethod
    def ranks(self) -> range:
        """All ranks: 0 to the size of the group."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    # --- calling --------------------------------------------------------------------------------------------------

    def call(
        self, method: str, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call the method on all ranks, or some, with the same arguments; results in rank order."""
        return self.start(method, *args, ranks=ranks, timeout_s=timeout_s, **kwargs).result(timeout_s)

    def start(
        self,
        method: str,
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        keep: bool = False,
        **kwargs: Any,
    ) -> Pending:
        """Like `call`, but does not wait. With `keep`, results stay where they were made and come back as `Ref`."""
        chosen = self._chosen(ranks)
        return self._start(method, dict.fromkeys(chosen, (args, kwargs)), self._deadline(timeout_s), keep)

    def scatter(
        self, method: str, values: Sequence[Any], *, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call the method on every rank, rank r with `values[r]` as its argument."""
        return self.start_scatter(method, values, timeout_s=timeout_s, **kwargs).result(timeout_s)

    def start_scatter(
        self, method: str, values: Sequence[Any], *, timeout_s: float | None = None, keep: bool = False, **kwargs: Any
    ) -> Pending:
        if len(values) != self.size:
            raise ValueError(f"{self.name}: {len(values)} values to scatter over {self.size} ranks; give one per rank")
        calls = {rank: ((values[rank],), kwargs) for rank in self.ranks}
        return self._start(method, calls, self._deadline(timeout_s), keep)

    async def acall(
        self, method: str, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """`call` for a coroutine: other tasks run while this one waits."""
        return await self.start(method, *args, ranks=ranks, timeout_s=timeout_s, **kwargs).aresult(timeout_s)

    def observe(self, method: str, futures: Mapping[int, Future[Any]]) -> None:
        """Tell the observer of these calls when they end."""
        if self.on_call is None:
            return
        tell, started_s = self.on_call, time.time()

        def told(rank: int) -> Callable[[Future[Any]], object]:
            return lambda _: tell(self.name, rank, method, started_s, time.time())

        for rank, future in futures.items():
            future.add_done_callback(told(rank))

    # --- the processes --------------------------------------------------------------------------------------------

    @abstractmethod
    def alive(self) -> list[bool]:
        """Which ranks have a process. One that is busy or stopped has."""

    def states(self) -> list[str]:
        """Of each rank's process: "starting", "running", "stopped" or "gone"."""
        return ["running" if is_alive else "gone" for is_alive in self.alive()]

    def ping(self, rank: int) -> Future[Any]:
        """Ask for `health`, without waiting for anything and without being observed."""
        raise NotImplementedError(f"{self.name}: has no processes of its own to ping")

    def end(self, rank: int, reason: str, *, pid: int | None = None) -> None:
        """End a rank's process, if it is `pid`, and what it started: whoever waits for it hears why."""
        raise NotImplementedError(f"{self.name}: has no processes of its own to end")

    @abstractmethod
    def holders(self) -> tuple[Holder, ...]:
        """Each rank's process, as leases know it."""

    def pids(self) -> list[int]:
        return [holder.pid for holder in self.holders() if holder.pid is not None]

    def known_pids(self) -> list[int | None]:
        """As `pids`, without waiting for what is starting, and only on this machine."""
        return [holder.pid for holder in self.holders()]

    def ready(self) -> None:  # noqa: B027 - nothing to wait for, unless a runtime says so
        """Wait until the objects of a group that was launched with `wait=False` are made."""

    @abstractmethod
    def restart(self, rank: int, *, timeout_s: float | None = None) -> None:
        """End what is left of this rank and its children, and make the object anew in a new process there."""

    @abstractmethod
    def close(self, *, grace_s: float = 5.0) -> None:
        """End all processes. An object with a `close` method is asked first and has `grace_s` for it."""

    # --- what a runtime provides ----------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, method: str, calls: Calls, timeout_s: float, keep: bool) -> Pending: ...

    @abstractmethod
    def _open(self, rank: int, method: str, future: Future[Any]) -> Any:
        """The result in a future that is done; raises WorkerError if it is not one."""

    @abstractmethod
    def _describe(self, rank: int) -> str:
        """What the process of a silent rank is doing, as far as can be seen from outside."""

    def _deadline(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self.timeout_s
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"{self.name}: timeout_s is {timeout_s}; every call has a deadline, in seconds above 0")
        return timeout_s

    def _chosen(self, ranks: Iterable[int] | None) -> list[int]:
        if ranks is None:
            return list(self.ranks)
        chosen = list(ranks)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(self.ranks):
            raise ValueError(f"{self.name}: ranks {chosen} are not different ranks from 0 to {self.size - 1}")
        return chosen


def worker_error(group: str, rank: int, method: str, message: str, remote_traceback: str = "") -> WorkerError:
    """A WorkerError that says where: it has the attributes `group`, `rank`, `method` and `remote_traceback`."""
    error = WorkerError(f"{group} rank {rank}: {message}" + (f"\n{remote_traceback}" if remote_traceback else ""))
    error.group, error.rank, error.method = group, rank, method  # type: ignore[attr-defined]
    error.remote_traceback = remote_traceback  # type: ignore[attr-defined]
    return error


def raise_failure(group: str, rank: int, method: str, failure: Failure) -> None:
    """Raise what happened in the worker, with the exception itself as the cause where it could travel."""
    raise worker_error(
        group, rank, method, f"{method!r} raised {failure.kind}: {failure.message}", failure.traceback
    ) from failure.exception()


# --- the shape that RLinf users know ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupSpec:
    """A class and its constructor arguments, not yet anywhere."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def launch(self, cluster: Cluster, name: str | None = None, placement_strategy: Any = 1, **options: Any) -> Group:
        """`Cluster.launch`, with a strategy that has `processes`, or with the processes themselves."""
        name = name or self.cls.__name__
        return cluster.launch(
            name, self.cls, args=self.args, kwargs=self.kwargs, processes=placement_strategy, **options
        )


def create_group(cls: type, *args: Any, **kwargs: Any) -> GroupSpec:
    """`create_group(Actor, cfg).launch(cluster, name="actor", placement_strategy=...)`, for any plain class."""
    return GroupSpec(cls, args, kwargs)


class Worker:
    """Optional base of a worker class: `Actor.create_group(cfg).launch(cluster, name=, placement_strategy=)`."""

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> GroupSpec:
        return GroupSpec(cls, args, kwargs)
