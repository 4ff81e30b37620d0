"""The transformers engine: the conformance suite, and what is its own."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from hotseat.errors import (
    DeadlineError,
    NonFiniteError,
    RunError,
    UnsupportedError,
    UserError,
    WeightError,
    WorkerError,
)
from hotseat.rollout import SlotOptions, TransformersEngine
from hotseat.rollout.any_slots import AnySlots
from hotseat.rollout.llama_slots import LlamaSlots, slot_model
from hotseat.rollout.slot_cache import Prefix, PrefixCache
from hotseat.types import Completion, Request, Sampling

from . import conformance
from .conformance import PATIENCE_S, Subject, mixed, named_weights, reference_log_probs, request, slowly, until
from .kernel_checks import GROUPED, SHAPE

pytestmark = pytest.mark.slow

KINDS_OF_LAYERS = ["linear_attention", "full_attention"]
WIDE = {**SHAPE, "hidden_size": 704, "intermediate_size": 1408}
del WIDE["num_hidden_layers"]
# Of the states of real models, with fewer heads.
LINEAR_SIZES = {"num_hidden_layers": 2, "layer_types": KINDS_OF_LAYERS} | {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
}
LLAMA_LIKE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, grouped, tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama, biased, long rope": LlamaConfig(
        **SHAPE,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**GROUPED, sliding_window=None, head_dim=20),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),
}
OTHERS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=67, n_embd=48, n_layer=2, n_head=4, n_positions=640, initializer_range=0.15),
    "mistral, sliding": MistralConfig(**GROUPED, sliding_window=7),
    "gemma2, full and sliding, capped": Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=7, query_pre_attn_scalar=16, attn_implementation="eager"
    ),
    "qwen3.5, states": Qwen3_5TextConfig(
        **GROUPED,
        head_dim=16,
        layer_types=KINDS_OF_LAYERS,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    ),
}
MODELS = LLAMA_LIKE | OTHERS
KINDS = [("llama, grouped, tied", True), ("llama, grouped, tied", False), ("qwen3.5, states", True)]


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():  # Biases and norms too, so that a mistake with them shows.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize("name", LLAMA_LIKE)
@torch.no_grad()
def test_the_kernels_of_cuda_devices_compute_the_same(name: str) -> None:
    """Prefill of many rows and a step, both on a CPU."""
    model = random_model(LLAMA_LIKE[name], 0)
    slots = slot_model(model, 16, 192, torch.device("cpu"), own_layers=True)
    assert isinstance(slots, LlamaSlots)
    tokens = torch.randint(67, (2, 160), generator=torch.Generator().manual_seed(0))
    made = []
    for is_lean in (False, True):
        slots._is_lean = is_lean
        prefixes = slots.prefill(tokens, [160, 150])
        slots.cache.write([0], prefixes[0])
        slots.cache.write([1], prefixes[1])
        positions = torch.zeros(16, dtype=torch.int64)
        positions[:2] = torch.tensor([160, 150])
        step = slots.decode(tokens[0, :16], positions, 176)
        made.append([slots.hidden(tokens), *(part for p in prefixes for part in (p.keys, p.values)), step])
    for plain, lean in zip(*made, strict=True):
        assert torch.allclose(plain, lean, rtol=1e-4, atol=1e-4)


def subject(
    config: PreTrainedConfig, own_layers: bool = True, keeps_cache: bool = True, tokens_at_once: int | None = None
) -> Subject:
    @contextmanager
    def engine(num_slots: int = 8, max_length: int = 128, eos_token_ids: Any = ()) -> Iterator[TransformersEngine]:
        engine = TransformersEngine(
            random_model(config, 0),
            num_slots=num_slots,
            max_length=max_length,
            eos_token_ids=eos_token_ids,
            num_threads=1,
            options=SlotOptions(own_layers=own_layers, keeps_cache=keeps_cache, tokens_at_once=tokens_at_once),
            call_timeout_s=PATIENCE_S,
        )
        try:
            yield engine
        finally:
            engine.close()

    return Subject(engine=engine, model=lambda seed: random_model(config, seed), is_bit_exact=True)


LLAMA = subject(LLAMA_LIKE["llama, grouped, tied"])
LINEAR = subject(OTHERS["qwen3.5, states"])


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance_with_own_layers(check: Callable[[Subject], None]) -> None:
    check(LLAMA)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance_with_the_models_forward(check: Callable[[Subject], None]) -> None:
    check(subject(LLAMA_LIKE["llama, grouped, tied"], own_layers=False))


ABOUT_STATES = (  # of linear attention; the other checks are long
    conformance.log_probs_are_those_of_the_model_at_the_sampling_temperature,
    conformance.scores_are_those_of_the_model,
    conformance.neither_company_nor_order_nor_slots_change_a_completion,
    conformance.abort_gives_what_there_is_and_frees_the_slot,
    conformance.scoring_does_not_disturb_what_is_in_flight,
    conformance.pause_keeps_sequences_and_they_go_on_under_new_weights,
    conformance.requests_in_flight_keep_or_recompute_their_cache_when_weights_change,
    conformance.requests_in_flight_survive_offloading_only_if_paused,
)


@pytest.mark.parametrize(
    "check",
    [check if check in ABOUT_STATES else pytest.param(check, marks=pytest.mark.long) for check in conformance.CHECKS],
    ids=lambda check: check.__name__,
)
def test_conformance_with_linear_attention(check: Callable[[Subject], None]) -> None:
    check(LINEAR)


@pytest.mark.long
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance_where_several_tokens_are_sampled_before_the_host_looks(check: Callable[[Subject], None]) -> None:
    check(subject(LLAMA_LIKE["llama, grouped, tied"], tokens_at_once=5))


@pytest.mark.parametrize(("name", "own_layers"), KINDS)
def test_the_number_of_tokens_before_the_host_looks_changes_no_bit(name: str, own_layers: bool) -> None:
    """Requests that stop, fill their length or are cut by their limit, more of them than slots."""
    asked = mixed(60, 67, longest=40)
    made = []
    for tokens_at_once in (1, 4, 16):
        one = subject(MODELS[name], own_layers=own_layers, tokens_at_once=tokens_at_once)
        with one.engine(num_slots=24, max_length=64, eos_token_ids=(7, 11, 13)) as engine:
            made.append(engine.generate(asked))
            assert engine.health().num_sampled == sum(len(completion.token_ids) for completion in made[-1])
    assert made[0] == made[1] == made[2]
    assert {completion.finish for completion in made[0]} == {"stop", "length"}


@pytest.mark.parametrize("one", [LLAMA, LINEAR], ids=["keys", "states"])
def test_slots_are_moved_only_where_that_saves_rows(one: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 sequences the first 20 end early: 16 rows are decoded for the other 12, which moved once, and right."""
    moves = []
    move = TransformersEngine._move
    monkeypatch.setattr(
        TransformersEngine, "_move", lambda self, *slots: (moves.append(slots[0]), move(self, *slots))[1]
    )
    lengths = [2 + index for index in range(20)] + [40] * 12
    asked = [request(f"{i}", seed=i, max_new_tokens=length) for i, length in enumerate(lengths)]
    with one.engine(num_slots=32) as engine:
        completions = engine.generate(asked)
    assert len(moves) == 1
    assert set(moves[0]) <= set(range(16, 32))
    with one.engine(num_slots=32) as engine:
        assert engine.generate(asked[::-1])[::-1] == completions


def test_states_of_prefixes_take_room() -> None:
    prefixes = PrefixCache(100, tokens_per_state=45)
    some = Prefix(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2), (torch.zeros(1, 90),))
    contexts = [((token,) * 5, ()) for token in range(3)]
    for context in contexts:
        prefixes.put(context, some)
    assert [context in prefixes for context in contexts] == [False, True, True]
    assert prefixes.num_bytes == 2 * 4 * (10 + 10 + 90)
    prefixes.put(((7,) * 56, ()), some)  # never fits
    assert [context in prefixes for context in contexts] == [False, True, True]
    with LINEAR.engine(num_slots=16, max_length=96) as engine:
        cache = engine._slots.cache
        # 3 x 80 convolved and 4 states of 8 x 12 in one layer; 2 heads with keys and values of 16 in the other
        assert cache.tokens_per_state == math.ceil((3 * 80 + 4 * 8 * 12) / (2 * 2 * 16))


@pytest.mark.parametrize(("name", "own_layers"), KINDS)
def test_requests_in_flight_recompute_their_cache_where_they_are_to(name: str, own_layers: bool) -> None:
    one = subject(MODELS[name], own_layers=own_layers, keeps_cache=False)
    conformance.requests_in_flight_keep_or_recompute_their_cache_when_weights_change(one)


@pytest.mark.parametrize("name", ["llama, grouped, tied", "qwen3.5, states"])
def test_a_cache_that_was_offloaded_while_weights_changed_is_recomputed(name: str) -> None:
    one = subject(MODELS[name], keeps_cache=False)
    asked = request("long", max_new_tokens=550)
    with one.engine(max_length=600) as engine, slowly():
        future = engine.submit(asked)
        conformance.sample_some(engine)
        engine.pause()
        engine.offload(["kv_cache"])
        engine.load_weights(named_weights(one.model(1)), version=1)
        engine.onload(["kv_cache"])
        engine.resume()
        conformance.sample_some(engine)
        engine.abort(["long"])
    completion = future.result(PATIENCE_S)
    first = completion.versions.index(1)
    tokens = [*asked.token_ids, *completion.token_ids]
    expected = reference_log_probs(one.model(1), tokens, 1.0)[len(asked.token_ids) + first :]
    assert list(completion.log_probs[first:]) == pytest.approx(expected, abs=1e-5)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_own_layers_equal_the_models_forward(name: str) -> None:
    config = LLAMA_LIKE[name]
    model, untouched = random_model(config, 0), random_model(config, 0)
    slots = slot_model(model, 3, 64, torch.device("cpu"), own_layers=True)
    assert isinstance(slots, LlamaSlots)
    tokens = torch.randint(0, 67, (3, 32))
    with torch.no_grad():
        expected = untouched(tokens).logits
        hidden = slots.hidden(tokens)
        assert torch.allclose(slots.logits(hidden.flatten(0, 1)).view(3, 32, -1), expected, atol=2e-5)
        # The module's parameters are views of fused ones now, and still the module's.
        assert torch.allclose(model(tokens).logits, expected, atol=2e-5)
        for row, prefix in enumerate(slots.prefill(tokens, [16, 20, 30])):
            slots.cache.write([row], prefix)
        padded_tokens, positions = torch.zeros(2, 16, dtype=torch.int64)
        positions[:3] = torch.tensor([16, 20, 30])
        padded_tokens[:3] = tokens[torch.arange(3), positions[:3]]
        logits = slots.decode(padded_tokens, positions, 32)
        assert torch.allclose(logits[:3], expected[torch.arange(3), positions[:3]], atol=2e-5)


@pytest.mark.parametrize("name", [*LLAMA_LIKE, *OTHERS])
def test_every_model_is_bit_exact_and_agrees_with_itself(name: str) -> None:
    one = subject(MODELS[name])
    conformance.log_probs_are_those_of_the_model_at_the_sampling_temperature(one)
    conformance.scores_are_those_of_the_model(one)
    requests = mixed(12, one.vocab_size, longest=8)
    with one.engine(num_slots=2) as engine:
        few = engine.generate(requests)
    with one.engine(num_slots=12) as engine:
        assert engine.generate(requests) == few
        assert engine.generate(requests[:1]) == few[:1]
    if name in OTHERS:
        assert isinstance(slot_model(one.model(0), 2, 64, torch.device("cpu"), True), AnySlots)


@pytest.mark.parametrize(
    "one",
    [
        subject(LlamaConfig(**WIDE, num_hidden_layers=1)),
        subject(LlamaConfig(**WIDE, num_hidden_layers=1), own_layers=False),
        subject(Qwen3_5TextConfig(**WIDE, **LINEAR_SIZES)),
    ],
    ids=["own layers", "the model's forward", "linear attention"],
)
def test_wide_layers_are_bit_exact(one: Subject) -> None:
    """Where kernels change with the number of rows: more than 640 inputs, and sums over long contexts."""
    requests = [request(f"{i}", range(1, 3 + i), seed=i, max_new_tokens=3) for i in range(18)]
    requests.append(request("long", [i % 67 for i in range(400)], max_new_tokens=4))
    with one.engine(num_slots=32, max_length=600) as engine:
        together = engine.generate(requests)
        for asked, completion in list(zip(requests, together, strict=True))[::6]:
            assert engine.generate([asked]) == [completion]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**{**SHAPE, "intermediate_size": 520, "num_hidden_layers": 1}),
        Qwen3_5TextConfig(**{**SHAPE, "intermediate_size": 520, "layer_types": KINDS_OF_LAYERS}),
    ],
    ids=["llama", "qwen3.5"],
)
def test_several_threads_are_bit_exact_too(config: PreTrainedConfig) -> None:
    """With enough numbers in a tensor for torch to share them out."""
    requests = [request(f"{i}", range(1, 4 + i % 5), seed=i, max_new_tokens=2 + i % 3) for i in range(80)]
    expected = None
    for num_slots in (80, 16):
        engine = TransformersEngine(random_model(config, 0), max_length=32, num_slots=num_slots, num_threads=2)
        completions = engine.generate(requests)
        assert completions == (expected := expected or completions)
        engine.close()


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), min_size=1, max_size=14), st.integers(1, 20))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture_gives_the_same_bits(
    alone: tuple[list[Request], list[Completion]], picks: list[tuple[int, int]], num_slots: int
) -> None:
    requests, completions = alone
    asked = [replace(requests[index], id=f"{i}") for i, (index, _) in enumerate(picks)]
    with LLAMA.engine(num_slots=num_slots) as engine:
        futures = []
        for one, (_, wait_for) in zip(asked, picks, strict=True):
            futures.append(engine.submit(one))
            before = engine.health().num_sampled
            if wait_for:
                until(lambda n=before: engine.health().num_sampled > n or futures[-1].done(), "a step")
        for future, (index, _) in zip(futures, picks, strict=True):
            got, want = future.result(PATIENCE_S), completions[index]
            assert (got.token_ids, got.log_probs) == (want.token_ids, want.log_probs)


@pytest.fixture(scope="module")
def alone() -> tuple[list[Request], list[Completion]]:
    requests = mixed(12, 67, longest=12)
    with LLAMA.engine(num_slots=1) as engine:
        return requests, [engine.generate([one])[0] for one in requests]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("own_layers", [True, False])
def test_logits_of_a_16_bit_model_are_not_rounded_unless_asked(own_layers: bool) -> None:
    config = LLAMA_LIKE["llama, grouped, tied"]
    model = random_model(config, 0).bfloat16().eval()
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state.double()
        expected = (hidden @ model.lm_head.weight.double().t()).flatten(0, 1)
        for fp32_head in (True, False):
            same = random_model(config, 0).bfloat16().eval()
            slots = slot_model(same, 2, 64, torch.device("cpu"), own_layers, fp32_head)
            logits = slots.logits(slots.hidden(tokens).flatten(0, 1))
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits.double(), expected, rtol=0.0, atol=0.3)  # layers round as they like
            assert torch.equal(logits, logits.bfloat16().float()) != fp32_head


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # not every CPU has it; torch then takes another way
def test_bfloat16_weights_serve_too() -> None:
    config = LLAMA_LIKE["llama, grouped, tied"]
    reference = random_model(config, 0).to(torch.bfloat16)
    for own_layers in (True, False):
        engine = TransformersEngine(
            random_model(config, 0),
            max_length=64,
            num_threads=1,
            options=SlotOptions(dtype=torch.bfloat16, own_layers=own_layers),
        )
        asked = mixed(5, 67, longest=5)
        completions = engine.generate(asked)
        assert engine.generate(asked[::-1]) == completions[::-1]
        (plain,) = engine.generate([request("plain", max_new_tokens=20)])
        expected = reference_log_probs(reference, [*request("").token_ids, *plain.token_ids], 1.0)[5:]
        assert plain.log_probs == pytest.approx(expected, abs=0.15)  # bfloat16 has 8 bits
        digest = engine.digest()
        engine.load_weights(((n, t.float()) for n, t in reference.state_dict().items()), version=1)
        assert engine.digest() == digest
        engine.close()


def test_models_without_keys_and_values_are_refused() -> None:
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="Mamba.*use the vLLM engine"):
        TransformersEngine(mamba, max_length=64)
    chunked = random_model(LLAMA_LIKE["qwen2"], 0)
    chunked.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedError, match=r"linear_attention.*vLLM"):
        TransformersEngine(chunked, max_length=64)
    flash = random_model(LLAMA_LIKE["llama"], 0)
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="flash_attention_2"):
        TransformersEngine(flash, max_length=64, options=SlotOptions(own_layers=False))


def test_sizes_that_cannot_work_are_refused() -> None:
    model = random_model(LLAMA_LIKE["llama"], 0)
    with pytest.raises(UserError, match="num_slots 0"):
        TransformersEngine(model, max_length=64, num_slots=0)
    with pytest.raises(UserError, match="max_length 641 is over the model's max_position_embeddings 640"):
        TransformersEngine(model, max_length=641)


# --- samples of one prompt --------------------------------------------------------------------------------------------


class CountingLlama(LlamaForCausalLM):
    """Counts forwards of more than a token per row, and their rows, and fails on demand."""

    num_prefilled = num_forwards = 0
    fails_after: float = math.inf

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 1:
            self.num_prefilled += input_ids.shape[0]
            self.num_forwards += 1
        self.fails_after -= 1
        if self.fails_after < 0:
            raise ZeroDivisionError("by zero")
        return super().forward(input_ids, **kwargs)


def counting_engine(**arguments: Any) -> tuple[CountingLlama, TransformersEngine]:
    torch.manual_seed(0)
    model = CountingLlama(copy.deepcopy(LLAMA_LIKE["llama"])).eval()
    engine = TransformersEngine(model, max_length=64, num_threads=1, **arguments)
    model.num_prefilled = model.num_forwards = 0
    return model, engine


def test_samples_of_one_prompt_share_its_prefill() -> None:
    model, engine = counting_engine(num_slots=3)
    prompts = [tuple(range(1, 9)), tuple(range(2, 12)), (5,)]
    asked = [request(f"{p}/{s}", prompts[p], seed=s, max_new_tokens=3) for p in range(3) for s in range(5)]
    engine.generate(asked)
    assert model.num_prefilled == 2
    engine.generate(asked)
    assert model.num_prefilled == 2
    engine.load_weights(model.state_dict().items(), version=1)
    engine.generate(asked)
    assert model.num_prefilled == 4
    engine.close()


def test_waiting_prompts_ride_along_in_a_forward_that_is_needed_anyway() -> None:
    model, engine = counting_engine(num_slots=1)
    asked = [request(f"{p}", [p] * 12, max_new_tokens=2) for p in range(6)]
    expected = [engine.generate([one])[0] for one in asked]
    assert (model.num_forwards, model.num_prefilled) == (6, 6)
    engine.load_weights(model.state_dict().items(), version=0)
    assert engine.generate(asked) == expected
    assert model.num_prefilled == 12
    assert model.num_forwards <= 6 + 2  # the first may start before the others have come
    engine.close()


def test_the_prefix_cache_has_its_limit() -> None:
    model, engine = counting_engine(options=SlotOptions(prefix_cache_tokens=20))
    prompts = [[p] * 11 for p in range(3)]  # 10 tokens are prefilled, the last one is decoded
    engine.generate([request("0", prompts[0]), request("1", prompts[1])])
    engine.generate([request("0", prompts[0])])
    assert model.num_prefilled == 2
    engine.generate([request("2", prompts[2])])  # pushes 1 out, which was used longest ago
    engine.generate([request("0", prompts[0])])
    assert model.num_prefilled == 3
    engine.generate([request("1", prompts[1])])
    assert model.num_prefilled == 4
    engine.generate([request("large", [1] * 30, seed=s) for s in range(1)])
    engine.generate([request("large", [1] * 30, seed=s) for s in range(1)])
    assert model.num_prefilled == 6
    engine.close()


# --- when things go wrong ---------------------------------------------------------------------------------------------


def test_a_dead_thread_surfaces_everywhere() -> None:
    model, engine = counting_engine(num_slots=1)
    model.fails_after = 4
    futures = engine.submit_many([request(f"{i}", max_new_tokens=20) for i in range(3)])
    for future in futures:
        with pytest.raises(WorkerError, match="ZeroDivisionError: by zero") as caught:
            future.result(PATIENCE_S)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for call in (
        lambda: engine.submit(request("a")),
        lambda: engine.generate([request("a")]),
        lambda: engine.score([[1, 2]]),
        lambda: engine.load_weights([], 1),
        lambda: engine.offload(["weights"]),
        engine.abort,
        engine.pause,
        engine.digest,
        engine.health,
    ):
        with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
            call()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    engine.close()


def test_a_failed_command_does_not_end_the_engine() -> None:
    model, engine = counting_engine()
    model.fails_after = 0
    with pytest.raises(ZeroDivisionError):
        engine.score([[1, 2, 3]])
    model.fails_after = math.inf
    assert len(engine.score([[1, 2, 3]])[0]) == 3

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(named_weights(model))
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        engine.load_weights(broken(), version=4)
    with pytest.raises(WeightError, match=r"version 4 were loaded in part \(OSError: connection lost\)"):
        engine.generate([request("a")])
    engine.close()


def test_waits_end_and_say_what_they_waited_for() -> None:
    _, engine = counting_engine(call_timeout_s=0.1)
    began, release = threading.Event(), threading.Event()

    def stuck() -> Iterator[tuple[str, torch.Tensor]]:
        began.set()
        release.wait(PATIENCE_S)
        yield from ()

    while not began.is_set():  # what was not begun in 0.1 s is not done any more
        with pytest.raises(DeadlineError, match=r"load_weights: the engine's thread did not answer in 0\.1 s"):
            engine.load_weights(stuck(), version=1)
    with pytest.raises(DeadlineError, match="pause"):
        engine.pause()
    with pytest.raises(DeadlineError, match=r"close: the engine's thread did not end in 0\.1 s"):
        engine.close(timeout_s=0.1)
    release.set()
    engine.close()


def test_generate_has_a_deadline_and_leaves_nothing_behind() -> None:
    with LLAMA.engine(max_length=600) as engine:
        asked = [request("short", max_new_tokens=1), request("long", max_new_tokens=550)]
        with slowly(), pytest.raises(DeadlineError, match=r"[12] of 2 requests did not finish in 0\.05 s"):
            engine.generate(asked, timeout_s=0.05)
        assert engine.health().num_running == engine.health().num_waiting == 0


def test_what_finishes_at_the_deadline_is_not_lost() -> None:
    class JustThen(Future[Completion]):
        def result(self, timeout: float | None = None) -> Completion:
            if not self.done():
                self.set_result(Completion("a", (), (), (), "length"))
                raise TimeoutError
            return super().result(timeout)

    with LLAMA.engine() as engine, mock.patch.object(engine, "submit_many", return_value=[JustThen()]):
        assert engine.generate([request("a")]) == [Completion("a", (), (), (), "length")]


def test_weights_that_are_not_finite_fail_their_requests_and_poison_nothing() -> None:
    with LLAMA.engine(num_slots=4) as engine:
        asked = [request(f"{i}", seed=i) for i in range(6)]
        expected = engine.generate(asked)
        broken = LLAMA.model(0)
        with torch.no_grad():
            broken.get_parameter("model.layers.0.self_attn.v_proj.weight")[0, 0] = math.nan
        engine.load_weights(named_weights(broken), version=1)
        for one in asked:
            with pytest.raises(NonFiniteError, match=f"'{one.id}': logits for position 5 under weight version 1"):
                engine.submit(one).result(PATIENCE_S)
        engine.load_weights(named_weights(LLAMA.model(0)), version=0)
        assert engine.generate(asked) == expected


def test_a_waiting_request_can_be_cancelled_and_its_id_used_again() -> None:
    with LLAMA.engine(num_slots=1) as engine:
        engine.pause()
        cancelled, other = engine.submit(request("a")), engine.submit(request("b"))
        assert cancelled.cancel()
        again = engine.submit(request("a"))
        engine.resume()
        assert other.result(PATIENCE_S).finish == again.result(PATIENCE_S).finish == "length"
        with pytest.raises(CancelledError):
            cancelled.result(0)
        assert engine.health().num_running == engine.health().num_waiting == 0
        engine.pause()
        cancelled = engine.submit(request("c"))
        cancelled.cancel()
        assert engine.abort() == []
        engine.offload(["kv_cache"])
        assert engine.health().num_waiting == 0


def test_callbacks_may_submit_and_fail_but_not_wait_for_the_engine() -> None:
    with LLAMA.engine() as engine:
        followers, problems = [], []

        def follow(future: Any) -> None:
            followers.append(engine.submit(request("next")))
            for call in (engine.pause, lambda: engine.generate([request("inside")])):
                try:
                    call()
                except RunError as error:
                    problems.append(str(error))
            raise KeyError("a callback's own mistake")

        engine.pause()  # so that the engine's thread completes it, not before the callback is there
        first = engine.submit(request("first"))
        first.add_done_callback(follow)
        engine.resume()
        first.result(PATIENCE_S)
        until(lambda: len(problems) == 2, "the callback")
        assert all("would wait for itself" in problem for problem in problems)
        assert followers[0].result(PATIENCE_S).finish == "length"


def test_a_callback_that_ends_the_thread_is_seen_by_all() -> None:
    with LLAMA.engine() as engine:
        engine.pause()
        first, second = engine.submit(request("first")), engine.submit(request("second"))

        def leave(future: Any) -> None:
            raise SystemExit("enough")

        first.add_done_callback(leave)
        engine.resume()
        assert first.result(PATIENCE_S).finish == "length"
        with pytest.raises(WorkerError, match="SystemExit: enough"):
            second.result(PATIENCE_S)


def test_closing_from_a_callback_works() -> None:
    with LLAMA.engine() as engine:
        engine.submit(request("first")).add_done_callback(lambda _: engine.close())
        engine._thread.thread.join(PATIENCE_S)
        assert not engine._thread.thread.is_alive()


def test_submitting_while_it_closes_never_hangs() -> None:
    for _ in range(5):
        with LLAMA.engine() as engine:
            futures, refused = [], []

            def submit() -> None:
                for index in itertools.count():
                    try:
                        futures.append(engine.submit(request(f"{threading.get_ident()} {index}")))  # noqa: B023
                    except RunError:
                        refused.append(index)  # noqa: B023
                        return

            threads = [threading.Thread(target=submit) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.01)
            engine.close()
            for thread in threads:
                thread.join(PATIENCE_S)
            assert len(refused) == 3
            for future in futures:
                assert future.exception(PATIENCE_S) is None or isinstance(future.exception(), RunError)


# --- the thread -------------------------------------------------------------------------------------------------------


def test_an_idle_engine_burns_no_cpu() -> None:
    with LLAMA.engine() as engine:
        engine.generate([request("a")])
        gc.collect()
        clock = time.pthread_getcpuclockid(engine._thread.thread.ident or 0)
        before = time.clock_gettime(clock)
        time.sleep(0.3)
        assert time.clock_gettime(clock) - before < 0.03


def test_the_number_of_threads_is_set_not_inherited() -> None:
    engines = {
        count: TransformersEngine(random_model(LLAMA_LIKE["llama"], 0), max_length=64, num_threads=count)
        for count in (2, 1)
    }
    for engine in engines.values():
        engine.generate([request("a")])
    for count, engine in engines.items():
        assert engine._thread.call("count", torch.get_num_threads) == count
        engine.close()


def test_close_ends_the_thread() -> None:
    before = set(threading.enumerate())
    with LLAMA.engine() as engine:
        assert set(threading.enumerate()) - before == {engine._thread.thread}
    assert not set(threading.enumerate()) - before


def test_an_engine_that_is_closed_is_freed_without_the_garbage_collector() -> None:
    """Its weights and its cache may fill a device."""
    model, engine = counting_engine(num_slots=2)
    engine.generate([request("a", (1, 2), max_new_tokens=2)])
    engine.close()
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del model, engine
        assert gone() is None
    finally:
        gc.enable()


def test_weights_in_shared_memory_can_be_offloaded() -> None:
    model = random_model(OTHERS["gpt2"], 0)
    model.share_memory()
    engine = TransformersEngine(model, max_length=64, num_threads=1)
    (expected,) = engine.generate([request("a")])
    engine.offload(["weights", "kv_cache"])
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
    with pytest.raises(RuntimeError):  # torch's own: nobody can compute with weights that are offloaded
        model(torch.tensor([[1, 2]]))
    engine.onload(["weights", "kv_cache"])
    assert engine.generate([request("a")]) == [expected]
    engine.close()


def test_settings_of_one_request_do_not_leak_into_the_next() -> None:
    with LLAMA.engine(num_slots=1) as engine:
        plain = request("plain", seed=4)
        (expected,) = engine.generate([plain])
        greedy = Request("greedy", plain.token_ids, Sampling(3, temperature=0.0, top_k=2, top_p=0.5), 9)
        cold = Request("cold", plain.token_ids, Sampling(3, temperature=0.1), 9)
        completions = engine.generate([greedy, plain, cold, replace(plain, id="last")])
        assert completions[1] == replace(completions[3], request_id="plain") == expected
