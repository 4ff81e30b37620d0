"""Relays: processes that pass a call on to dozens of ranks each, where a group has too many for one process to call.

A call costs its caller some 0.5 ms of processor time. With 2,048 ranks that is a second for each call of a step, in the
driver alone; with relays it makes 32 calls, and the relays, which share the work, make the others.

Ray does not begin the calls of an actor that serves several at once in the order in which they come, so the driver
numbers them: every rank gets the driver's calls in order, as it would from the driver itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hotseat.closing import on_failure
from hotseat.cluster.group import Arguments
from hotseat.cluster.worker_process import Failure

RANKS_PER_RELAY = 64
_MARGIN_S = 5.0  # by which a relay stops waiting earlier than the driver, to report which ranks have answered


@dataclass(frozen=True)
class Unanswered:
    """The error with which a call to a rank ended in Ray itself, such as the death of its process."""

    error: Exception


@dataclass(frozen=True)
class KeptRefs:
    """A result that stays where it was made. refs: Ray's references to its values. keep: how many there are."""

    refs: list[Any]
    keep: int


class Relay:
    """Passes calls on to the ranks that it knows.

    A call answers once all ranks have, one of them failed, or its time is up; `rest` waits for those that are missing.
    """

    def __init__(self) -> None:
        self._actors: dict[int, Any] = {}
        self._next = 0  # number of the call whose turn it is
        self._turn = asyncio.Condition()
        self._waiting: dict[int, dict[asyncio.Future[Any], int]] = {}  # by number of a call: answers to come, of ranks

    async def know(self, number: int, actors: Mapping[int, Any]) -> None:
        """Take the actors of some ranks, which are new."""
        async with self._in_turn(number):
            self._actors |= actors

    async def skip(self, number: int) -> None:
        """Do nothing in the turn of a call that could not be sent."""
        async with self._in_turn(number):
            pass

    async def call(
        self, number: int, method: str, arguments: Arguments, timeout_s: float, keep: int | None
    ) -> dict[int, Any]:
        """Call a method of these ranks. Returns, by rank, a result, `KeptRefs`, `Failure`, or `Unanswered`."""
        async with self._in_turn(number):
            self._waiting[number] = {
                asyncio.ensure_future(self._begin(rank, method, args, kwargs, timeout_s, keep)): rank
                for rank, (args, kwargs) in arguments.items()
            }
        return await self.rest(number, timeout_s)

    async def rest(self, number: int, timeout_s: float) -> dict[int, Any]:
        """Return answers to a call that have not been returned yet; see the class."""
        clock = asyncio.get_running_loop().time
        until = clock() + timeout_s - min(_MARGIN_S, timeout_s / 10)
        answers: dict[int, Any] = {}
        waiting = self._waiting[number]
        while waiting and not any(isinstance(each, Failure | Unanswered) for each in answers.values()):
            done, _ = await asyncio.wait(waiting, timeout=until - clock(), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            answers |= {waiting.pop(each): each.result() for each in done}
        if not waiting:
            del self._waiting[number]
        return answers

    def _begin(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, keep: int | None
    ) -> Awaitable[Any]:
        """Make a call at once; return a coroutine that waits for its answer."""
        actor = self._actors[rank]
        if keep is None:
            return _answer(actor.invoke.remote(method, args, kwargs, timeout_s))
        options = {"num_returns": 1 + max(1, keep)}
        status, *values = actor.invoke_and_keep.options(**options).remote(method, args, kwargs, timeout_s, keep)
        return _kept(status, KeptRefs(values, keep))

    @contextlib.asynccontextmanager
    async def _in_turn(self, number: int) -> AsyncIterator[None]:
        async with self._turn:
            await self._turn.wait_for(lambda: number == self._next)
            try:
                yield
            finally:
                self._next += 1
                self._turn.notify_all()


async def _answer(ref: Any) -> Any:
    try:
        return await ref
    except Exception as error:  # Ray's own, which the driver words as it does for its own calls
        return Unanswered(error)


async def _kept(status: Any, kept: KeptRefs) -> Any:
    failure = await _answer(status)
    return kept if failure is None else failure


class RelayLost(Exception):
    """A relay failed, or died: what became of the call is not known. answered: what Ray says of the call to it."""

    def __init__(self, relay: int, method: str, answered: Future[Any]):
        super().__init__(f"relay {relay} failed")
        self.relay = relay
        self.method = method
        self.answered = answered


CallsRelay = Callable[[int, str, tuple[Any, ...], float], "Future[Any]"]  # relay, method, arguments, deadline


@dataclass(eq=False)
class Relays:
    """The driver's side of a group's relays. group: their processes. start: starts a method of one of them."""

    group: Any
    start: CallsRelay
    _numbers: dict[int, itertools.count[int]] = field(default_factory=dict, init=False)
    _new: dict[int, dict[int, Any]] = field(default_factory=dict, init=False)  # by relay: actors that it does not know
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def know(self, actors: Mapping[int, Any]) -> None:
        """Take the actors of ranks that were started: relays learn of them before they are called next."""
        for relay, ranks in _by_relay(actors).items():
            self._new.setdefault(relay, {}).update({rank: actors[rank] for rank in ranks})

    def call(self, method: str, arguments: Arguments, timeout_s: float, keep: int | None) -> dict[int, Future[Any]]:
        """Start a call of these ranks; return a future for the answer of each."""
        futures: dict[int, Future[Any]] = {rank: Future() for rank in arguments}
        for relay, ranks in _by_relay(arguments).items():
            part = {rank: arguments[rank] for rank in ranks}
            with self._lock:
                if new := self._new.pop(relay, None):
                    self._in_turn(relay, "know", (new,), timeout_s)
                number, answered = self._in_turn(relay, "call", (method, part, timeout_s, keep), timeout_s)
            self._hand_out_later(_Call(relay, number, timeout_s), {rank: futures[rank] for rank in ranks}, answered)
        return futures

    def _in_turn(self, relay: int, method: str, args: tuple[Any, ...], timeout_s: float) -> tuple[int, Future[Any]]:
        number = next(self._numbers.setdefault(relay, itertools.count()))
        # It fails with arguments that cannot be sent, for example; calls to come wait for this number.
        with on_failure(lambda: self.start(relay, "skip", (number,), timeout_s)):
            return number, self.start(relay, method, (number, *args), timeout_s)

    def _hand_out_later(self, call: _Call, futures: Mapping[int, Future[Any]], answered: Future[Any]) -> None:
        answered.add_done_callback(partial(self._hand_out, call, futures))

    def _hand_out(self, call: _Call, futures: Mapping[int, Future[Any]], answered: Future[Any]) -> None:
        """Give the futures of ranks what their relay returned, and have it wait for those that are missing."""
        if answered.exception() is not None or isinstance(answered.result(), Failure):
            for future in futures.values():
                _settle(future, error=RelayLost(call.relay, "call", answered))
            return
        answers = answered.result()
        for rank, answer in answers.items():
            if isinstance(answer, Unanswered):
                _settle(futures[rank], error=answer.error)
            else:
                _settle(futures[rank], answer)
        missing = {rank: future for rank, future in futures.items() if rank not in answers and not future.done()}
        if missing:
            # Not here: Ray calls this in a thread of its own, in which no call should be made.
            threading.Thread(target=self._wait_for_rest, args=(call, missing), daemon=True).start()

    def _wait_for_rest(self, call: _Call, futures: Mapping[int, Future[Any]]) -> None:
        try:
            answered = self.start(call.relay, "rest", (call.number, call.timeout_s), call.timeout_s)
        except Exception as error:  # nobody looks at this thread: who waits for the call learns of it
            answered = Future()
            answered.set_exception(error)
        self._hand_out_later(call, futures, answered)


@dataclass(frozen=True)
class _Call:
    """A call to a relay."""

    relay: int
    number: int
    timeout_s: float


def relay_of(rank: int) -> int:
    return rank // RANKS_PER_RELAY


def _by_relay(ranks: Iterable[int]) -> dict[int, list[int]]:
    dealt: dict[int, list[int]] = {}
    for rank in ranks:
        dealt.setdefault(relay_of(rank), []).append(rank)
    return dealt


def _settle(future: Future[Any], answer: Any = None, *, error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # the group was closed or lost meanwhile
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)
