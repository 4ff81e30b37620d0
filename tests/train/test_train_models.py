"""Architectures: what runs, runs right in both layouts; what would run wrong is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from hotseat.errors import NotBuiltError
from hotseat.train.packing import model_input

from .conformance import OPTIONS, VOCAB_SIZE, ClippedLoss, groups_of_four, plain_outputs, some_segments
from .fsdp_factory import make

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def small(config: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SIZES, **settings}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("Qwen2Config", {}),
        ("Qwen3Config", {}),
        ("MistralConfig", {"sliding_window": 4}),
        ("Gemma3TextConfig", {"sliding_window": 4}),
        ("Phi3Config", {}),
        ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        ("MixtralConfig", {"num_local_experts": 4}),
    ],
)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_other_architectures(config: str, settings: dict[str, Any], layout: Any) -> None:
    model = small(config, **settings)
    batch = some_segments()
    expected = plain_outputs(copy.deepcopy(model).eval(), batch, 0.8).log_probs.detach()
    backend = make(model, replace(OPTIONS, layout=layout, optimizer=None))
    torch.testing.assert_close(backend.log_probs([batch], 0.8)[0], expected, rtol=0, atol=1e-5)
    backend.close()


@pytest.mark.parametrize("config", ["Qwen3Config", "MistralConfig"])
def test_shared_contexts_change_neither_log_probs_nor_gradients(config: str) -> None:
    batch = groups_of_four(12)
    model = small(config, sliding_window=4)
    found = {}
    for layout in ("padded", "shared"):
        backend = make(copy.deepcopy(model), replace(OPTIONS, layout=layout))
        log_probs = backend.log_probs([batch], 0.8)[0]
        backend.update([batch], ClippedLoss(), 0.8)
        found[layout] = (log_probs, dict(backend.weights()))
        backend.close()
    assert model_input(batch, "shared").input_ids.shape[1] == batch.num_tokens - 12 - 2 * 9
    torch.testing.assert_close(found["shared"][0], found["padded"][0], rtol=0, atol=1e-5)
    for name, weight in found["padded"][1].items():
        torch.testing.assert_close(found["shared"][1][name], weight, rtol=0, atol=1e-5, msg=name)


def test_layers_that_attention_does_not_reach_are_run_padded() -> None:
    model = small("MambaConfig", state_size=4)
    batch = some_segments(4)
    expected = plain_outputs(copy.deepcopy(model).eval(), batch, 1.0).log_probs.detach()
    backend = make(copy.deepcopy(model), replace(OPTIONS, layout="auto", optimizer=None))
    torch.testing.assert_close(backend.log_probs([batch], 1.0)[0], expected, rtol=0, atol=1e-5)
    backend.close()
    with pytest.raises(NotBuiltError, match="MambaForCausalLM cannot run packed"):
        make(model, replace(OPTIONS, layout="packed"))


def test_logits_that_are_more_than_a_projection_are_refused() -> None:
    with pytest.raises(NotBuiltError, match="logits of GraniteForCausalLM are not its hidden states times"):
        make(small("GraniteConfig", logits_scaling=3.0), OPTIONS)
    with pytest.raises(NotBuiltError, match="Gemma2Attention asks for attention with softcap"):
        make(small("Gemma2Config"), OPTIONS)
