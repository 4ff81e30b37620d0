"""vLLM with adapters that are pushed apart from the weights below them, on its CPU build.

Model n is model 0 with an adapter of random factors number n merged in. Its `state_dict` holds these factors alone:
they are what the checks of `conformance` push, and its forward is what they compare with.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from hotseat.algorithms.adapters import factor_names
from hotseat.algorithms.digest import named_digests
from hotseat.errors import RunError, WeightError
from hotseat.model_source import ModelSource
from hotseat.rollout.kinds import EngineOptions, EngineSettings
from hotseat.rollout.live_weights import WeightNames
from hotseat.rollout.vllm_engine import VllmEngine, weight_names
from hotseat.rollout.vllm_kind import VllmKind
from hotseat.rollout.vllm_versions import AdapterOptions, Core
from hotseat.train.lora import target_layers

from . import conformance
from .conformance import PATIENCE_S, Subject, named_weights, reference_log_probs
from .test_transformers_engine import random_model
from .test_vllm_engine import SHAPE

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

RANK = 3  # vLLM has room for 8: the rest stays zero
LLAMA = LlamaConfig(**SHAPE, tie_word_embeddings=True)
OTHERS = [
    MistralConfig(**SHAPE, sliding_window=None),
    Qwen2Config(**SHAPE, tie_word_embeddings=True),
    Qwen3Config(**SHAPE, head_dim=32),
]
CHECKS = [
    pytest.param(conformance.log_probs_are_those_of_the_model_at_the_sampling_temperature, marks=pytest.mark.long),
    conformance.scores_are_those_of_the_model,
    pytest.param(conformance.scoring_does_not_disturb_what_is_in_flight, marks=pytest.mark.long),
    conformance.prefixes_are_forgotten_also_while_the_cache_is_offloaded,
    conformance.pause_keeps_sequences_and_they_go_on_under_new_weights,
    conformance.requests_in_flight_keep_or_recompute_their_cache_when_weights_change,
    conformance.new_weights_leave_nothing_of_the_old_ones,
    conformance.a_load_in_buckets_counts_when_it_is_finished,
    conformance.a_load_that_is_not_complete_is_not_served,
]


class Adapted:
    """A core that outlives the engines around it, with room for an adapter beside layers."""

    def __init__(
        self,
        directory: Path,
        config: Any,
        targets: str | tuple[str, ...] = "all-linear",
        num_ranks: int = 1,
        dtype: torch.dtype = torch.float32,
        tolerance: float = 2e-4,
    ):
        self.base = random_model(config, 0).to(dtype)
        self.config, self.dtype, self.tolerance = config, dtype, tolerance
        self.directory = str(directory)
        self.base.save_pretrained(directory)
        self.adapters = AdapterOptions(RANK, tuple(target_layers(ModelSource(self.directory), targets)))
        self.core = Core(
            EngineSettings(
                model=ModelSource(self.directory),
                max_length=640,
                num_slots=256,
                eos_token_ids=(),
                dtype=str(dtype).removeprefix("torch."),
                num_threads=1,
                engine="vllm",
                options=EngineOptions(tensor_parallel_size=num_ranks, prefix_caching=True, cache_gib=1 / 16),
            ),
            self.adapters,
        )
        self.end = self.core.close
        self.core.close = lambda: self.core.abort(list(self.core._core.scheduler.requests))  # type: ignore[method-assign]

    def names(self) -> WeightNames:
        return weight_names(ModelSource(self.directory), self.adapters)

    @contextmanager
    def empty(self, num_slots: int = 8, max_length: int = 128, eos_token_ids: Any = ()) -> Iterator[VllmEngine]:
        engine = VllmEngine(
            self.core,
            self.names(),
            num_slots=num_slots,
            max_length=max_length,
            eos_token_ids=eos_token_ids,
            num_threads=1,
            call_timeout_s=PATIENCE_S,
        )
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def engine(self, **options: Any) -> Iterator[VllmEngine]:
        """An engine with the weights of model 0."""
        with self.empty(**options) as engine:
            engine.load_weights([*self.factors(0).items(), *named_weights(self.base)], 0)
            yield engine

    @functools.cache  # noqa: B019
    def factors(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        shapes = self.names().factors.items()
        return {name: (0.2 * torch.randn(shape, generator=generator)).to(self.dtype) for name, shape in shapes}

    def model(self, number: int) -> PreTrainedModel:
        model, factors = random_model(self.config, 0), self.factors(number)
        with torch.no_grad():
            for layer in self.adapters.layers:
                a, b = factor_names(f"{layer}.weight")
                model.get_submodule(layer).weight += factors[b].float() @ factors[a].float()
        model.state_dict = lambda: dict(factors)  # type: ignore[method-assign]
        return model

    def subject(self) -> Subject:
        return Subject(self.engine, self.model, is_bit_exact=False, tolerance=self.tolerance)


@pytest.fixture(scope="module")
def adapted() -> Iterator[Adapted]:
    with tempfile.TemporaryDirectory() as directory:
        made = Adapted(Path(directory), LLAMA)
        yield made
        made.end()


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance_with_adapters(adapted: Adapted, check: Any) -> None:
    check(adapted.subject())


@needs_vllm
@pytest.mark.slow
def test_weights_below_adapters_come_once_and_digests_are_of_the_memory_that_vllm_reads(adapted: Adapted) -> None:
    first, second = adapted.factors(0), adapted.factors(1)
    base = dict(named_weights(adapted.base))
    with adapted.empty() as engine:
        with pytest.raises(WeightError, match="missing model.embed_tokens.weight"):
            engine.load_weights(first.items(), 0)
        engine.load_weights([*first.items(), *base.items()], 0)
        assert engine.undigested == frozenset()
        assert engine.digest() == named_digests([*base.items(), *first.items()])
        engine.load_weights(second.items(), 1)
        assert engine.digest(second) == named_digests(second.items())
        assert engine.digest() == named_digests([*base.items(), *second.items()])
        # A base that comes in part has to come whole: its other weights may be of another version.
        with pytest.raises(WeightError, match="missing model.layers.0.self_attn.q_proj.weight"):
            engine.load_weights([*second.items(), ("model.embed_tokens.weight", base["model.embed_tokens.weight"])], 2)
        with pytest.raises(WeightError, match="missing model.embed_tokens.weight"):
            engine.load_weights(second.items(), 2)
        engine.load_weights([*second.items(), *base.items()], 2)

        def damage(worker: Any) -> None:
            """Change one number in the memory from which vLLM applies the adapter."""
            layer = worker.model_runner.model.model.layers[1].self_attn.qkv_proj
            layer.lora_b_stacked[2][0, 0, 4, 1] += 1

        engine._core.call(damage)  # type: ignore[arg-type]
        found, expected = engine.digest(second), named_digests(second.items())
        assert [name for name in expected if found[name] != expected[name]] == [
            "model.layers.1.self_attn.v_proj.lora_B.weight"
        ]


@needs_vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config.model_type)
def test_other_families_with_adapters_beside_some_layers(config: Any, tmp_path: Path) -> None:
    made = Adapted(tmp_path, config, ("q_proj", "v_proj", "down_proj"))
    try:
        conformance.new_weights_leave_nothing_of_the_old_ones(made.subject())
        with made.engine() as engine:
            engine.load_weights(made.factors(1).items(), 1)
            assert engine.digest() == named_digests([*named_weights(made.base), *made.factors(1).items()])
    finally:
        made.end()


@needs_vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("config", [LLAMA, *OTHERS], ids=lambda config: config.model_type)
def test_ranks_hold_their_part_of_each_factor(config: Any, tmp_path: Path) -> None:
    made = Adapted(tmp_path, config, num_ranks=2)
    try:
        conformance.new_weights_leave_nothing_of_the_old_ones(made.subject())
        with made.engine() as engine:
            engine.load_weights(list(made.factors(1).items()), 1)
            assert engine.digest() == named_digests([*named_weights(made.base), *made.factors(1).items()])
            tokens = [5, 6, 7, 8, 9, 11]
            assert engine.score([tokens])[0] == pytest.approx(reference_log_probs(made.model(1), tokens, 1.0), abs=3e-4)
    finally:
        made.end()


def test_adapters_that_vllm_cannot_apply_have_a_reason() -> None:
    assert VllmKind().adapter_problem(512, "float32", is_cpu=True) is None
    assert VllmKind().adapter_problem(16, "bfloat16", is_cpu=False) is None
    assert VllmKind().adapter_problem(513, "bfloat16", is_cpu=False) == (
        "vLLM applies adapters of rank 512 or less, and train.lora.rank is 513"
    )
    assert VllmKind().adapter_problem(16, "float32", is_cpu=False) == (
        "on a GPU vLLM applies adapters only to 16-bit models, and train.dtype is fp32"
    )


@needs_vllm
@pytest.mark.slow
@pytest.mark.long
def test_a_layer_without_a_known_place_is_an_error_that_says_what_to_set(adapted: Adapted) -> None:
    unknown = weight_names(ModelSource(adapted.directory)).with_adapters(["lm_head"], RANK)
    with pytest.raises(RunError, match=r"has no known place for lm_head.lora_A.weight: set rollout.lora_sync to merg"):
        VllmEngine(adapted.core, unknown, num_slots=8, max_length=128, num_threads=1, call_timeout_s=PATIENCE_S)
