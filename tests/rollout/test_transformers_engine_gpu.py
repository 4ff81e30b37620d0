"""The transformers engine on a CUDA device: conformance, its kernels, and that memory is really given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import delta_nets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hotseat.rollout import SlotOptions, TransformersEngine

from . import conformance, kernel_checks
from .conformance import Subject, named_weights, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def random_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=640,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def subject(own_layers: bool, model: Callable[[int], PreTrainedModel] = random_model) -> Subject:
    @contextmanager
    def engine(num_slots: int = 8, max_length: int = 128, eos_token_ids: Any = ()) -> Iterator[TransformersEngine]:
        engine = TransformersEngine(
            model(0),
            num_slots=num_slots,
            max_length=max_length,
            eos_token_ids=eos_token_ids,
            options=SlotOptions(device="cuda", own_layers=own_layers),
        )
        try:
            yield engine
        finally:
            engine.close()

    return Subject(engine=engine, model=model, is_bit_exact=False, tolerance=1e-4)


@pytest.mark.parametrize("own_layers", [True, False])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Subject], None], own_layers: bool) -> None:
    check(subject(own_layers))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance_with_linear_attention(check: Callable[[Subject], None]) -> None:
    check(subject(True, lambda seed: delta_nets.tiny(seed, max_position_embeddings=640)))


@pytest.mark.parametrize("check", kernel_checks.CHECKS, ids=lambda check: check.__name__)
def test_kernels(check: Callable[[torch.device], None]) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    check(torch.device("cuda", torch.cuda.current_device()))


def test_offloaded_parts_leave_the_device() -> None:
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        max_position_embeddings=1024,
    )
    engine = TransformersEngine(
        LlamaForCausalLM(config),
        max_length=1024,
        num_slots=64,
        options=SlotOptions(device="cuda", dtype=torch.bfloat16),
    )
    asked = [request(f"{i}", seed=i) for i in range(64)]
    expected = engine.generate(asked)
    digest = engine.digest()
    resident = engine.health().resident_bytes
    moved = engine.offload(["weights", "kv_cache"])
    free_offloaded, _ = torch.cuda.mem_get_info()
    assert moved.num_bytes == sum(resident.values())
    # What stays: the context, cuBLAS workspaces, angles and per-slot state.
    assert free_before - free_offloaded < 700 * 2**20 < moved.num_bytes
    engine.onload(["weights", "kv_cache"])
    assert engine.digest() == digest
    assert engine.generate(asked) == expected
    engine.load_weights(named_weights(LlamaForCausalLM(config)), version=1)
    assert engine.version == 1
    engine.close()
