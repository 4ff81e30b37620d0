"""Where the time of an engine's decode steps goes: on its thread by function, and on the device by kernel.

Functions are replaced, on the classes of the live objects, by ones that read the clock: some thirty calls per step, for
all sequences, together below 0.1 ms. Names are of vLLM 0.25 and 0.32; what a version lacks is counted with its caller.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hotseat.rollout.engine_thread import EngineThread

GC = "garbage collection"
WAIT = "waiting for the device"
TURN = "engine: the rest of its turn"


@dataclass(frozen=True)
class Places:
    """Functions to time, as (owner, name, place), and the place that is entered once per decode step."""

    functions: Sequence[tuple[Any, str, str]]
    step: str


@dataclass
class Times:
    """Seconds and calls by place. own_s: without wrapped functions that were called inside; all_s: with them."""

    own_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    all_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)

    def copy(self) -> Times:
        return Times(self.own_s.copy(), self.all_s.copy(), self.calls.copy())

    def since(self, earlier: Times) -> Times:
        difference = self.copy()
        for place in difference.calls:
            difference.own_s[place] -= earlier.own_s[place]
            difference.all_s[place] -= earlier.all_s[place]
            difference.calls[place] -= earlier.calls[place]
        return difference


class StepClock:
    """Times functions on one thread, and calls `after_turn` when the outermost one returns."""

    def __init__(self, thread: int, after_turn: Callable[[], object]):
        self.times = Times()
        self._thread, self._after_turn = thread, after_turn
        self._open: list[tuple[str, float]] = []  # places that are entered, and when
        self._inner_s: list[float] = []  # spent in places inside each of them

    @contextmanager
    def on(self, functions: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Time these functions, and garbage collection, inside the context."""
        with ExitStack() as stack:
            for owner, name, place in functions:
                if hasattr(owner, name):
                    timed: Any = self._timed(getattr(owner, name), place)
                    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
                    self._replace(stack, owner, name, staticmethod(timed) if is_static else timed)
            gc.callbacks.append(self._collects)
            stack.callback(gc.callbacks.remove, self._collects)
            yield

    @staticmethod
    def _replace(stack: ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
        if name in vars(owner):
            stack.callback(setattr, owner, name, vars(owner)[name])
        else:
            stack.callback(delattr, owner, name)  # a base class's shows again
        setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._enter(place)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() == self._thread and (phase == "start" or (self._open and self._open[-1][0] == GC)):
            self._enter(GC) if phase == "start" else self._leave()

    def _enter(self, place: str) -> None:
        self._inner_s.append(0.0)
        self._open.append((place, time.perf_counter()))

    def _leave(self) -> None:
        place, began_s = self._open.pop()
        spent_s = time.perf_counter() - began_s
        times = self.times
        times.own_s[place] += spent_s - self._inner_s.pop()
        times.calls[place] += 1
        if all(place != outer for outer, _ in self._open):
            times.all_s[place] += spent_s
        if self._inner_s:
            self._inner_s[-1] += spent_s
        elif place == TURN:
            self._after_turn()


def step_table(engine: Any, places: Places, work: Callable[[], object], first: int, last: int) -> list[str]:
    """Work twice, once for the thread's times and once for kernels; return tables of decode steps `first` to `last`.

    In these steps every sequence should be running. Their numbers are those of tokens, not of turns of the engine.
    """
    functions = [*places.functions, (EngineThread, "_turn", TURN)]

    def run(recorder: Any | None) -> tuple[Times, float, float, float, Times]:
        """Return times, seconds and tokens per step of the window, and seconds and times of all steps."""
        marks: list[tuple[Times, float, int]] = []  # at both ends of the window

        def mark() -> None:
            step = clock.times.calls[places.step]
            if not marks and step >= first:
                if recorder is not None:
                    recorder.start()
                marks.append((clock.times.copy(), time.perf_counter(), engine._steps.num_sampled))
            elif len(marks) == 1 and step >= last:
                marks.append((clock.times.copy(), time.perf_counter(), engine._steps.num_sampled))
                if recorder is not None:
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    recorder.stop()

        clock = StepClock(engine._thread.thread.ident, mark)
        began_s = time.perf_counter()
        with clock.on(functions):
            work()
            whole_s = time.perf_counter() - began_s
            engine._thread.call("profile", lambda: None)  # the last turn has ended
        assert len(marks) == 2, f"{clock.times.calls[places.step]} steps: fewer than {last}"
        (earlier, began_s, num_before), (later, ended_s, num_after) = marks
        within = later.since(earlier)
        num_rows = (num_after - num_before) / within.calls[places.step]
        return within, ended_s - began_s, num_rows, whole_s, clock.times.copy()

    within, window_s, num_rows, whole_s, every = run(None)
    num_steps = within.calls[places.step]
    step_ms = 1e3 * window_s / num_steps
    recorder = _recorder()
    recorded, recorded_s, *_ = run(recorder)
    kernels = _kernels(recorder, recorded.calls[places.step])
    device_ms = sum(kernels.values())
    host_ms = 1e3 * (sum(within.own_s.values()) - within.own_s[WAIT]) / num_steps
    lines = [
        f"steps {first} to {last}, {num_rows:.0f} tokens each: {step_ms:.2f} ms per step; kernels {device_ms:.2f},"
        f" the thread without its waiting {host_ms:.2f}",
        f"all {every.calls[places.step]} steps: {whole_s:.2f} s, while functions are timed"
        f" (with kernels recorded, a step took {1e3 * recorded_s / recorded.calls[places.step]:.2f} ms)",
        f"{'own ms':>8} {'all ms':>8} {'calls':>6} {'whole s':>8}  (per step; own: without what other rows count)",
    ]
    for place, own_s in sorted(within.own_s.items(), key=lambda item: -item[1]):
        own_ms, all_ms = 1e3 * own_s / num_steps, 1e3 * within.all_s[place] / num_steps
        calls = within.calls[place] / num_steps
        lines.append(f"{own_ms:8.3f} {all_ms:8.3f} {calls:6.2f} {every.own_s[place]:8.3f}  {place}")
    untimed_s = window_s - sum(within.own_s.values())
    lines.append(f"{1e3 * untimed_s / num_steps:8.3f} {'':24}  between turns")
    lines += [f"{ms:8.3f} ms  {name[:80]}" for name, ms in kernels.most_common(12)]
    return lines


def _recorder() -> Any:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    return record(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])


def _kernels(recorder: Any, num_steps: int) -> Counter[str]:
    """Return ms per step by kernel; on a CPU by operation of torch."""
    name = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return Counter({row.key: getattr(row, name) / 1e3 / num_steps for row in recorder.key_averages()})


# --- functions of engines ---------------------------------------------------------------------------------------------


def places_of(engine: Any) -> Places:
    """Return the functions of an engine's step."""
    from hotseat.rollout.transformers_engine import TransformersEngine

    return _transformers_places(engine) if isinstance(engine, TransformersEngine) else _vllm_places(engine)


def _transformers_places(engine: Any) -> Places:
    kind = type(engine)
    return Places(
        [
            (kind, "_admit", "engine: admit, prefill"),
            (kind, "_take", "engine: take what was sampled"),
            (kind, "_sample", "engine: a decode step"),
            (type(engine._slots), "decode", "engine: launch the forward"),
            (type(engine._rows), "sample", "engine: launch sampling"),
            (torch.Tensor, "cpu", WAIT),
        ],
        "engine: a decode step",
    )


def _vllm_places(engine: Any) -> Places:
    core = engine._core
    scheduler = core._core.scheduler
    runner = core._core.model_executor.driver_worker.worker.model_runner
    sampler, graphs = runner.sampler, getattr(runner, "cudagraph_manager", None)
    module = sys.modules[type(runner).__module__]
    base = sys.modules["vllm.v1.worker.gpu_model_runner"] if not hasattr(module, "AsyncOutput") else module
    outputs = getattr(base, "AsyncOutput", None) or getattr(base, "AsyncGPUModelRunnerOutput", None)
    tensors = sys.modules["vllm.v1.outputs"].LogprobsTensors
    inputs = "vLLM runner: requests and inputs"
    forward = "vLLM runner: launch the forward"
    log_probs = "vLLM sampler: log-probs"
    functions = [
        (type(engine), "_take", "engine: take what was sampled"),
        (type(core), "add", "engine: add requests"),
        (type(core), "step", "engine: Core.step, outputs to tuples"),
        (type(core._client), "get_output", "vLLM core: the rest"),
        (type(scheduler), "schedule", "vLLM scheduler: schedule"),
        (type(scheduler), "update_from_output", "vLLM scheduler: update_from_output"),
        (type(runner), "execute_model", "vLLM runner: the rest of execute_model"),
        (type(runner), "sample_tokens", "vLLM runner: the rest of sample_tokens"),
        *((type(runner), name, inputs) for name in ("add_requests", "update_requests", "finish_requests")),
        *((type(runner), name, inputs) for name in ("prepare_inputs", "prepare_attn", "_update_states")),
        *((type(runner), name, inputs) for name in ("_prepare_inputs", "_build_attention_metadata", "_preprocess")),
        (type(runner.get_model()), "forward", forward),
        (type(runner), "_bookkeeping_sync", "vLLM runner: bookkeeping"),
        (type(runner), "postprocess_sampled", "vLLM runner: postprocess_sampled"),
        (type(runner.get_model()), "compute_logits", "vLLM runner: launch the head"),
        (type(sampler), "forward" if isinstance(sampler, torch.nn.Module) else "__call__", "vLLM sampler: the rest"),
        (type(sampler), "gather_logprobs", log_probs),
        (sys.modules[type(sampler).__module__], "compute_topk_logprobs", log_probs),
        (tensors, "tolists", "vLLM output: log-probs to lists"),
        (torch.cuda.Event, "synchronize", WAIT),
    ]
    if graphs is not None:
        functions += [(type(graphs), name, forward) for name in ("run_fullgraph", "run_pw_graph")]
    if outputs is not None:
        functions.append((outputs, "__init__", "vLLM output: launch copies"))
        functions.append((outputs, "get_output", "vLLM output: tokens to lists"))
    return Places(functions, "engine: Core.step, outputs to tuples")
