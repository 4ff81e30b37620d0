"""Worker groups: the processes of one role, called together.

A method is named as an attribute of the worker class, so that a type checker sees its arguments and its result:

    losses = actor.call(Actor.update, batch)                        # one result per rank, in rank order
    first = actor.on(0).within(60).call(Actor.state)                # on some ranks, with a deadline of its own
    pending = actor.start(Actor.save, path)                         # does not wait
    scores = model.start_scatter_and_keep(Model.score, shares)      # rank r gets shares[r]; the results are Refs
    actor.call(Actor.prepare, as_arguments(scores.result()))        # a Ref arrives as its value

Only the method's name is sent: if the worker's class overrides the method, its override runs. A protocol's method can
stand for those of every class that has it. Every call has a deadline. The first failure of any rank is raised, without
waiting for the others: `WorkerError` for an exception or a dead process, `DeadlineError` for silence. Both name group,
rank and method. A coroutine method is awaited in the worker and its result returned, though a type checker takes the
result for the coroutine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hotseat.cluster.activity import DIRECTORY, activity
from hotseat.cluster.lease import Holder
from hotseat.cluster.refs import Ref
from hotseat.cluster.sighting import Sighting, look_at
from hotseat.cluster.worker_process import Failure
from hotseat.errors import DeadlineError, RunError, WorkerError, causes

Arguments = Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]]  # positional and keyword arguments, by rank
CallObserver = Callable[[str, int, str, float, float], object]  # group, rank, method, start and end (`time.time`)
WHOLE = 0  # keeps a result as one value, see `WorkerGroup._start`
MOST_OBSERVED = 64  # ranks of a call that are observed one by one; of more, only the one that answers last
MOST_NAMED = 8  # ranks in a message

W_co = TypeVar("W_co", covariant=True)  # the worker class
Result_co = TypeVar("Result_co", covariant=True)
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Calling(ABC, Generic[W_co]):
    """Calls methods of a group's workers. `on` and `within` choose other ranks and another deadline."""

    @abstractmethod
    def _scope(self) -> tuple[WorkerGroup[W_co], Sequence[int], float]:
        """Return the group, the ranks that are called, and the deadline of a call in seconds."""

    def on(self, *ranks: int) -> Calling[W_co]:
        """Call only these ranks."""
        group, _, timeout_s = self._scope()
        return _Scope(group, group.checked_ranks(ranks), timeout_s)

    def within(self, timeout_s: float | None) -> Calling[W_co]:
        """Set the deadline of each call in seconds; None: the group's default."""
        group, ranks, _ = self._scope()
        return _Scope(group, ranks, group.deadline(timeout_s))

    def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the method on each rank with the same arguments; results in rank order."""
        group, ranks, timeout_s = self._scope()
        return group._call(name_of(method), dict.fromkeys(ranks, (args, kwargs)), timeout_s)

    async def acall(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Do as `call` does, in a coroutine: other tasks run while this one waits."""
        return await self.start(method, *args, **kwargs).aresult()

    def start(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start the calls without waiting for them."""
        group, ranks, timeout_s = self._scope()
        return group._start(name_of(method), dict.fromkeys(ranks, (args, kwargs)), timeout_s)

    def call_and_keep(
        self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[Ref[R]]:
        """Do as `call` does, but leave the results where they were made, and return references to them."""
        group, ranks, timeout_s = self._scope()
        arguments = dict.fromkeys(ranks, (args, kwargs))
        return group._start(name_of(method), arguments, timeout_s, keep=WHOLE).result()

    def start_and_keep_each(
        self, method: Callable[Concatenate[W_co, P], Sequence[R]], count: int, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[list[Ref[R]]]:
        """Start a method that returns `count` values, and leave each where it was made under a reference of its own."""
        group, ranks, timeout_s = self._scope()
        return group._start(name_of(method), dict.fromkeys(ranks, (args, kwargs)), timeout_s, keep=count)

    def scatter(
        self, method: Callable[Concatenate[W_co, T, P], R], values: Sequence[T], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call the method on each rank with a value of its own as the first argument; values, results in rank order."""
        return self.start_scatter(method, values, *args, **kwargs).result()

    def start_scatter(
        self, method: Callable[Concatenate[W_co, T, P], R], values: Sequence[T], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Start what `scatter` calls without waiting for it."""
        group, _, timeout_s = self._scope()
        return group._start(name_of(method), self._scattered(values, args, kwargs), timeout_s)

    def start_scatter_and_keep(
        self, method: Callable[Concatenate[W_co, T, P], R], values: Sequence[T], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[Ref[R]]:
        """Do as `start_scatter` does, but leave the results where they were made: the calls return references."""
        group, _, timeout_s = self._scope()
        return group._start(name_of(method), self._scattered(values, args, kwargs), timeout_s, keep=WHOLE)

    def _scattered(self, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        group, ranks, _ = self._scope()
        if len(values) != len(ranks):
            raise ValueError(
                f"{group.name}: {len(values)} values to scatter over {len(ranks)} ranks; give one per rank"
            )
        return {rank: ((value, *args), kwargs) for rank, value in zip(ranks, values, strict=True)}


class _Scope(Calling[W_co]):
    """Calls to some ranks of a group, with a deadline."""

    def __init__(self, group: WorkerGroup[W_co], ranks: Sequence[int], timeout_s: float):
        self._group = group
        self._ranks = ranks
        self._timeout_s = timeout_s

    def _scope(self) -> tuple[WorkerGroup[W_co], Sequence[int], float]:
        return self._group, self._ranks, self._timeout_s


def name_of(method: Callable[..., Any]) -> str:
    """Return the name by which a method is called in the worker's process."""
    name = getattr(method, "__name__", "")
    if not callable(method) or not name.isidentifier():
        raise TypeError(
            f"{method!r} is not a method of a worker class; pass one, as in `group.call(Actor.update, batch)`"
        )
    return name


class WorkerGroup(Calling[W_co]):
    """The processes of one role, each with an object of the worker class. `Cluster.launch` makes it."""

    name: str
    timeout_s: float
    is_closed: bool = False
    on_call: CallObserver | None = None  # is called for every call from this process that has ended

    @property
    @abstractmethod
    def ranks(self) -> range:
        """Return all ranks, from 0 on."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _scope(self) -> tuple[WorkerGroup[W_co], Sequence[int], float]:
        return self, self.ranks, self.timeout_s

    # --- the processes --------------------------------------------------------------------------------------------

    @property
    def relay_group(self) -> WorkerGroup[Any] | None:
        """Return the processes that pass calls on to the ranks; None: ranks are called from here."""
        return None

    @abstractmethod
    def states(self) -> list[str]:
        """Return the state of each rank's process: "starting", "running", "stopped" or "gone"."""

    def alive(self) -> list[bool]:
        """Tell which ranks have a process. One that is busy or stopped has."""
        return [state != "gone" for state in self.states()]

    def ping(self, rank: int) -> Future[Any]:
        """Call `health` without waiting for its result, and without calling `on_call`."""
        raise NotImplementedError(f"{self.name}: has no processes of its own to ping")

    def end(self, rank: int, reason: str, *, pid: int | None = None) -> None:
        """End a rank's process and all that it started; calls that wait for it fail with the reason.

        pid: end it only if it is this process, and no replacement.
        """
        raise NotImplementedError(f"{self.name}: has no processes of its own to end")

    @abstractmethod
    def holders(self) -> tuple[Holder, ...]:
        """Return each rank's process, as leases know it."""

    def pids(self) -> list[int]:
        return [holder.pid for holder in self.holders() if holder.pid is not None]

    def known_pids(self) -> list[int | None]:
        """Return the pids on this machine, without waiting for processes that are starting."""
        return [holder.pid for holder in self.holders()]

    def look(self, rank: int, *, with_stack: bool) -> Sighting:
        """Return what a rank's process is doing, as seen on its node."""
        pid = self.known_pids()[rank]
        return look_at(pid, f"{self.name}-{rank}", os.environ.get(DIRECTORY, ""), with_stack=with_stack)

    def ready(self) -> None:
        """Wait until the objects of a group that was launched with `wait=False` are made."""

    def starting_ranks(self) -> list[int]:
        """Return the ranks whose objects are still being made."""
        return []

    def when_started(self, notify: Callable[[int], object]) -> None:
        """Call `notify` with each rank whose object is made: at once, or later from another thread.

        It is not called for a rank that fails to start, nor for one that is restarted.
        """
        for rank in self.ranks:
            notify(rank)

    @abstractmethod
    def restart(self, rank: int) -> None:
        """End what is left of this rank and its children, and make the object anew in a new process there."""

    @abstractmethod
    def restart_all(self) -> None:
        """End all ranks and their children, and make the objects anew in new processes, which meet at a new address."""

    @abstractmethod
    def close(self, *, grace_s: float = 5.0, idle_grace_s: float = 0.0) -> None:
        """End all processes. An object with a `close` method is asked first and has `grace_s` for it.

        idle_grace_s: where it is longer, the grace of objects that no call is under way in: their `close` runs at once.
        """

    # --- what a runtime provides ----------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, method: str, arguments: Arguments, timeout_s: float, keep: int | None = None) -> Pending[Any]:
        """Start the calls. keep: how many values each returns, of which it keeps every one, and gives `Ref`s instead.

        `WHOLE`: it keeps its result as one value. None: results come back.
        """

    def _call(self, method: str, arguments: Arguments, timeout_s: float) -> list[Any]:
        return self._start(method, arguments, timeout_s).result()

    @abstractmethod
    def open(self, rank: int, method: str, future: Future[Any]) -> Any:
        """Return the result in a future that is done; raise `WorkerError` if the call failed."""

    @abstractmethod
    def describe(self, rank: int) -> str:
        """Describe what the process of a silent rank is doing, as far as can be seen from outside."""

    def deadline(self, timeout_s: float | None) -> float:
        """Return the seconds that a call may take: `timeout_s`, or the group's if that is None."""
        if timeout_s is None:
            return self.timeout_s
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"{self.name}: timeout_s is {timeout_s}; every call has a deadline, in seconds above 0")
        return timeout_s

    def checked_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks in ascending order, if they are different ranks of this group."""
        chosen = list(ranks)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(self.ranks):
            raise ValueError(f"{self.name}: ranks {chosen} are not different ranks from 0 to {self.size - 1}")
        return sorted(chosen)


# --- calls under way --------------------------------------------------------------------------------------------------


class Pending(Generic[Result_co]):
    """Calls that were started. `result` waits for them; so does `await`."""

    def __init__(
        self, group: WorkerGroup[Any], method: str, futures: Mapping[int, Future[Any]], timeout_s: float | None = None
    ):
        self._group = group
        self._method = method
        self._timeout_s = timeout_s
        self.futures = dict(futures)
        self._notify_observer()

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that were called, in the order of the results."""
        return sorted(self.futures)

    def done(self) -> bool:
        """Tell whether every rank has returned or failed."""
        return all(future.done() for future in self.futures.values())

    def result(self, timeout_s: float | None = None) -> list[Result_co]:
        """Return one result per rank, in rank order. Waits at most `timeout_s` from now; None: as started."""
        timeout_s = self._group.deadline(self._timeout_s if timeout_s is None else timeout_s)
        until, answered = time.monotonic() + timeout_s, SimpleQueue[int]()
        for rank, future in sorted(self.futures.items()):
            future.add_done_callback(partial(_note, answered.put, rank))
        results: dict[int, Any] = {}
        with self._waiting():
            while len(results) < len(self.futures):
                try:
                    rank = answered.get(timeout=max(0.0, until - time.monotonic()))
                except Empty:
                    raise self._late(timeout_s, results) from None
                results[rank] = self._group.open(rank, self._method, self.futures[rank])
        return [results[rank] for rank in sorted(results)]

    async def aresult(self, timeout_s: float | None = None) -> list[Result_co]:
        """Do as `result` does, in a coroutine: other tasks run while this one waits."""
        timeout_s = self._group.deadline(self._timeout_s if timeout_s is None else timeout_s)
        until, loop = time.monotonic() + timeout_s, asyncio.get_running_loop()
        answered: asyncio.Queue[int] = asyncio.Queue()

        def enqueue(rank: int) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so nothing waits any more
                loop.call_soon_threadsafe(answered.put_nowait, rank)

        for rank, future in self.futures.items():
            future.add_done_callback(partial(_note, enqueue, rank))
        results: dict[int, Any] = {}
        with self._waiting():
            while len(results) < len(self.futures):
                try:
                    rank = await asyncio.wait_for(answered.get(), max(0.0, until - time.monotonic()))
                except TimeoutError:
                    raise self._late(timeout_s, results) from None
                results[rank] = self._group.open(rank, self._method, self.futures[rank])
        return [results[rank] for rank in sorted(results)]

    def __await__(self) -> Generator[Any, None, list[Result_co]]:
        return self.aresult().__await__()

    def _notify_observer(self) -> None:
        observer, name, method, started_s = self._group.on_call, self._group.name, self._method, time.time()
        if observer is None:
            return
        missing, lock = len(self.futures), threading.Lock()
        is_large = missing > MOST_OBSERVED

        def notify(rank: int) -> None:
            nonlocal missing
            with lock:
                missing -= 1
                is_last = missing == 0
            if is_last or not is_large:
                observer(name, rank, method, started_s, time.time())

        for rank, future in self.futures.items():
            future.add_done_callback(partial(_note, notify, rank))

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        whom = [f"{self._group.name} rank {rank}" for rank in self.ranks]
        more = f" and {len(whom) - MOST_NAMED} more" if len(whom) > MOST_NAMED else ""
        return activity.doing(f"waits for {', '.join(whom[:MOST_NAMED])}{more} to answer {self._method!r}", whom)

    def _late(self, waited_s: float, results: Mapping[int, Any]) -> DeadlineError:
        missing = sorted(set(self.futures) - set(results))
        states = "; ".join(f"rank {rank} {self._group.describe(rank)}" for rank in missing[:MOST_NAMED])
        more = ", ..." if len(missing) > MOST_NAMED else ""
        error = DeadlineError(
            f"{self._group.name} rank {missing[0]}: no answer to {self._method!r} in {waited_s:.1f} s"
            f" ({len(results)} of {len(self.futures)} ranks answered; missing: {states}{more})."
            " Set cluster.call_timeout_s higher if the work takes that long."
        )
        error.awaited = tuple(f"{self._group.name} rank {rank}" for rank in missing)
        return error


def _note(note: Callable[[int], object], rank: int, future: Future[Any]) -> None:
    note(rank)


def worker_error(group: str, rank: int, method: str, message: str, remote_traceback: str = "") -> WorkerError:
    """Make a WorkerError with the attributes `group`, `rank`, `method` and `remote_traceback`."""
    error = WorkerError(f"{group} rank {rank}: {message}" + (f"\n{remote_traceback}" if remote_traceback else ""))
    error.group, error.rank, error.method, error.remote_traceback = group, rank, method, remote_traceback
    return error


def under_way_at_restart(group: str, rank: int, method: str) -> WorkerError:
    """Make the error of a call whose process was replaced: it reports a death."""
    error = worker_error(group, rank, method, f"{method!r} was under way when the rank was restarted")
    error.is_death = True
    return error


def reports_death(error: BaseException | None) -> bool:
    """Tell whether an error, raised here or in a worker, reports the death of a process."""
    return any(isinstance(each, RunError) and each.is_death for each in causes(error))


def raise_failure(group: str, rank: int, method: str, failure: Failure) -> None:
    """Raise what happened in the worker, with the exception itself as the cause where it could travel."""
    raise worker_error(
        group, rank, method, f"{method!r} raised {failure.kind}: {failure.message}", failure.traceback
    ) from failure.exception()
