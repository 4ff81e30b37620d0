"""Worker groups as Ray actors: calls to them, their results, and what is known of each actor's process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from hotseat.cluster.group import (
    WHOLE,
    Arguments,
    Pending,
    WorkerGroup,
    raise_failure,
    under_way_at_restart,
    worker_error,
)
from hotseat.cluster.lease import Holder
from hotseat.cluster.on_ray.library import import_ray
from hotseat.cluster.on_ray.relays import KeptRefs, RelayLost, Relays, relay_of
from hotseat.cluster.refs import Ref
from hotseat.cluster.sighting import Sighting
from hotseat.cluster.worker_process import Failure, ProcessIdentity
from hotseat.errors import ClusterError, DeadlineError, RunError, WorkerError
from hotseat.placement.locate import Process
from hotseat.processes import supervisor

T = TypeVar("T")
W_co = TypeVar("W_co", covariant=True)


class RayRef(Ref[T]):
    """A value in Ray's object store."""

    def __init__(self, ref: Any):
        self._ref = ref

    def get(self, *, timeout_s: float = 600.0) -> T:
        ray = import_ray()
        try:
            return ray.get(self._ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"a kept result did not arrive in {timeout_s:.1f} s") from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"a kept result is lost: {error}") from error


@dataclass
class RankProcess:
    """The process of one rank: where it runs, and which process it is now."""

    place: Process
    actor: Any = None
    identity: ProcessIdentity | None = None  # None: its object is not made yet
    incarnation: int = 0
    mark: str = ""  # HOTSEAT_WORKER of the process and of what it starts
    ended_because: str = ""  # why we ended it ourselves
    is_prepared: bool = False  # the process was started ahead, and no constructor was called in it yet


class GroupOwner(Protocol):
    """The runtime that launched a group, as far as the group uses it."""

    def process_states(self, processes: Sequence[tuple[int, int, int | None]]) -> list[str]:
        """Return "gone", "stopped" or "running" for each (node, pid, start). Asks each node once."""

    def look(self, node: int, pid: int, name: str, *, with_stack: bool) -> Sighting:
        """Look at a process on its node. name: of its activity file."""

    def end_processes(self, processes: Iterable[RankProcess]) -> None:
        """End these processes and whatever they started; return when they are gone."""

    def forget(self, group: RayGroup[Any]) -> None:
        """Drop a group that is closed."""

    def lost(self, *, asks_ray: bool = False) -> ClusterError | None:
        """Return why Ray can do nothing any more; None while it can. asks_ray: ask it now, not only the watch."""


class RayGroup(WorkerGroup[W_co]):
    """A group of Ray actors. Can be passed to another worker, which may then call it but not restart or close it."""

    def __init__(
        self,
        name: str,
        processes: list[RankProcess],
        *,
        timeout_s: float,
        log_directory: str,
        owner: GroupOwner | None = None,
        start: Callable[[RayGroup[Any], Sequence[int], float], Pending[ProcessIdentity]] | None = None,
        has_close: bool = False,
        relays: Relays | None = None,
    ):
        self.name = name
        self.timeout_s = timeout_s
        self.processes = processes
        self._log_directory = log_directory
        self._owner = owner  # None: a copy in another process
        self._start_processes = start
        self._has_close = has_close
        self._relays = relays  # None: each rank is called from here
        self._starting: tuple[Pending[ProcessIdentity], float] | None = (
            None  # constructors under way, and how long they may take
        )
        self._start_timeout_s = 0.0  # how long the first start may take
        self._start_error: RunError | None = None  # why some constructors failed
        self._start_lock = threading.RLock()
        self.is_closed = False
        self._pending: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        processes = [replace(process, ended_because="") for process in self.processes]
        return _copy_of_group, (self.name, processes, self.timeout_s, self._log_directory)

    @property
    def ranks(self) -> range:
        return range(len(self.processes))

    def holders(self) -> tuple[Holder, ...]:
        self.ready()
        return tuple(
            Holder(self.name, each.place.rank, each.identity.pid, each.identity.started, each.place.node)
            for each in self.processes
            if each.identity is not None  # every process has one after `ready`
        )

    def restart(self, rank: int) -> None:
        self._restart([rank], self.timeout_s)

    def restart_all(self) -> None:
        self._restart(self.ranks, self._start_timeout_s)

    def _restart(self, ranks: Sequence[int], within_s: float) -> None:
        owner = self._owner_for("restart")
        self._raise_if_lost(asks_ray=True)
        if self.is_closed:
            raise worker_error(self.name, ranks[0], "restart", "cannot be restarted: the group is closed")
        self._settle()
        owner.end_processes([self.processes[rank] for rank in ranks])
        for rank in ranks:
            self.processes[rank].incarnation += 1
            self.processes[rank].ended_because = ""
        self.begin(ranks, within_s)
        self.ready()

    def begin(self, ranks: Sequence[int], within_s: float) -> None:
        """Start the processes of these ranks; `ready` waits for them. All ranks together meet at a new address."""
        assert self._start_processes is not None
        self._start_timeout_s = max(self._start_timeout_s, within_s)
        self._start_error = None
        self._starting = self._start_processes(self, ranks, within_s), within_s
        if self._relays is not None:
            self._relays.know({rank: self.processes[rank].actor for rank in ranks})

    @property
    def relay_group(self) -> WorkerGroup[Any] | None:
        return None if self._relays is None else self._relays.group

    def ping(self, rank: int) -> Future[Any]:
        return self.processes[rank].actor.invoke.remote("health", (), {}, self.timeout_s).future()

    def end(self, rank: int, reason: str, *, pid: int | None = None) -> None:
        process = replace(self.processes[rank])  # it may be restarted meanwhile, and the new one is not meant
        if pid is not None and (process.identity is None or process.identity.pid != pid):
            return
        if process.incarnation == self.processes[rank].incarnation:
            self.processes[rank].ended_because = reason
        self._owner_for("end").end_processes([process])

    def states(self) -> list[str]:
        known = {rank: self._state_here(rank) for rank in self.ranks}
        asked = [rank for rank, state in known.items() if state is None]
        answers = dict(zip(asked, self._states_there(asked), strict=True))
        return [state or answers[rank] for rank, state in known.items()]

    def known_pids(self) -> list[int | None]:
        here = socket.gethostname()
        identities = [process.identity for process in self.processes]
        return [each.pid if each is not None and each.hostname == here else None for each in identities]

    def look(self, rank: int, *, with_stack: bool) -> Sighting:
        process = self.processes[rank]
        if not self._owner or process.identity is None:
            return super().look(rank, with_stack=with_stack)
        seen = self._owner.look(process.place.node, process.identity.pid, f"{self.name}-{rank}", with_stack=with_stack)
        here = socket.gethostname()
        return seen if process.identity.hostname == here else replace(seen, hostname=process.identity.hostname)

    def ready(self) -> None:
        self._settle()
        if self._start_error is not None:
            raise self._start_error  # at every call, until the ranks that failed are restarted

    def starting_ranks(self) -> list[int]:
        # Not by `states`: a process has its identity only when somebody waits for its group.
        starting = self._starting
        return [] if starting is None else [rank for rank, future in starting[0].futures.items() if not future.done()]

    def when_started(self, notify: Callable[[int], object]) -> None:
        starting = self._starting
        if starting is None:
            for rank, process in enumerate(self.processes):
                if process.identity is not None:
                    notify(rank)
            return

        def note(rank: int, future: Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None and not isinstance(future.result(), Failure):
                notify(rank)

        for rank, future in starting[0].futures.items():
            future.add_done_callback(partial(note, rank))

    def _settle(self) -> None:
        """Wait for constructors under way. If one fails, those that are not done by then have failed too."""
        with self._start_lock:
            if self._starting is None:
                return
            pending, within_s = self._starting
            try:
                pending.result(within_s)
            except RunError as error:
                self._start_error = error
            for rank, future in pending.futures.items():
                with contextlib.suppress(RunError):
                    if future.done():
                        self.processes[rank].identity = self.open(rank, "__init__", future)
            self._starting = None

    def close(self, *, grace_s: float = 5.0, idle_grace_s: float = 0.0) -> None:
        owner = self._owner_for("close")
        if self.is_closed:
            return
        self.ask_to_close(grace_s, idle_grace_s)
        self.is_closed = True
        owner.end_processes(self.processes)
        self.wake_waiters()
        if self._relays is not None:
            self._relays.group.close(grace_s=0)
        owner.forget(self)

    def ask_to_close(self, grace_s: float, idle_grace_s: float = 0.0) -> None:
        """Call `close` of the objects, where they have one, and wait for it at most `grace_s`, for idle ones longer."""
        if self._has_close and self._starting is None and not self.is_closed and grace_s > 0:
            calls: list[Any] = [future for future in list(self._pending) if not future.done()]
            busy = {call.called[0] for call in calls}
            with contextlib.suppress(RunError):  # the process ends in any case
                futures = self._start("close", dict.fromkeys(self.ranks, ((), {})), max(grace_s, idle_grace_s)).futures
                concurrent.futures.wait(futures.values(), timeout=grace_s)
                idle = [future for rank, future in futures.items() if rank not in busy]
                concurrent.futures.wait(idle, timeout=max(0.0, idle_grace_s - grace_s))

    def wake_waiters(self) -> None:
        """Fail calls that are still waited for in a group that was closed."""
        until = time.monotonic() + 2.0
        for future in list(self._pending):
            # Ray fails these calls when it sees the actor gone; those that it misses are failed here.
            with contextlib.suppress(Exception):
                future.exception(max(0.0, until - time.monotonic()))
            if not future.done():
                with contextlib.suppress(Exception):
                    future.set_exception(WorkerError(f"{self.name}: closed"))

    def _owner_for(self, action: str) -> GroupOwner:
        if self._owner is None:
            raise RunError(f"{self.name}: only the process that launched the group can {action} it")
        return self._owner

    def lose(self, error: ClusterError) -> None:
        """Fail every call that waits for an answer: none will come."""
        starting = () if self._starting is None else tuple(self._starting[0].futures.values())
        for future in (*self._pending, *starting):
            if not future.done():
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was answered just now
                    future.set_exception(error)

    def _raise_if_lost(self, *, asks_ray: bool = False) -> None:
        if self._owner is not None and (lost := self._owner.lost(asks_ray=asks_ray)) is not None:
            raise lost

    def _start(self, method: str, arguments: Arguments, timeout_s: float, keep: int | None = None) -> Pending[Any]:
        self._raise_if_lost()
        if self.is_closed:
            raise worker_error(self.name, min(arguments), method, f"{method!r} was called, but the group is closed")
        self.ready()
        if self._relays is not None:
            futures = self._relays.call(method, arguments, timeout_s, keep)
        else:
            futures = {rank: self._call_rank(rank, method, *each, timeout_s, keep) for rank, each in arguments.items()}
        for rank, future in futures.items():
            future.called = rank, self.processes[rank].incarnation  # type: ignore[attr-defined]
            self._pending.add(future)
        return Pending(self, method, futures, timeout_s)

    def _call_rank(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, keep: int | None
    ) -> Any:
        actor = self.processes[rank].actor
        if keep is None:
            return actor.invoke.remote(method, args, kwargs, timeout_s).future()
        options = {"num_returns": 1 + max(1, keep)}
        status, *values = actor.invoke_and_keep.options(**options).remote(method, args, kwargs, timeout_s, keep)
        future = status.future()
        future.kept = refs_of(values, keep)
        return future

    def open(self, rank: int, method: str, future: Any) -> Any:
        ray = import_ray()
        if (failure := future.exception(0)) is not None:
            self._raise_if_lost(asks_ray=isinstance(failure, ray.exceptions.RayActorError))
        try:
            result = future.result(0)
        except ray.exceptions.RayActorError as error:
            raise self._death(rank, method, error, future.called[1]) from error
        except ray.exceptions.RayTaskError as error:
            # Our host lets no exception out: this one is about what it was sent, or what it sends back.
            cause = error.cause or error
            message = f"arguments or result of {method!r} cannot be sent: {type(cause).__qualname__}: {cause}"
            raise worker_error(self.name, rank, method, message) from error
        except ray.exceptions.RayError as error:
            raise worker_error(self.name, rank, method, f"{method!r} failed in Ray: {error}") from error
        except WorkerError as error:
            raise worker_error(
                self.name, rank, method, f"{method!r} was under way when the group was closed"
            ) from error
        except RelayLost as lost:
            raise self._relay_failed(rank, method, lost) from lost
        if isinstance(result, Failure):
            raise_failure(self.name, rank, method, result)
        if isinstance(result, KeptRefs):
            return refs_of(result.refs, result.keep)
        return getattr(future, "kept", result)

    def _death(self, rank: int, method: str, error: Exception, incarnation: int) -> WorkerError:
        """Return the error of a call to a rank whose process was of this incarnation then, and died."""
        if self.is_closed:
            return worker_error(self.name, rank, method, f"{method!r} was under way when the group was closed")
        process = replace(self.processes[rank])  # it may be restarted meanwhile
        if process.incarnation != incarnation:
            return under_way_at_restart(self.name, rank, method)
        pid = process.identity.pid if process.identity else _pid_in(error)
        detail = str(error).partition("Worker exit detail:")[2].partition("Some common causes")[0].strip()
        detail = detail or str(error).strip().splitlines()[-1].strip()
        if self._owner:
            # What it started would keep its memory and its ports.
            self._owner.end_processes([process])
        tail = stderr_tail(self._log_directory, pid) if pid else ""
        who = f"its process{f' (pid {pid})' if pid else ''}"
        message = f"{who} died during {method!r}: {detail}"
        if because := self.processes[rank].ended_because:
            message, tail = f"{who} was ended during {method!r}: {because}", ""
        death = worker_error(self.name, rank, method, message, f"the last it wrote to stderr:\n{tail}" if tail else "")
        death.is_death = True
        return death

    def _relay_failed(self, rank: int, method: str, lost: RelayLost) -> WorkerError:
        """Return the error of a call whose relay failed: a death, if the relay died."""
        assert self._relays is not None
        try:
            self._relays.group.open(lost.relay, lost.method, lost.answered)
        except WorkerError as error:
            message = f"{method!r} was lost with the relay that made the call: {error}"
            failed = worker_error(self.name, rank, method, message)
            failed.is_death = error.is_death
            return failed
        raise AssertionError(f"{self.name}: {lost}, and has answered")

    def _state(self, rank: int) -> str:
        return self._state_here(rank) or self._states_there([rank])[0]

    def _state_here(self, rank: int) -> str | None:
        """Return the state of a rank as far as it is known without asking about its process; None if it is not."""
        process = self.processes[rank]
        if self._starting is not None and process.identity is None and not self.is_closed:
            return "starting"
        if self.is_closed or process.identity is None:
            return "gone"
        if self._owner:
            return None
        if process.identity.hostname == socket.gethostname():
            return supervisor.process_state(process.identity.pid, process.identity.started)
        return "running"  # on another machine, as far as this copy of the group knows

    def _states_there(self, ranks: Sequence[int]) -> list[str]:
        processes = [(self.processes[rank].place.node, self.processes[rank].identity) for rank in ranks]
        known = [(node, each.pid, each.started) for node, each in processes if each is not None]
        return self._owner_for("look at").process_states(known) if known else []

    def describe(self, rank: int) -> str:
        process = self.processes[rank]
        if process.identity is None:
            return "was still starting"
        described = f"(pid {process.identity.pid} on {process.identity.hostname}) is {self._state(rank)}"
        if self._relays is None:
            return described
        relay = relay_of(rank)
        return f"{described}, called by {self._relays.group.name} rank {relay} {self._relays.group.describe(relay)}"


def refs_of(values: Sequence[Any], keep: int) -> Any:
    """Return references to the values that a call keeps, see `WorkerGroup._start`."""
    refs: list[RayRef[Any]] = [RayRef(value) for value in values]
    return refs[0] if keep == WHOLE else refs


def _pid_in(error: Exception) -> int | None:
    """Read the pid of a process that died in its constructor, before it could report it itself, from Ray's error."""
    match = re.search(r"^\s*pid: (\d+)$", str(error), re.MULTILINE)
    return int(match[1]) if match else None


def _copy_of_group(name: str, processes: list[RankProcess], timeout_s: float, log_directory: str) -> RayGroup[Any]:
    return RayGroup(name, processes, timeout_s=timeout_s, log_directory=log_directory)


def stderr_tail(log_directory: str, pid: int, num_lines: int = 20) -> str:
    """Return the last lines that a worker wrote to its standard error, as far as they can be read from here."""
    lines: list[str] = []
    for path in glob.glob(f"{glob.escape(log_directory)}/worker-*-{pid}.err"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 16384))
            lines += file.read().decode(errors="replace").splitlines()
    # Ray writes its own bookkeeping into the same file, and the addresses of its frames.
    own = [line for line in lines if line.strip() and not line.startswith(":") and "    @ " not in line]
    return "\n".join(own[-num_lines:])
