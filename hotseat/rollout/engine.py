"""Rollout engines: the contract of all, on top of one background thread that owns the model.

Callers leave requests (`open_requests`) and commands (`engine_thread`); `serving_state` knows what is paused, offloaded
or half loaded, so that every engine refuses the same things with the same words. An engine fills in the hooks at the
end of `Engine`, and passes `tests/rollout/conformance.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Required, TypedDict

import torch
from torch import Tensor

from hotseat.closing import on_failure
from hotseat.errors import DeadlineError, HotseatError, UserError
from hotseat.placement.role_names import Part
from hotseat.rollout.engine_thread import EngineThread, Work
from hotseat.rollout.open_requests import EngineSequence, RequestTable
from hotseat.rollout.serving_state import ServingState, StepCounter
from hotseat.types import Completion, Moved, Request

if TYPE_CHECKING:
    from hotseat.rollout.stop_strings import StopStrings

PARTS: tuple[Part, ...] = (Part.WEIGHTS, Part.KV_CACHE)


@dataclass(frozen=True)
class Health:
    """The state of an engine that is alive; one that is not raises instead."""

    version: int
    is_paused: bool
    is_loading: bool  # between `begin_load` and `finish_load`
    offloaded: frozenset[Part]
    resident_bytes: Mapping[Part, int]  # on the device now
    num_running: int  # requests that hold a slot
    num_waiting: int
    num_sampled: int  # tokens since the engine started
    seconds_since_step: float  # since the last decode step ended, or since the start


class ServingOptions(TypedDict, total=False):
    """Options that every engine is made with."""

    max_length: Required[int]  # of prompt and completion together
    num_slots: int  # sequences that run at once
    eos_token_ids: Iterable[int]  # end a completion unless the request says `ignore_eos`
    num_threads: int | None  # of the thread that computes; None leaves it to torch
    version: int  # of the weights
    call_timeout_s: float  # how long a call that waits for the background thread may take


class Engine(ABC):
    """Generates from token ids and scores token ids, with weights that are replaced while it runs.

    Calls come from any thread. What waits, waits for a bounded time and raises `DeadlineError`. If the engine dies, its
    pending futures and every later call raise `WorkerError` with the cause.

    A subclass sets itself up, then calls `_start`.
    """

    parts: frozenset[Part]  # that it keeps on the device
    can_offload: frozenset[Part]  # that it can take off the device
    scores_with: frozenset[Part]  # that must be on the device for `score`
    undigested: frozenset[str]  # weights that it has put into a form of its own, so that no digest reaches them
    keeps_cache: bool  # requests in flight keep their KV cache when weights change; False recomputes it
    sees_images = False
    placeholder_ids: frozenset[int] = frozenset()  # end every answer (see `hotseat.vision`)
    load_tokenizer: Callable[[], Any] | None = None  # for stop strings; None: requests have none

    def __init__(
        self,
        *,
        vocab_size: int,
        device: torch.device,
        max_length: int,
        num_slots: int = 64,
        eos_token_ids: Iterable[int] = (),
        num_threads: int | None = None,
        version: int = 0,
        call_timeout_s: float = 600.0,
    ):
        if num_slots < 1 or max_length < 2:
            raise UserError(f"num_slots {num_slots} must be at least 1 and max_length {max_length} at least 2")
        self._max_length, self._num_slots, self._vocab_size = max_length, num_slots, vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._device = device
        self._call_timeout_s = call_timeout_s
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._wake = threading.Condition()  # the lock of everything that threads share
        self._requests = RequestTable(self._wake)
        self._serving = ServingState(self._wake, version)
        self._steps = StepCounter()
        self._thread = EngineThread(self._wake, device, num_threads, call_timeout_s)

    def _start(self) -> None:
        self._thread.start(Work(self._can_step, self._step, self._end, self._requests.clear))
        self._close_at_exit = _closer(self)
        atexit.register(self._close_at_exit)

    # --- what callers see -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return the version of the weights that are served: that of the last complete load."""
        return self._serving.version

    def submit(self, request: Request) -> Future[Completion]:
        """Ask for a completion. Returns at once; the future completes when this request does, whatever the others do.

        The seed decides: the same request gives the same tokens whatever else is asked, in whatever order (bit for bit
        where the engine says so). The sampled tokens include the stop token. `finish` is "stop" at a stop token,
        "length" after `max_new_tokens` or when prompt and completion fill the engine's maximum length, "abort" after
        `abort`. Log-probs are of the distribution that was sampled from, at the sampling temperature and after top-k
        and top-p; a greedy request (temperature 0) gets those of temperature 1. `Future.cancel` works while the request
        waits for its turn; later use `abort`.
        """
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Submit several requests at once, so that they can start together. If one is refused, none is taken."""
        sequences = [self._checked(request) for request in requests]
        with self._wake:
            self._thread.raise_if_gone()
            self._serving.raise_unless_ready()
            self._requests.add(sequences)
            self._wake.notify_all()
        return [sequence.future for sequence in sequences]

    def generate(self, requests: Sequence[Request], timeout_s: float = 3600.0) -> list[Completion]:
        """Return all completions, in the order of the requests. After a failure or `timeout_s` the rest is aborted."""
        self._thread.refuse_own_thread("generate")
        deadline = time.monotonic() + timeout_s
        submitted = self.submit_many(requests)
        try:
            return [future.result(max(0.0, deadline - time.monotonic())) for future in submitted]
        except BaseException as error:
            unfinished = [r.id for r, f in zip(requests, submitted, strict=True) if not f.done()]
            if unfinished:
                with contextlib.suppress(HotseatError):  # the first error is raised
                    self.abort(unfinished)
            if isinstance(error, FutureTimeoutError):
                if not unfinished:  # the last one came just then
                    return [future.result() for future in submitted]
                raise DeadlineError(
                    f"generate: {len(unfinished)} of {len(requests)} requests did not finish in {timeout_s:g} s"
                ) from None
            raise

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, images: Sequence[Sequence[str]] = ()
    ) -> list[list[float]]:
        """Score sequences: entry t is the log-prob of token t after those before it, at `temperature`; entry 0 is 0.

        images: those of each sequence; empty: no sequence has any.
        """
        check_scoring(sequences, temperature, self._max_length, self._vocab_size)
        if any(images) and not self.sees_images:
            raise UserError("score: images, and the model of this engine sees none")
        seen = images or [()] * len(sequences)
        return self._thread.call("score", lambda: self._score_if_ready(sequences, temperature, seen))

    def sampled(self, starts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the tokens sampled so far for requests in flight, each from a position on. Answers at once.

        starts: position by request id. Requests without new tokens are left out. The tokens of a request only grow, and
        its completion begins with them.
        """
        self._thread.raise_if_gone()
        return self._requests.sampled(starts)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """End these requests, or all, with the tokens they have. Returns the ids that were waiting or running."""
        ids = None if request_ids is None else list(request_ids)
        return self._thread.call("abort", lambda: self._abort(ids))

    def pause(self) -> None:
        """Stop sampling after the current step. Requests keep their place; new ones may come in and wait."""
        self._thread.call("pause", lambda: self._set_paused(True))

    def resume(self) -> None:
        """Continue where `pause` stopped, with the weights that are loaded now; each token records its version."""
        self._thread.call("resume", lambda: self._set_paused(False))

    def offload(self, parts: Iterable[Part], keep_weights: bool = True) -> Moved:
        """Take parts off the device. Refused while requests run, unless paused: then their cache is saved.

        keep_weights: False drops the weights instead of saving them; then nothing is generated before the next complete
        load. Requests that come while a part is offloaded are refused.
        """
        chosen = check_parts(parts, self.parts)
        return self._thread.call("offload", lambda: self._offload(chosen, keep_weights))

    def onload(self, parts: Iterable[Part]) -> Moved:
        """Onload parts, bit for bit."""
        chosen = check_parts(parts, self.parts)
        return self._thread.call("onload", lambda: self._onload(chosen))

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, under their Hugging Face names: begin, one bucket, finish."""

        def load() -> None:
            self._begin_load(version)
            self._load_bucket(named_tensors)
            self._finish_load()

        self._thread.call("load_weights", load)

    def begin_load(self, version: int) -> None:
        """Start to replace all weights. Sampling stands still until the load is finished; prefixes are forgotten."""
        self._thread.call("begin_load", lambda: self._begin_load(version))

    def load_bucket(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace some weights. Each exactly once between `begin_load` and `finish_load`."""
        self._thread.call("load_bucket", lambda: self._load_bucket(named_tensors))

    def finish_load(self) -> None:
        """Serve the new version. Raises `WeightError` naming what is missing.

        After a load that failed, requests are refused and those in flight stand still until another one succeeds.
        """
        self._thread.call("finish_load", self._finish_load)

    def digest(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Hash each live weight, as the next step would use it, by `tensor_digest`, under each of its names.

        names: the only ones to hash; None is all.
        """
        return self._thread.call("digest", lambda: self._digest_if_there(names))

    def health(self) -> Health:
        """Report the engine's state. Answers at once, in the middle of a step too."""
        with self._wake:
            self._thread.raise_if_gone()
            self._requests.drop_cancelled()
            num_waiting = self._requests.num_waiting
            return Health(
                version=self._serving.version,
                is_paused=self._serving.is_paused,
                is_loading=self._serving.loading is not None,
                offloaded=self._serving.offloaded,
                resident_bytes=self._resident_bytes(),
                num_running=len(self._requests) - num_waiting,
                num_waiting=num_waiting,
                num_sampled=self._steps.num_sampled,
                seconds_since_step=time.monotonic() - self._steps.last_step,
            )

    def close(self, timeout_s: float = 60.0) -> None:
        """Close the engine. Pending futures raise. Closing twice is fine."""
        atexit.unregister(self._close_at_exit)
        self._thread.close(timeout_s)

    def _checked(self, request: Request) -> EngineSequence:
        check_request(request, self._max_length, self._vocab_size)
        sampling = request.sampling
        if request.images and not self.sees_images:
            raise UserError(f"request {request.id!r}: it has images, and the model of this engine sees none")
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        stop_ids |= self.placeholder_ids
        max_new_tokens = min(sampling.max_new_tokens, self._max_length - len(request.token_ids))
        return EngineSequence(request, stop_ids, max_new_tokens, self._stop_strings(sampling.stop))

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings | None:
        """Return the finder of these strings, one for all requests with them: it remembers tokens."""
        if not strings:
            return None
        if strings not in self._stops:
            from hotseat.rollout.stop_strings import StopStrings

            if self.load_tokenizer is None:
                raise UserError("stop strings: this engine has no tokenizer, which would know the text of tokens")
            self._stops.setdefault(strings, StopStrings(self.load_tokenizer(), strings))
        return self._stops[strings]

    # --- what the background thread does ------------------------------------------------------------------------------

    def _can_step(self) -> bool:
        return len(self._requests) > 0 and not self._serving.is_held()

    @torch.inference_mode()
    def _score_if_ready(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        self._serving.raise_unless_scorable(self.scores_with)
        return self._score(sequences, temperature, images)

    def _abort(self, request_ids: list[str] | None) -> list[str]:
        chosen, aborted_ids = self._requests.stop_waiting(request_ids)
        self._drop(chosen)
        self._requests.complete([(s, s.completion("abort")) for s in chosen])
        return aborted_ids

    def _set_paused(self, is_paused: bool) -> None:
        if is_paused:
            self._pause()
        with self._wake:
            if not is_paused:
                self._thread.raise_if_gone()
                self._serving.raise_unless_ready()
            self._serving.is_paused = is_paused

    def _offload(self, parts: frozenset[Part], keep_weights: bool) -> Moved:
        with self._wake:
            self._requests.drop_cancelled()
            parts = self._serving.begin_offload(parts, len(self._requests))
        start = time.perf_counter()
        with on_failure(lambda: self._serving.end_onload(parts)):
            num_bytes, num_copied = self._offload_parts(parts, keep_weights)
        if Part.WEIGHTS in parts and not keep_weights:
            self._serving.drop_weights()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        return Moved(num_bytes, num_copied, (time.perf_counter() - start) * 1e3)

    def _onload(self, parts: frozenset[Part]) -> Moved:
        parts = parts & self._serving.offloaded
        start = time.perf_counter()
        num_bytes, num_copied = self._onload_parts(parts)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._serving.end_onload(parts)
        return Moved(num_bytes, num_copied, (time.perf_counter() - start) * 1e3)

    def _begin_load(self, version: int) -> None:
        self._serving.begin_load(version)
        try:
            self._prepare_load()
        except BaseException as error:
            self._serving.fail_load(f"{type(error).__name__}: {error}")
            raise

    def _load_bucket(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._serving.raise_unless_loading("load_bucket")
        try:
            self._load(named_tensors)
        except BaseException as error:
            self._serving.fail_load(f"{type(error).__name__}: {error}")
            raise

    def _finish_load(self) -> None:
        self._serving.raise_unless_loading("finish_load")
        missing = self._missing()
        if not missing:
            self._finish_loading()
        self._serving.finish_load(missing)

    def _digest_if_there(self, names: Collection[str] | None) -> dict[str, int]:
        self._serving.raise_unless_weights("asking for their digest")
        return self._digest(names)

    # --- what an engine fills in: called on the background thread, `_resident_bytes` from any -------------------------

    @abstractmethod
    def _step(self) -> None:
        """Take in waiting requests, sample for those that run, and complete those that end."""

    @abstractmethod
    def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """Score sequences as `Engine.score` promises."""

    @abstractmethod
    def _drop(self, sequences: list[EngineSequence]) -> None:
        """Forget these requests, which may be waiting or running."""

    @abstractmethod
    def _offload_parts(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        """Take parts off the device; return the bytes that left it and the bytes copied.

        What can fail comes first: a failure leaves everything in place.
        """

    @abstractmethod
    def _onload_parts(self, parts: frozenset[Part]) -> tuple[int, int]:
        """Take parts to the device again; return the bytes that came and the bytes copied."""

    @abstractmethod
    def _resident_bytes(self) -> dict[Part, int]:
        """Return the bytes of each part that are on the device now. Called from any thread."""

    @abstractmethod
    def _prepare_load(self) -> None:
        """Forget results of the old weights: new ones are about to come."""

    @abstractmethod
    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace these weights. When it returns, the sender may reuse their memory."""

    def _finish_loading(self) -> None:  # noqa: B027
        """Prepare requests in flight to continue, now that all weights are loaded."""

    @abstractmethod
    def _missing(self) -> list[str]:
        """List the weights that were not loaded since `_prepare_load`."""

    @abstractmethod
    def _digest(self, names: Collection[str] | None) -> dict[str, int]:
        """Hash live weights as `Engine.digest` promises."""

    def _pause(self) -> None:  # noqa: B027
        """Finish steps that are still under way: after this nothing is sampled until the next step."""

    def _end(self) -> None:  # noqa: B027
        """Free what the thread held, at its end."""


def _closer(engine: Engine) -> Callable[[], None]:
    """Make a function that closes the engine at exit, if it still exists.

    A thread inside torch must not outlive the interpreter.
    """
    reference = weakref.ref(engine)

    def close() -> None:
        engine = reference()
        if engine is not None:
            engine.close()

    return close


# --- what every engine refuses ----------------------------------------------------------------------------------------


def check_request(request: Request, max_length: int, vocab_size: int) -> None:
    """Raise a `UserError` for a request that cannot work."""
    sampling, num_prompt = request.sampling, len(request.token_ids)
    where = f"request {request.id!r}"
    if not 0 < num_prompt < max_length:
        raise UserError(
            f"{where}: a prompt of {num_prompt} tokens; it must have at least 1 and leave room for one more within"
            f" max_length {max_length}"
        )
    _check_vocabulary(where, request.token_ids, vocab_size)
    if sampling.max_new_tokens < 1:
        raise UserError(f"{where}: max_new_tokens {sampling.max_new_tokens} must be at least 1")
    if not 0 <= sampling.temperature < math.inf:
        raise UserError(f"{where}: temperature {sampling.temperature} must be 0 (greedy) or above")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"{where}: top_p {sampling.top_p} must be above 0 and at most 1 (all)")
    if sampling.top_k < 0:
        raise UserError(f"{where}: top_k {sampling.top_k} must be 0 (all) or above")


def check_scoring(sequences: Sequence[Sequence[int]], temperature: float, max_length: int, vocab_size: int) -> None:
    """Raise a `UserError` for sequences that cannot be scored."""
    if not 0 < temperature < math.inf:
        raise UserError(f"score: temperature {temperature} must be above 0")
    for token_ids in sequences:
        if not 0 < len(token_ids) <= max_length:
            raise UserError(f"score: {len(token_ids)} tokens, must be 1 to max_length {max_length}")
        _check_vocabulary("score", token_ids, vocab_size)


def check_parts(parts: Iterable[Part], known: frozenset[Part]) -> frozenset[Part]:
    chosen = frozenset(parts)
    if not chosen <= known:
        unknown = [str(part) for part in sorted(chosen - known)]
        raise UserError(f"parts {unknown}: this engine has {[str(part) for part in sorted(known)]}")
    return chosen


def _check_vocabulary(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        stranger = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise UserError(f"{where}: token id {stranger} is not in the vocabulary of {vocab_size}")
