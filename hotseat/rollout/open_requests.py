"""The unfinished requests of an engine: who waits, who runs, and how each future gets its outcome."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hotseat.errors import HotseatError, NonFiniteError, UserError
from hotseat.types import Completion, Request

if TYPE_CHECKING:
    from hotseat.rollout.stop_strings import StopStrings


class EngineSequence:
    """An unfinished request, and what was sampled for it so far."""

    def __init__(
        self, request: Request, stop_ids: frozenset[int], max_new_tokens: int, stop_strings: StopStrings | None = None
    ):
        self.request = request
        self.stop_strings = stop_strings
        self.stop: str | None = None  # the one that ended it
        self.future: Future[Completion] = Future()
        self.stop_ids = stop_ids
        self.max_new_tokens = max_new_tokens
        self.prompt = tuple(request.token_ids)
        sampling = request.sampling
        self.is_greedy = sampling.temperature == 0
        self.is_filtered = not self.is_greedy and (sampling.top_p < 1.0 or sampling.top_k > 0)
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        # Experts of its tokens, part by part, as in `Completion.routing`; empty: they are not recorded.
        self.routing: list[np.ndarray[Any, Any]] = []

    @property
    def num_keys(self) -> int:
        """Count the keys in its slot after the next step, which adds those of the newest token."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def max_keys(self) -> int:
        """Count the keys in its slot after the last step that it may take."""
        return len(self.prompt) + self.max_new_tokens - 1

    def num_up_to_stop(self, token_ids: Sequence[int]) -> int:
        """Count these new tokens up to the one that completes a stop string; all of them if none does."""
        assert self.stop_strings is not None, "nothing to look for"
        for count, token in enumerate(token_ids, start=1):
            if self.stop_strings.may_complete(token):
                sampled = [*self.token_ids, *token_ids[:count]]
                if self.stop_strings.completed(self.prompt, sampled) is not None:
                    return count
        return len(token_ids)

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], version: int
    ) -> Literal["stop", "length"] | None:
        """Append sampled tokens, of which only the last may end it; return why it does, or None."""
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.versions += [version] * len(token_ids)
        if self.token_ids and self.token_ids[-1] in self.stop_ids:
            return "stop"
        if self.stop_strings is not None:
            self.stop = self.stop_strings.completed(self.prompt, self.token_ids)
            if self.stop is not None:
                return "stop"
        return "length" if len(self.token_ids) == self.max_new_tokens else None

    def completion(self, finish: Literal["stop", "length", "abort"]) -> Completion:
        facts = tuple(self.token_ids), tuple(self.log_probs), tuple(self.versions)
        routing = None
        if self.routing:  # of tokens behind the end, too, if the engine went on meanwhile
            routing = np.concatenate(self.routing)[: self.num_keys - 1]
            assert len(routing) == self.num_keys - 1, f"{self.request.id}: {len(routing)} routed of {self.num_keys}"
        return Completion(self.request.id, *facts, finish, stop=self.stop, routing=routing)

    def not_finite(self, version: int) -> NonFiniteError:
        return NonFiniteError(
            f"request {self.request.id!r}: logits for position {self.num_keys} under weight version {version} are not"
            " finite"
        )


class RequestTable:
    """Unfinished requests by id. Every method locks for itself; the lock may be held already."""

    def __init__(self, lock: threading.Condition):
        self._lock = lock
        self._in_flight: dict[str, EngineSequence] = {}  # waiting and running, by request id
        self._waiting: deque[EngineSequence] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequences: Sequence[EngineSequence]) -> None:
        """Let requests wait for their turn: all of them, or none if an id is not unique."""
        ids = [sequence.request.id for sequence in sequences]
        with self._lock:
            if not self._in_flight.keys().isdisjoint(ids):
                self.drop_cancelled()
            twice = [name for name, count in Counter(ids).items() if count > 1 or name in self._in_flight]
            if twice:
                raise UserError(
                    f"request {twice[0]!r} is already in flight: ids must be unique among unfinished requests"
                )
            self._in_flight.update(zip(ids, sequences, strict=True))
            self._waiting.extend(sequences)

    def drop_cancelled(self) -> None:
        """Forget waiting requests that were cancelled."""
        with self._lock:
            for sequence in [s for s in self._waiting if s.future.cancelled()]:
                self._waiting.remove(sequence)
                del self._in_flight[sequence.request.id]

    def upcoming(self, count: int) -> list[EngineSequence]:
        """List the next requests that wait, at most `count`; they go on waiting."""
        with self._lock:
            return list(itertools.islice(self._waiting, count))

    def take_waiting(self, count: int) -> list[EngineSequence]:
        """Return the next requests that wait, at most `count`; they run from here on."""
        taken: list[EngineSequence] = []
        with self._lock:
            while self._waiting and len(taken) < count:
                sequence = self._waiting.popleft()
                if sequence.future.set_running_or_notify_cancel():
                    taken.append(sequence)
                else:
                    del self._in_flight[sequence.request.id]
        return taken

    def sampled(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the tokens that requests have from a position on, without those that have none."""
        with self._lock:
            chosen = [(name, start, self._in_flight[name]) for name, start in starts.items() if name in self._in_flight]
        # The engine's thread appends to the lists meanwhile, which slices do not notice.
        tokens = {name: tuple(sequence.token_ids[start:]) for name, start, sequence in chosen}
        return {name: new for name, new in tokens.items() if new}

    def stop_waiting(self, request_ids: Sequence[str] | None) -> tuple[list[EngineSequence], list[str]]:
        """Take these requests, or all, out of the queue: return them, and the ids of those not cancelled before."""
        with self._lock:
            ids = list(self._in_flight) if request_ids is None else request_ids
            chosen = [self._in_flight[i] for i in dict.fromkeys(ids) if i in self._in_flight]
            chosen_ids = {id(sequence) for sequence in chosen}
            waiting = [s for s in self._waiting if id(s) in chosen_ids]
            self._waiting = deque(s for s in self._waiting if id(s) not in chosen_ids)
        # A waiting one may have been cancelled meanwhile: it is gone either way.
        cancelled = {id(s) for s in waiting if not s.future.set_running_or_notify_cancel()}
        return chosen, [s.request.id for s in chosen if id(s) not in cancelled]

    def complete(self, done: Sequence[tuple[EngineSequence, Completion | HotseatError]]) -> None:
        """Give each future its outcome and forget the request."""
        for sequence, outcome in done:
            # Requests are forgotten one by one: if a callback ends the thread, the others still get its error.
            with self._lock:
                del self._in_flight[sequence.request.id]
            if isinstance(outcome, Completion):
                set_outcome(sequence.future, result=outcome)
            else:
                set_outcome(sequence.future, error=outcome)

    def clear(self) -> list[Future[Completion]]:
        """Forget every request; return their futures, which have no outcome yet."""
        with self._lock:
            futures = [sequence.future for sequence in self._in_flight.values()]
            self._in_flight.clear()
            self._waiting.clear()
        return futures


def set_outcome(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Give a future its result or its error, unless somebody has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
