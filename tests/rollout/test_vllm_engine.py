"""vLLM: the conformance suite on its CPU build, and what is its own.

Starting vLLM takes seconds, so the checks share one core: each gets an engine of its own around it, with the weights of
model 0.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import runpy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from hotseat.checks.cpu import has_bf16_units
from hotseat.model_source import ModelSource
from hotseat.rollout.kinds import EngineOptions, EngineSettings
from hotseat.rollout.vllm_engine import VllmEngine, weight_names
from hotseat.rollout.vllm_internals import widen_head
from hotseat.rollout.vllm_versions import Core

from . import conformance
from .conformance import PATIENCE_S, Subject, named_weights, request, slowly
from .test_transformers_engine import random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHAPE = {
    "vocab_size": 67,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 704,
    "initializer_range": 0.1,
}
MODEL = LlamaConfig(**SHAPE, tie_word_embeddings=True)
MAX_LENGTH = 640


class Shared:
    """A core that outlives the engines around it."""

    def __init__(
        self,
        directory: Path,
        config: Any,
        tensor_parallel_size: int = 1,
        when_lost: Any = None,
        dtype: str = "float32",
        **options: Any,
    ):
        has_units = has_bf16_units(Path("/proc/cpuinfo").read_text()) is not False
        if dtype == "bfloat16" and platform.machine() == "aarch64" and not has_units and not torch.cuda.is_available():
            pytest.skip("in bf16 vLLM's build for ARM ends the process on a CPU without units for it")
        self.config = config
        self.directory = str(directory)
        random_model(config, 0).save_pretrained(directory)
        self.core = Core(
            EngineSettings(
                model=ModelSource(self.directory),
                max_length=MAX_LENGTH,
                num_slots=256,
                eos_token_ids=(),
                dtype=dtype,
                num_threads=1,
                engine="vllm",
                options=EngineOptions(
                    tensor_parallel_size=tensor_parallel_size, prefix_caching=True, cache_gib=1 / 16, **options
                ),
            ),
            when_lost=when_lost,
        )
        self.end = self.core.close
        self.core.close = lambda: self.core.abort(list(self.core._core.scheduler.requests))  # type: ignore[method-assign]

    @contextmanager
    def engine(
        self,
        num_slots: int = 8,
        max_length: int = 128,
        eos_token_ids: Any = (),
        keeps_cache: bool = False,
        loads: bool = True,
    ) -> Iterator[VllmEngine]:
        engine = VllmEngine(
            self.core,
            weight_names(ModelSource(self.directory)),
            num_slots=num_slots,
            max_length=max_length,
            eos_token_ids=eos_token_ids,
            num_threads=1,
            keeps_cache=keeps_cache,
            call_timeout_s=PATIENCE_S,
        )
        try:
            if loads:
                engine.load_weights(named_weights(self.model(0)), 0)
            yield engine
        finally:
            engine.close()

    @functools.cache  # noqa: B019
    def model(self, seed: int) -> PreTrainedModel:
        return random_model(self.config, seed)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory() as directory:
        made = Shared(Path(directory), MODEL)
        yield made
        made.end()


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance(shared: Shared, check: Any) -> None:
    check(Subject(engine=shared.engine, model=lambda n: random_model(MODEL, n), is_bit_exact=False, tolerance=2e-4))


def keeping(shared: Shared) -> Subject:
    return Subject(
        engine=functools.partial(shared.engine, keeps_cache=True),
        model=lambda n: random_model(MODEL, n),
        is_bit_exact=False,
        tolerance=2e-4,
    )


def test_requests_in_flight_keep_their_cache_where_they_are_to(shared: Shared) -> None:
    conformance.requests_in_flight_keep_or_recompute_their_cache_when_weights_change(keeping(shared))


def test_a_kept_cache_serves_requests_of_its_own_version_alone(shared: Shared) -> None:
    subject = keeping(shared)
    new = subject.model(1)  # made before an engine draws from the same random numbers
    prompt = [3 + position % 60 for position in range(300)]  # several blocks
    with subject.engine(max_length=600) as engine, slowly():
        future = engine.submit(request("open", prompt, max_new_tokens=290))
        conformance.sample_some(engine)
        engine.load_weights(named_weights(new), version=1)
        (late,) = engine.generate([request("late", prompt, max_new_tokens=4)])
        engine.abort(["open"])
    future.result(PATIENCE_S)
    expected = conformance.reference_log_probs(new, [*prompt, *late.token_ids], 1.0)[len(prompt) :]
    assert list(late.log_probs) == pytest.approx(expected, abs=subject.tolerance)


@pytest.mark.parametrize(("temperature", "vocab_size"), [(1.0, None), (0.7, 50)])
def test_likely_tokens_are_those_of_the_distribution_at_each_place(
    shared: Shared, temperature: float, vocab_size: int | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    # More sequences than are read at a time, and one without a place of which something could be said.
    sequences = [torch.randint(0, 50, (length,), generator=generator).tolist() for length in (9, 1, *range(12, 30, 2))]
    with shared.engine() as engine:
        found = engine.likely_tokens(sequences, temperature, 5, vocab_size)
    assert found[1] is None
    for tokens, scores in zip(sequences, found, strict=True):
        if scores is None:
            continue
        with torch.no_grad():
            logits = shared.model(0)(torch.tensor([tokens])).logits[0, :-1, :vocab_size].double()
        log_probs = (logits / temperature).log_softmax(-1)
        top = log_probs.topk(5)
        assert torch.equal(scores.ids[:, 0].long(), torch.tensor(tokens[1:]))
        assert torch.equal(scores.ids[:, 1:].long(), top.indices)
        torch.testing.assert_close(scores.log_probs[:, 1:].double(), top.values, rtol=0, atol=2e-5)
        own = log_probs.gather(-1, torch.tensor(tokens[1:])[:, None])
        torch.testing.assert_close(scores.log_probs[:, :1].double(), own, rtol=0, atol=2e-5)


def test_logits_of_a_16_bit_model_are_float32_by_vllm_or_by_us() -> None:
    """What reaches the sampler, and what log-probs are made of: the same where vLLM has no type for the head."""
    seen: list[torch.dtype] = []

    def without_a_type(worker: Any) -> None:
        model = worker.model_runner.model
        del model.logits_processor.head_dtype
        assert widen_head(model, worker.model_runner.model_config) is None
        inner = model.logits_processor._get_logits
        model.logits_processor._get_logits = lambda *given: inner(*given[:3])  # versions that have one pass more

    def watch(worker: Any) -> None:
        worker.model_runner.model.logits_processor.register_forward_hook(lambda *call: seen.append(call[-1].dtype))

    with tempfile.TemporaryDirectory() as directory:
        made = Shared(Path(directory), MODEL, dtype="bfloat16")
        try:
            with made.engine() as engine:
                engine._core.call(watch)  # type: ignore[arg-type]
                before = engine.digest()
                asked = request("a", temperature=1.0)
                (theirs,) = engine.generate([asked])
                tokens = [*asked.token_ids, *theirs.token_ids]
                scored = engine.score([tokens], 1.0)
                engine._core.call(without_a_type)  # type: ignore[arg-type]
                (ours,) = engine.generate([asked])
                assert ours.token_ids == theirs.token_ids
                assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
                assert engine.score([tokens], 1.0)[0] == pytest.approx(scored[0], abs=1e-4)
                assert engine.digest() == before
                assert set(seen) == {torch.float32}
        finally:
            made.end()


def test_a_process_of_vllm_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are processes of their own import this module, and call no function of ours before they load."""
    from hotseat.rollout import vllm_worker  # which loads vLLM

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    runpy.run_path(vllm_worker.__file__)
    assert not torch.backends.cudnn.allow_tf32
