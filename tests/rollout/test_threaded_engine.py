"""The pieces of a threaded engine, each alone: its requests, its thread, and the state in which it serves."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hotseat.errors import RunError, UserError, WeightError, WorkerError
from hotseat.rollout.engine_thread import EngineThread, Work
from hotseat.rollout.llama_slots import is_llama_like
from hotseat.rollout.open_requests import EngineSequence, RequestTable
from hotseat.rollout.serving_state import ServingState
from hotseat.rollout.slot_cache import SlotCache, cut_prefixes
from hotseat.types import Request, Sampling

WAIT_S = 60.0


def sequence(name: str) -> EngineSequence:
    return EngineSequence(Request(name, (1, 2), Sampling(max_new_tokens=2), seed=0), frozenset({9}), 2)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_run_in_order_and_those_cancelled_while_they_wait_are_skipped() -> None:
    table = RequestTable(threading.Condition())
    first, second, third = sequence("a"), sequence("b"), sequence("c")
    table.add([first, second, third])
    second.future.cancel()
    assert [s.request.id for s in table.upcoming(1)] == ["a"]
    assert table.take_waiting(2) == [first, third]
    assert (len(table), table.num_waiting) == (2, 0)


def test_an_id_is_unique_among_unfinished_requests() -> None:
    table = RequestTable(threading.Condition())
    table.add([sequence("a")])
    with pytest.raises(UserError, match="'a' is already in flight"):
        table.add([sequence("b"), sequence("a")])
    assert len(table) == 1
    [taken] = table.take_waiting(1)
    assert taken.extend([5], [-1.0], 3) is None
    assert taken.extend([6, 9], [-1.5, -2.0], 4) == "stop"
    table.complete([(taken, taken.completion("stop"))])
    assert taken.future.result(0).versions == (3, 4, 4)
    table.add([sequence("a")])


def test_requests_that_stop_waiting_are_named_unless_they_were_cancelled() -> None:
    table = RequestTable(threading.Condition())
    running, waiting, cancelled = sequence("a"), sequence("b"), sequence("c")
    table.add([running, waiting, cancelled])
    table.take_waiting(1)
    cancelled.future.cancel()
    chosen, ids = table.stop_waiting(None)
    assert (chosen, ids) == ([running, waiting, cancelled], ["a", "b"])
    assert table.num_waiting == 0


# --- the thread -------------------------------------------------------------------------------------------------------


def started(step: Any, pending: Future[Any]) -> tuple[EngineThread, list[str], threading.Event]:
    """A thread that steps once `go` is set; what it did last is in the list."""
    wake, go, done = threading.Condition(), threading.Event(), []
    work = Work(go.is_set, step, lambda: done.append("end"), lambda: [pending])
    thread = EngineThread(wake, torch.device("cpu"), None, WAIT_S)
    thread.start(work)
    return thread, done, go


def test_commands_run_on_the_thread_and_give_back_results_and_errors() -> None:
    thread, _, _ = started(lambda: None, Future())
    assert thread.call("name", threading.current_thread) is thread.thread
    with pytest.raises(ZeroDivisionError):
        thread.call("divide", lambda: 1 // 0)
    with pytest.raises(RunError, match="nested was called from a callback"):
        thread.call("outer", lambda: thread.call("nested", lambda: None))
    thread.close(WAIT_S)


def test_close_ends_the_work_and_tells_whoever_waits() -> None:
    pending: Future[Any] = Future()
    thread, done, _ = started(lambda: None, pending)
    thread.close(WAIT_S)
    assert done == ["end"]
    with pytest.raises(RunError, match="the engine was closed"):
        pending.result(WAIT_S)
    with pytest.raises(RunError, match="the engine was closed"):
        thread.call("late", lambda: None)


def test_a_step_that_fails_ends_the_thread_and_tells_why() -> None:
    def fail() -> None:
        raise ValueError("no memory")

    pending: Future[Any] = Future()
    thread, done, go = started(fail, pending)
    go.set()
    with contextlib.suppress(WorkerError):  # it may have died before the call
        thread.call("wake up", lambda: None)
    with pytest.raises(WorkerError, match="the engine's thread died: ValueError: no memory"):
        pending.result(WAIT_S)
    assert done == ["end"]


# --- the state --------------------------------------------------------------------------------------------------------


def test_a_load_that_fails_breaks_the_weights_until_the_next_one_succeeds() -> None:
    state = ServingState(threading.Condition(), version=1)
    state.begin_load(2)
    assert state.is_held()
    with pytest.raises(WeightError, match="version 2 were loaded in part .missing a, b"):
        state.finish_load(["a", "b"])
    with pytest.raises(WeightError, match="load them all again"):
        state.raise_unless_ready()
    assert (state.version, state.is_held()) == (1, True)
    state.begin_load(3)
    state.finish_load([])
    state.raise_unless_ready()
    assert (state.version, state.is_held()) == (3, False)


def test_parts_leave_only_when_nothing_runs_or_loads() -> None:
    state = ServingState(threading.Condition(), version=0)
    both = frozenset({"weights", "kv_cache"})
    with pytest.raises(RunError, match="2 requests in flight"):
        state.begin_offload(both, num_in_flight=2)
    state.is_paused = True
    assert state.begin_offload(frozenset({"kv_cache"}), num_in_flight=2) == {"kv_cache"}
    assert state.begin_offload(both, num_in_flight=2) == {"weights"}
    with pytest.raises(RunError, match="weights offloaded: onload before loading"):
        state.begin_load(1)
    state.end_onload(both)
    state.begin_load(1)
    with pytest.raises(RunError, match="version 1 are being loaded"):
        state.begin_offload(both, num_in_flight=0)


def test_a_model_with_a_hook_anywhere_runs_its_own_forward() -> None:
    """Layers of our own would not call it."""
    for owner in (lambda model: model, lambda model: model.model.layers[0], lambda model: model.lm_head):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
        )
        assert is_llama_like(model, 32)
        owner(model).register_forward_hook(lambda *_: None)
        assert not is_llama_like(model, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [3, 4, 6, 16])
def test_prefixes_are_cut_and_written_whatever_their_layout(dim: int, dtype: torch.dtype) -> None:
    """Numbers are copied several at once where sizes, strides and offsets allow, which they do for some of these."""
    rows, heads, length = 2, 3, 5
    joined = torch.randn(2, rows * length, 2 * heads + 1, dim).to(dtype)  # layers, tokens, parts of a product
    parts = [
        [layer[:, begin : begin + heads].view(rows, length, heads, dim).transpose(1, 2) for layer in joined]
        for begin in (0, heads + 1)
    ]
    cache = SlotCache(2, 4, heads, 8, (dim, dim), dtype, torch.device("cpu"))
    for row, prefix in enumerate(cut_prefixes(*parts, [5, 4])):
        cache.write([row, row + 2], prefix)
    for row, count in enumerate([5, 4, 5, 4]):
        for made, layers in ((cache.keys, parts[0]), (cache.values, parts[1])):
            assert not made[:, row, :, count:].any()
            for of_layer, layer in zip(made[:, row, :, :count], layers, strict=True):
                assert torch.equal(of_layer, layer[row % 2, :, :count])
