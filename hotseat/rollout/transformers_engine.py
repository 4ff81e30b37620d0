"""A rollout engine on top of transformers and torch alone: continuous batching over a fixed number of slots.

Three nouns: a *sequence* is a request on its way and knows all about it; a *slot* is a place in the batch and in the
cache, taken by one sequence at a time and given to the next as soon as it finishes; a *prefix* is the cached keys and
values of a prompt, computed once for all samples of it.

One background thread owns the model. It steps while there is work and sleeps while there is none; callers leave
requests and commands for it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from hotseat import faults
from hotseat.algorithms.digest import signed
from hotseat.errors import (
    DeadlineError,
    HotseatError,
    NonFiniteError,
    RunError,
    UserError,
    WeightError,
    WorkerError,
)
from hotseat.rollout._live_weights import LiveWeights
from hotseat.rollout._sampling import filtered, sample, uniforms
from hotseat.rollout._slots import Prefix, padded, slot_model
from hotseat.rollout.engine import PARTS, Health, Part, check_parts, check_request, check_scoring
from hotseat.types import Completion, Moved, Request

T = TypeVar("T")


class _Sequence:
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


class _PrefixCache:
    """Prefixes by their exact tokens, least recently used first to go.

    Never a part of a longer one: it would be computed by other kernels than the whole, and the last bits of a sample
    would depend on what was asked before.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._num_tokens = 0
        self.num_bytes = 0

    def __contains__(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids in self._prefixes

    def get(self, token_ids: tuple[int, ...]) -> Prefix | None:
        prefix = self._prefixes.get(token_ids)
        if prefix is not None:
            self._prefixes.move_to_end(token_ids)
        return prefix

    def put(self, token_ids: tuple[int, ...], prefix: Prefix) -> None:
        if len(token_ids) > self.max_tokens:
            return
        self._prefixes[token_ids] = prefix
        self._num_tokens += len(token_ids)
        self.num_bytes += prefix.num_bytes
        while self._num_tokens > self.max_tokens:
            oldest, evicted = self._prefixes.popitem(last=False)
            self._num_tokens -= len(oldest)
            self.num_bytes -= evicted.num_bytes

    def clear(self) -> None:
        self._prefixes.clear()
        self._num_tokens = self.num_bytes = 0


class TransformersEngine:
    """See `Engine` for the contract. On a CPU, what comes back is bit for bit independent of other requests.

    model: any causal language model of transformers with keys and values per token; the engine owns it from here on
        (it may rearrange the memory of its parameters; they stay the module's).
    eos_token_ids: end a completion unless the request says `ignore_eos`.
    num_slots: sequences decoded together. max_length: of prompt and completion together.
    num_threads: of the thread that computes. Sums may depend on it, so it is a setting and not inherited; it also
        becomes the default of threads started later in the process. None leaves it to torch. More than one pays on idle
        cores only (see `bench/engine_throughput.py`); where others work too, take more engines of one thread.
    prefix_cache_tokens: how many prompt tokens to keep for other samples of the same prompt; by default 8 * max_length.
    own_layers: False runs the model's own forward even where a faster one is known.
    call_timeout_s: how long a call that waits for the background thread may take.

    On a CPU the host is the device: weights put aside are kept elsewhere in the same memory, and only dropping them
    (`keep_weights=False`) or the cache leaves room for others.
    """

    parts: frozenset[Part] = frozenset(PARTS)
    can_put_aside: frozenset[Part] = frozenset(PARTS)

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        num_slots: int = 64,
        eos_token_ids: Iterable[int] = (),
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        num_threads: int | None = None,
        version: int = 0,
        prefix_cache_tokens: int | None = None,
        own_layers: bool = True,
        call_timeout_s: float = 600.0,
    ):
        if num_slots < 1 or max_length < 2:
            raise UserError(f"num_slots {num_slots} must be at least 1 and max_length {max_length} at least 2")
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_positions is not None and max_length > max_positions:
            raise UserError(f"max_length {max_length} is over the model's max_position_embeddings {max_positions}")
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._num_slots, self._max_length = num_slots, max_length
        self._eos_ids = frozenset(eos_token_ids)
        self._num_threads = num_threads
        self._call_timeout_s = call_timeout_s
        self._version = version

        model = model.to(device=self._device, dtype=dtype).eval()
        self._slots = slot_model(model, num_slots, max_length, self._device, own_layers)
        self._weights = LiveWeights(model)
        self._prefixes = _PrefixCache(8 * max_length if prefix_cache_tokens is None else prefix_cache_tokens)

        # Per slot, on the device. Slots without a sequence decode token 0 at position 0 and nobody looks.
        rows = padded(num_slots)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=self._device)  # to be appended next
        self._positions = torch.zeros_like(self._tokens)  # of that token
        self._first = torch.zeros_like(self._tokens)  # position of the last prompt token
        self._temperatures = torch.ones(rows, device=self._device)
        self._is_greedy = torch.zeros(rows, dtype=torch.bool, device=self._device)
        self._uniforms = torch.zeros(rows, max_length, dtype=torch.float64, device=self._device)

        # Touched by the background thread alone: the sequence in each slot, None where one has just ended.
        self._running: list[_Sequence | None] = []
        self._saved_cache: tuple[Tensor, Tensor] | None = None

        # Shared between threads, under `_wake`.
        self._wake = threading.Condition()
        self._in_flight: dict[str, _Sequence] = {}  # waiting and running, by request id
        self._waiting: deque[_Sequence] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_paused = False
        self._is_closing = False
        self._aside: frozenset[Part] = frozenset()
        self._loading: int | None = None  # the version that is being loaded
        self._broken: str | None = None  # why the weights are not those of any version
        self._error: HotseatError | None = None  # why it is gone
        self._num_sampled = 0
        self._last_step = time.monotonic()

        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()
        self._close_at_exit = _closer(self)
        atexit.register(self._close_at_exit)

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
                raise DeadlineError(
                    f"generate: {len(unfinished)} of {len(requests)} requests did not finish in {timeout_s:g} s"
                ) from None
            raise

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        check_scoring(sequences, temperature, self._max_length, self._slots.vocab_size)
        return self._call("score", lambda: self._score(sequences, temperature))

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
        return self._call("digest", self._digest)

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

    def _checked(self, request: Request) -> _Sequence:
        check_request(request, self._max_length, self._slots.vocab_size)
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        max_new_tokens = min(sampling.max_new_tokens, self._max_length - len(request.token_ids))
        return _Sequence(request, stop_ids, max_new_tokens)

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

    # --- one step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Append one token to every running sequence, after free slots were given to waiting ones."""
        self._admit()
        running = self._running
        if not running:
            return
        faults.reach("generation.during")
        rows, num_keys = self._slots.step_shape(len(running), max(s.num_keys for s in running if s is not None))
        positions = self._positions[:rows]
        logits = self._slots.decode(self._tokens[:rows], positions, num_keys)

        logits = logits / self._temperatures[:rows, None]
        filters = [(i, s.request.sampling) for i, s in enumerate(running) if s is not None and s.is_filtered]
        if filters:
            vocab_size = logits.shape[1]
            chosen = self._column([slot for slot, _ in filters], torch.int64)
            top_k = self._column([min(s.top_k or vocab_size, vocab_size) for _, s in filters], torch.int64)
            top_p = self._column([s.top_p for _, s in filters], torch.float64)
            logits[chosen] = filtered(logits[chosen], top_k, top_p)
        has_greedy = any(s is not None and s.is_greedy for s in running)
        uniform = self._uniforms[:rows].gather(1, (positions - self._first[:rows])[:, None])[:, 0]
        tokens, log_probs = sample(logits, uniform, self._is_greedy[:rows] if has_greedy else None)
        self._tokens[: len(running)] = tokens[: len(running)]
        self._positions[: len(running)] += 1

        # One transfer; both are exact in float64.
        sampled_tokens, sampled_log_probs = torch.stack([tokens.double(), log_probs.double()]).tolist()
        done: list[tuple[_Sequence, Completion | HotseatError]] = []
        for slot, sequence in enumerate(running):
            assert sequence is not None
            log_prob = sampled_log_probs[slot]
            if not math.isfinite(log_prob):
                done.append((sequence, self._not_finite(sequence)))
                self._slots.cache.erase(slot)  # A masked NaN is still one for the next sequence here.
                running[slot] = None
                continue
            finish = sequence.append(int(sampled_tokens[slot]), log_prob, self._version)
            if finish is not None:
                done.append((sequence, sequence.completion(finish)))
                running[slot] = None
        self._num_sampled += len(running)
        self._last_step = time.monotonic()
        self._complete(done)

    def _not_finite(self, sequence: _Sequence) -> NonFiniteError:
        return NonFiniteError(
            f"request {sequence.request.id!r}: logits for position {sequence.num_keys} under weight version"
            f" {self._version} are not finite"
        )

    def _complete(self, done: list[tuple[_Sequence, Completion | HotseatError]]) -> None:
        for sequence, outcome in done:
            # One by one: if a callback ends the thread, the others are still in flight and get to know.
            with self._wake:
                del self._in_flight[sequence.request.id]
            if isinstance(outcome, Completion):
                _set(sequence.future, result=outcome)
            else:
                _set(sequence.future, error=outcome)

    def _admit(self) -> None:
        """Give free slots to waiting sequences, and close the gaps that remain, so that running ones come first."""
        running = self._running
        gaps = [slot for slot, sequence in enumerate(running) if sequence is None]
        admitted = self._take_waiting(self._num_slots - len(running) + len(gaps))
        slots = (gaps + list(range(len(running), self._num_slots)))[: len(admitted)]
        running.extend([None] * (max(slots, default=-1) + 1 - len(running)))
        for slot, sequence in zip(slots, admitted, strict=True):
            running[slot] = sequence
        if admitted:
            self._fill(slots, admitted)
        for slot in gaps[len(admitted) :]:
            while running and running[-1] is None:
                self._clear(len(running) - 1)
                running.pop()
            if slot < len(running):
                self._move(len(running) - 1, slot)
                running[slot] = running.pop()

    def _take_waiting(self, count: int) -> list[_Sequence]:
        taken: list[_Sequence] = []
        with self._wake:
            while self._waiting and len(taken) < count:
                sequence = self._waiting.popleft()
                if sequence.future.set_running_or_notify_cancel():
                    taken.append(sequence)
                else:
                    del self._in_flight[sequence.request.id]
        return taken

    def _fill(self, slots: list[int], sequences: list[_Sequence]) -> None:
        """Prompts into slots. All but the last token, which is decoded with the others and gives the first logits."""
        prefixes = self._prefill(list(dict.fromkeys(s.prompt[:-1] for s in sequences if len(s.prompt) > 1)))
        slots_of: dict[tuple[int, ...], list[int]] = {prefix: [] for prefix in prefixes}
        for slot, sequence in zip(slots, sequences, strict=True):
            if len(sequence.prompt) > 1:
                slots_of[sequence.prompt[:-1]].append(slot)
        for prompt, chosen in slots_of.items():
            if chosen:
                self._slots.cache.write(chosen, prefixes[prompt])

        column = self._column
        at = column(slots, torch.int64)
        self._tokens[at] = column([s.prompt[-1] for s in sequences], torch.int64)
        self._positions[at] = self._first[at] = column([len(s.prompt) - 1 for s in sequences], torch.int64)
        self._temperatures[at] = column([s.request.sampling.temperature or 1.0 for s in sequences], torch.float32)
        self._is_greedy[at] = column([s.is_greedy for s in sequences], torch.bool)
        num_steps = max(s.max_new_tokens for s in sequences)
        seeds = column([signed(s.request.seed) for s in sequences], torch.int64)
        self._uniforms[at, :num_steps] = uniforms(seeds, num_steps)

    def _column(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], Prefix]:
        found = {prompt: prefix for prompt in prompts if (prefix := self._prefixes.get(prompt)) is not None}
        new = [prompt for prompt in prompts if prompt not in found]
        if new:
            new += self._upcoming(new)
        for batch, tokens in self._batches(new):
            prefixes = self._slots.prefill(tokens, [len(new[i]) for i in batch])
            for i, prefix in zip(batch, prefixes, strict=True):
                found[new[i]] = prefix
                self._prefixes.put(new[i], prefix)
        return found

    def _upcoming(self, new: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Prompts of waiting requests that fit into the forwards that `new` needs anyway, and into half the cache."""
        lengths = Counter(padded(len(prompt)) for prompt in new)
        rows_left = {length: -count % self._batch_size(length) for length, count in lengths.items()}
        tokens_left = self._prefixes.max_tokens // 2
        with self._wake:
            waiting = list(itertools.islice(self._waiting, 4 * self._num_slots))
        upcoming: list[tuple[int, ...]] = []
        for prompt in dict.fromkeys(s.prompt[:-1] for s in waiting):
            length = padded(len(prompt))
            fits = rows_left.get(length, 0) > 0 and len(prompt) <= tokens_left
            if prompt and fits and prompt not in new and prompt not in self._prefixes:
                upcoming.append(prompt)
                rows_left[length] -= 1
                tokens_left -= len(prompt)
        return upcoming

    def _batch_size(self, length: int) -> int:
        return max(1, self._slots.max_forward_tokens // length)

    def _batches(self, sequences: Sequence[Sequence[int]]) -> Iterable[tuple[list[int], Tensor]]:
        """Sequences that are equally long once padded: which, and their tokens [batch, padded length].

        Padding to the length of others would change the attention kernel's blocks, and with them last bits.
        """
        by_length: dict[int, list[int]] = {}
        for index, token_ids in enumerate(sequences):
            by_length.setdefault(padded(len(token_ids)), []).append(index)
        for length, indices in sorted(by_length.items()):
            size = self._batch_size(length)
            for start in range(0, len(indices), size):
                batch = indices[start : start + size]
                rows = [[*sequences[i], *[0] * (length - len(sequences[i]))] for i in batch]
                yield batch, torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _drop_cancelled(self) -> None:
        """Forget waiting requests that were cancelled. Under the lock."""
        for sequence in [s for s in self._waiting if s.future.cancelled()]:
            self._waiting.remove(sequence)
            del self._in_flight[sequence.request.id]

    def _move(self, source: int, target: int) -> None:
        sequence = self._running[source]
        assert sequence is not None
        self._slots.cache.move(source, target, sequence.num_keys)
        for state in (
            self._tokens,
            self._positions,
            self._first,
            self._temperatures,
            self._is_greedy,
            self._uniforms,
        ):
            state[target] = state[source]
        self._clear(source)

    def _clear(self, slot: int) -> None:
        for state in (self._tokens, self._positions, self._first):
            state[slot] = 0

    # --- commands -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        with self._wake:
            if "weights" in self._aside:
                raise RunError("weights put aside: bring back before scoring")
            if self._loading is not None:
                raise RunError(f"score: weights of version {self._loading} are being loaded")
            if self._broken is not None:
                raise WeightError(self._broken)
        scores: list[list[float]] = [[] for _ in sequences]
        for batch, tokens in self._batches(sequences):
            hidden = self._slots.hidden(tokens).flatten(0, 1)
            targets = tokens.roll(-1, 1).flatten()
            chunk = padded(self._slots.max_forward_tokens // 8)
            parts = []
            for start in range(0, targets.shape[0], chunk):
                rows = slice(start, start + chunk)
                log_probs = torch.log_softmax(self._slots.logits(hidden[rows]) / temperature, dim=-1)
                parts.append(log_probs.gather(1, targets[rows, None])[:, 0])
            table = torch.cat(parts).view(tokens.shape).tolist()
            for i, row in zip(batch, table, strict=True):
                scores[i] = [0.0, *row[: len(sequences[i]) - 1]]
        return scores

    def _abort(self, request_ids: list[str] | None) -> list[str]:
        with self._wake:
            ids = list(self._in_flight) if request_ids is None else request_ids
            chosen = [self._in_flight[i] for i in dict.fromkeys(ids) if i in self._in_flight]
            wanted = {id(sequence) for sequence in chosen}
            waiting = [s for s in self._waiting if id(s) in wanted]
            self._waiting = deque(s for s in self._waiting if id(s) not in wanted)
        # A waiting one may have been cancelled meanwhile: it is gone either way.
        cancelled = {id(s) for s in waiting if not s.future.set_running_or_notify_cancel()}
        self._running = [None if s is not None and id(s) in wanted else s for s in self._running]
        self._complete([(s, s.completion("abort")) for s in chosen])
        return [s.request.id for s in chosen if id(s) not in cancelled]

    def _set_paused(self, is_paused: bool) -> None:
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
        except BaseException:
            with self._wake:
                self._aside = before
            raise
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        return Moved(num_bytes, num_copied, (time.perf_counter() - start) * 1e3)

    def _move_aside(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        """Bytes that left, bytes that were copied. What can fail comes first: a failure leaves all in place."""
        resident = self._resident_bytes()
        num_copied = 0
        saved = None
        lengths = [s.num_keys for s in self._running if s is not None]
        if "kv_cache" in parts and lengths:
            saved = self._slots.cache.read(len(self._running), max(lengths), torch.device("cpu"))
            num_copied += sum(part.nbytes for part in saved)
        if parts:
            self._slots.release()
        if "weights" in parts:
            num_copied += self._weights.put_aside(keep_weights)
            if not keep_weights:
                with self._wake:
                    self._broken = "the weights were dropped when they were put aside: load new ones first"
        if "kv_cache" in parts:
            self._saved_cache = saved
            self._prefixes.clear()
            self._slots.cache.free()
        return sum(resident[part] for part in parts), num_copied

    def _resident_bytes(self) -> dict[Part, int]:
        kv_cache = self._slots.cache.num_bytes + self._prefixes.num_bytes
        return {"weights": self._weights.num_bytes, "kv_cache": kv_cache}

    def _bring_back(self, parts: frozenset[Part]) -> Moved:
        parts = parts & self._aside
        start = time.perf_counter()
        num_bytes = num_copied = 0
        if "weights" in parts:
            num_copied += self._weights.bring_back()
            num_bytes += self._weights.num_bytes
        if "kv_cache" in parts:
            self._slots.cache.allocate()
            num_bytes += self._slots.cache.num_bytes
            if self._saved_cache is not None:
                self._slots.cache.put(*self._saved_cache)
                num_copied += sum(part.nbytes for part in self._saved_cache)
                self._saved_cache = None
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
        self._prefixes.clear()
        self._weights.begin()

    def _load_bucket(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._loading is None:
            raise RunError("load_bucket: no load has begun: call begin_load first")
        try:
            self._weights.load(named_tensors)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # The sender may reuse its memory when this returns.
        except BaseException as error:
            self._break(f"{type(error).__name__}: {error}")
            raise

    def _finish_load(self) -> None:
        if self._loading is None:
            raise RunError("finish_load: no load has begun: call begin_load first")
        missing = self._weights.missing()
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

    def _digest(self) -> dict[str, int]:
        if "weights" in self._aside:
            raise RunError("weights put aside: bring back before asking for their digest")
        return self._weights.digest()


def _set(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Unless somebody has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _closer(engine: TransformersEngine) -> Callable[[], None]:
    """Closes the engine at exit, if it still exists: a thread inside torch must not outlive the interpreter."""
    reference = weakref.ref(engine)

    def close() -> None:
        engine = reference()
        if engine is not None:
            engine.close()

    return close
