"""What the engines have in common: one background thread that owns the model, and who may ask it for what, when.

The thread steps while there is work and sleeps while there is none; callers leave requests and commands for it. What
is in flight, paused, put aside, half loaded or gone is kept here, so that every engine refuses the same things with the
same words. An engine fills in the steps.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hotseat.errors import DeadlineError, HotseatError, NonFiniteError, RunError, UserError, WeightError, WorkerError
from hotseat.rollout.engine import Health, Part, check_parts, check_request, check_scoring
from hotseat.types import Completion, Moved, Request

T = TypeVar("T")


class EngineSequence:
    """A request on its way."""

    def __init__(self, request: Request, stop_ids: frozenset[int], max_new_tokens: int):
        self.request = request
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

    @property
    def num_keys(self) -> int:
        """In its slot after the next step: the newest token's are not there yet."""
        return len(self.prompt) + len(self.token_ids)

    def append(self, token_id: int, log_prob: float, version: int) -> Literal["stop", "length"] | None:
        """One more sampled token; says whether and why it was the last."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.max_new_tokens else None

    def completion(self, finish: Literal["stop", "length", "abort"]) -> Completion:
        return Completion(self.request.id, tuple(self.token_ids), tuple(self.log_probs), tuple(self.versions), finish)

    def not_finite(self, version: int) -> NonFiniteError:
        return NonFiniteError(
            f"request {self.request.id!r}: logits for position {self.num_keys} under weight version {version} are not"
            " finite"
        )


class ThreadedEngine(ABC):
    """See `Engine` for the contract. A subclass sets itself up, then calls `_start`.

    num_slots: sequences that run at once. vocab_size: of the model. num_threads: of the thread that computes; None
    leaves it to torch.
    """

    parts: frozenset[Part]
    can_put_aside: frozenset[Part]
    scores_with: frozenset[Part]
    undigested: frozenset[str]

    def __init__(
        self,
        *,
        max_length: int,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        device: torch.device,
        num_threads: int | None,
        version: int,
        call_timeout_s: float,
    ):
        self._max_length, self._num_slots, self._vocab_size = max_length, num_slots, vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._device = device
        self._num_threads = num_threads
        self._call_timeout_s = call_timeout_s
        self._version = version

        # Shared between threads, under `_wake`.
        self._wake = threading.Condition()
        self._in_flight: dict[str, EngineSequence] = {}  # waiting and running, by request id
        self._waiting: deque[EngineSequence] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_paused = False
        self._is_closing = False
        self._aside: frozenset[Part] = frozenset()
        self._loading: int | None = None  # the version that is being loaded
        self._broken: str | None = None  # why the weights are not those of any version
        self._error: HotseatError | None = None  # why it is gone
        self._num_sampled = 0
        self._last_step = time.monotonic()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()
        self._close_at_exit = _closer(self)
        atexit.register(self._close_at_exit)

    # --- what an engine fills in, all on the background thread ------------------------------------------------------

    @abstractmethod
    def _step(self) -> None:
        """Sample for the running sequences, after waiting ones were taken in; `_complete` those that end."""

    @abstractmethod
    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]: ...

    @abstractmethod
    def _drop(self, sequences: list[EngineSequence]) -> None:
        """Forget these, some of which run."""

    @abstractmethod
    def _move_aside(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        """Bytes that left, bytes that were copied. What can fail comes first: a failure leaves all in place."""

    @abstractmethod
    def _move_back(self, parts: frozenset[Part]) -> tuple[int, int]:
        """Bytes that came, bytes that were copied."""

    @abstractmethod
    def _resident_bytes(self) -> dict[Part, int]:
        """On the device now. Called from any thread."""

    @abstractmethod
    def _prepare_load(self) -> None:
        """Forget what was computed with the old weights."""

    @abstractmethod
    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace these weights. When it returns, the sender may reuse their memory."""

    @abstractmethod
    def _missing(self) -> list[str]:
        """Weights that were not loaded since `_prepare_load`."""

    @abstractmethod
    def _digest(self) -> dict[str, int]: ...

    @abstractmethod
    def _pause(self) -> None:
        """End what of a step is still under way: after this nothing is sampled until the next one."""

    @abstractmethod
    def _end(self) -> None:
        """Give back what the thread held."""

    # --- what callers see -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def submit(self, request: Request) -> Future[Completion]:
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        sequences = [self._checked(request) for request in requests]
        ids = [request.id for request in requests]
        with self._wake:
            self._raise_unless_ready()
            if not self._in_flight.keys().isdisjoint(ids):
                self._drop_cancelled()
            twice = [name for name, count in Counter(ids).items() if count > 1 or name in self._in_flight]
            if twice:
                raise UserError(
                    f"request {twice[0]!r} is already in flight: ids must be unique among unfinished requests"
                )
            self._in_flight.update(zip(ids, sequences, strict=True))
            self._waiting.extend(sequences)
            self._wake.notify_all()
        return [sequence.future for sequence in sequences]

    def generate(self, requests: Sequence[Request], timeout_s: float = 3600.0) -> list[Completion]:
        self._refuse_own_thread("generate")
        deadline = time.monotonic() + timeout_s
        submitted = self.submit_many(requests)
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in submitted]
        except BaseException as error:
            unfinished = [r.id for r, f in zip(requests, submitted, strict=True) if not f.done()]
            if unfinished:
                with contextlib.suppress(HotseatError):  # What went wrong first is what matters.
                    self.abort(unfinished)
            if isinstance(error, FutureTimeoutError):
                if not unfinished:  # the last one came just then
                    return [future.result() for future in submitted]
                raise DeadlineError(
                    f"generate: {len(unfinished)} of {len(requests)} requests did not finish in {timeout_s:g} s"
                ) from None
            raise

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        check_scoring(sequences, temperature, self._max_length, self._vocab_size)
        return self._call("score", lambda: self._score_if_ready(sequences, temperature))

    def abort(self, request_ids: Iterable[str] | None = None) -> list[str]:
        ids = None if request_ids is None else list(request_ids)
        return self._call("abort", lambda: self._abort(ids))

    def pause(self) -> None:
        self._call("pause", lambda: self._set_paused(True))

    def resume(self) -> None:
        self._call("resume", lambda: self._set_paused(False))

    def put_aside(self, parts: Iterable[Part], keep_weights: bool = True) -> Moved:
        chosen = check_parts(parts, self.parts)
        return self._call("put_aside", lambda: self._put_aside(chosen, keep_weights))

    def bring_back(self, parts: Iterable[Part]) -> Moved:
        chosen = check_parts(parts, self.parts)
        return self._call("bring_back", lambda: self._bring_back(chosen))

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        def load() -> None:
            self._begin_load(version)
            self._load_bucket(named_tensors)
            self._finish_load()

        self._call("load_weights", load)

    def begin_load(self, version: int) -> None:
        self._call("begin_load", lambda: self._begin_load(version))

    def load_bucket(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._call("load_bucket", lambda: self._load_bucket(named_tensors))

    def finish_load(self) -> None:
        self._call("finish_load", self._finish_load)

    def digest(self) -> dict[str, int]:
        return self._call("digest", self._digest_if_there)

    def health(self) -> Health:
        with self._wake:
            self._raise_if_gone()
            self._drop_cancelled()
            num_waiting = len(self._waiting)
            return Health(
                version=self._version,
                is_paused=self._is_paused,
                is_loading=self._loading is not None,
                aside=self._aside,
                resident_bytes=self._resident_bytes(),
                num_running=len(self._in_flight) - num_waiting,
                num_waiting=num_waiting,
                num_sampled=self._num_sampled,
                seconds_since_step=time.monotonic() - self._last_step,
            )

    def close(self, timeout_s: float = 60.0) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        atexit.unregister(self._close_at_exit)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"close: the engine's thread did not end in {timeout_s:g} s")

    # --- checks -----------------------------------------------------------------------------------------------------

    def _checked(self, request: Request) -> EngineSequence:
        check_request(request, self._max_length, self._vocab_size)
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        max_new_tokens = min(sampling.max_new_tokens, self._max_length - len(request.token_ids))
        return EngineSequence(request, stop_ids, max_new_tokens)

    def _raise_if_gone(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        if self._is_closing:
            raise RunError("the engine is closed")

    def _raise_unless_ready(self) -> None:
        """To generate, that is: now or as soon as it is resumed or the load in progress is finished."""
        self._raise_if_gone()
        if self._aside:
            raise RunError(f"{' and '.join(sorted(self._aside))} put aside: bring back before generating or scoring")
        if self._broken is not None:
            raise WeightError(self._broken)

    def _refuse_own_thread(self, operation: str) -> None:
        if threading.current_thread() is self._thread:
            raise RunError(f"{operation} was called from a callback of a future, where it would wait for itself")

    def _call(self, operation: str, function: Callable[[], T]) -> T:
        """Let the background thread do it between two steps, and wait."""
        self._refuse_own_thread(operation)
        future: Future[T] = Future()
        with self._wake:
            self._raise_if_gone()
            self._commands.append((function, future))
            self._wake.notify_all()
        try:
            return future.result(self._call_timeout_s)
        except FutureTimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(
                f"{operation}: the engine's thread did not answer in {self._call_timeout_s:g} s"
            ) from None

    # --- the background thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Takes commands and requests, gives results to their futures.

        Waits without limit only when there is nothing to do; woken by `submit`, by commands and by `close`. Whatever
        ends it, every future that is still pending gets to know.
        """
        error: HotseatError = RunError("the engine was closed")
        try:
            if self._num_threads is not None:
                # A thread takes the process's default at its first question or parallel operation, even after it was
                # set a number of its own: ask first.
                torch.get_num_threads()
                torch.set_num_threads(self._num_threads)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._turn():
                pass
        except BaseException as cause:
            error = WorkerError(f"the engine's thread died: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        try:
            self._end()
        except Exception as cause:
            if error.__cause__ is None:  # else what went wrong first is what matters
                error = WorkerError(f"the engine's thread failed at its end: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
        with self._wake:
            self._error = error
            futures: list[Future[Any]] = [future for _, future in self._commands]
            futures += [sequence.future for sequence in self._in_flight.values()]
            self._commands.clear()
            self._in_flight.clear()
            self._waiting.clear()
        for future in futures:
            _set(future, error=error)

    def _turn(self) -> bool:
        with self._wake:
            while not (self._commands or self._is_closing or self._can_step()):
                self._wake.wait()
            if self._is_closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for index, (function, future) in enumerate(commands):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except Exception as error:
                _set(future, error=error)
            except BaseException as error:
                with self._wake:
                    self._commands.extendleft(reversed(commands[index:]))
                raise error
            else:
                _set(future, result=result)
        if self._can_step():
            with torch.inference_mode():
                self._step()
        return True

    def _can_step(self) -> bool:
        is_held = self._is_paused or self._loading is not None or self._broken is not None or self._aside
        return bool(self._in_flight) and not is_held

    def _complete(self, done: list[tuple[EngineSequence, Completion | HotseatError]]) -> None:
        for sequence, outcome in done:
            # One by one: if a callback ends the thread, the others are still in flight and get to know.
            with self._wake:
                del self._in_flight[sequence.request.id]
            if isinstance(outcome, Completion):
                _set(sequence.future, result=outcome)
            else:
                _set(sequence.future, error=outcome)

    def _take_waiting(self, count: int) -> list[EngineSequence]:
        """The next that wait, at most so many; they run from here on."""
        taken: list[EngineSequence] = []
        with self._wake:
            while self._waiting and len(taken) < count:
                sequence = self._waiting.popleft()
                if sequence.future.set_running_or_notify_cancel():
                    taken.append(sequence)
                else:
                    del self._in_flight[sequence.request.id]
        return taken

    def _drop_cancelled(self) -> None:
        """Forget waiting requests that were cancelled. Under the lock."""
        for sequence in [s for s in self._waiting if s.future.cancelled()]:
            self._waiting.remove(sequence)
            del self._in_flight[sequence.request.id]

    # --- commands -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _score_if_ready(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        with self._wake:
            missing = self._aside & self.scores_with
            if missing:
                raise RunError(f"{' and '.join(sorted(missing))} put aside: bring back before scoring")
            if self._loading is not None:
                raise RunError(f"score: weights of version {self._loading} are being loaded")
            if self._broken is not None:
                raise WeightError(self._broken)
        return self._score(sequences, temperature)

    def _abort(self, request_ids: list[str] | None) -> list[str]:
        with self._wake:
            ids = list(self._in_flight) if request_ids is None else request_ids
            chosen = [self._in_flight[i] for i in dict.fromkeys(ids) if i in self._in_flight]
            wanted = {id(sequence) for sequence in chosen}
            waiting = [s for s in self._waiting if id(s) in wanted]
            self._waiting = deque(s for s in self._waiting if id(s) not in wanted)
        # A waiting one may have been cancelled meanwhile: it is gone either way.
        cancelled = {id(s) for s in waiting if not s.future.set_running_or_notify_cancel()}
        self._drop(chosen)
        self._complete([(s, s.completion("abort")) for s in chosen])
        return [s.request.id for s in chosen if id(s) not in cancelled]

    def _set_paused(self, is_paused: bool) -> None:
        if is_paused:
            self._pause()
        with self._wake:
            if not is_paused:
                self._raise_unless_ready()
            self._is_paused = is_paused

    def _put_aside(self, parts: frozenset[Part], keep_weights: bool) -> Moved:
        with self._wake:
            self._drop_cancelled()
            if self._in_flight and not self._is_paused:
                raise RunError(
                    f"put_aside: {len(self._in_flight)} requests in flight: wait for them, abort them, or pause first"
                )
            if self._loading is not None:
                raise RunError(f"put_aside: weights of version {self._loading} are being loaded: finish the load first")
            parts = parts - self._aside
            before = self._aside
            self._aside |= parts  # From here on requests are refused.
        start = time.perf_counter()
        try:
            num_bytes, num_copied = self._move_aside(parts, keep_weights)
            if "weights" in parts and not keep_weights:
                with self._wake:
                    self._broken = "the weights were dropped when they were put aside: load new ones first"
        except BaseException:
            with self._wake:
                self._aside = before
            raise
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        return Moved(num_bytes, num_copied, (time.perf_counter() - start) * 1e3)

    def _bring_back(self, parts: frozenset[Part]) -> Moved:
        parts = parts & self._aside
        start = time.perf_counter()
        num_bytes, num_copied = self._move_back(parts)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._wake:
            self._aside -= parts
        return Moved(num_bytes, num_copied, (time.perf_counter() - start) * 1e3)

    def _begin_load(self, version: int) -> None:
        with self._wake:
            if "weights" in self._aside:
                raise RunError("weights put aside: bring back before loading new ones")
            self._loading, self._broken = version, None
        try:
            self._prepare_load()
        except BaseException as error:
            self._break(f"{type(error).__name__}: {error}")
            raise

    def _load_bucket(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._loading is None:
            raise RunError("load_bucket: no load has begun: call begin_load first")
        try:
            self._load(named_tensors)
        except BaseException as error:
            self._break(f"{type(error).__name__}: {error}")
            raise

    def _finish_load(self) -> None:
        if self._loading is None:
            raise RunError("finish_load: no load has begun: call begin_load first")
        missing = self._missing()
        if missing:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            self._break(f"missing {names}")
            raise WeightError(self._broken)
        with self._wake:
            self._version, self._loading = self._loading, None

    def _break(self, why: str) -> None:
        with self._wake:
            self._broken = f"weights of version {self._loading} were loaded in part ({why}): load them all again"
            self._loading = None

    def _digest_if_there(self) -> dict[str, int]:
        if "weights" in self._aside:
            raise RunError("weights put aside: bring back before asking for their digest")
        return self._digest()


def _set(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Unless somebody has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _closer(engine: ThreadedEngine) -> Callable[[], None]:
    """Closes the engine at exit, if it still exists: a thread inside torch must not outlive the interpreter."""
    reference = weakref.ref(engine)

    def close() -> None:
        engine = reference()
        if engine is not None:
            engine.close()

    return close
