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

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hotseat.cluster.lease import Holder
from hotseat.cluster.pending import CallObserver, Pending
from hotseat.cluster.refs import Ref

Arguments = Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]]  # positional and keyword arguments, by rank

W_co = TypeVar("W_co", covariant=True)  # the worker class
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
        return group._start(name_of(method), arguments, timeout_s, keep=True).result()

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
        return group._start(name_of(method), self._scattered(values, args, kwargs), timeout_s, keep=True)

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
        """End a rank's process, if it is `pid`, and what it started; calls that wait for it fail with the reason."""
        raise NotImplementedError(f"{self.name}: has no processes of its own to end")

    @abstractmethod
    def holders(self) -> tuple[Holder, ...]:
        """Return each rank's process, as leases know it."""

    def pids(self) -> list[int]:
        return [holder.pid for holder in self.holders() if holder.pid is not None]

    def known_pids(self) -> list[int | None]:
        """Return the pids on this machine, without waiting for processes that are starting."""
        return [holder.pid for holder in self.holders()]

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
    def close(self, *, grace_s: float = 5.0, idle_grace_s: float = 0.0) -> None:
        """End all processes. An object with a `close` method is asked first and has `grace_s` for it.

        idle_grace_s: where it is longer, the grace of objects that no call is under way in: their `close` runs at once.
        """

    # --- what a runtime provides ----------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, method: str, arguments: Arguments, timeout_s: float, keep: bool = False) -> Pending[Any]:
        """Start the calls. With `keep`, their results are `Ref`s."""

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
