"""Architectures: what runs, runs right in both layouts; what would run wrong is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from hotseat.errors import UnsupportedError
from hotseat.train import attention, logprobs
from hotseat.train.backend import TrainOptions
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
        ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "do_layer_norm_before": True}),
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


@pytest.mark.parametrize(
    ("num_layers", "recomputed"), [(None, [0, 1, 2, 3]), (0, []), (1, [3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_so_many_layers_recompute_and_gradients_are_the_same(num_layers: int | None, recomputed: list[int]) -> None:
    model = small("LlamaConfig", num_hidden_layers=4)
    batch = some_segments(4, weight=0.1)

    def trained(options: TrainOptions) -> tuple[Any, list[int]]:
        one = copy.deepcopy(model)
        calls: list[int] = []
        for index, layer in enumerate(one.model.layers):
            layer.self_attn.register_forward_hook(lambda *_, index=index: calls.append(index))
        backend = make(one, options)
        calls.clear()
        report = backend.update([batch], ClippedLoss(), 1.0)
        backend.close()
        return report, calls

    plain, once = trained(OPTIONS)
    report, calls = trained(replace(OPTIONS, gradient_checkpointing=True, checkpointed_layers=num_layers))
    assert once == [0, 1, 2, 3]
    assert sorted(calls) == sorted([*once, *recomputed])
    assert (report.loss, report.grad_norm) == (plain.loss, plain.grad_norm)


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
    with pytest.raises(UnsupportedError, match="MambaForCausalLM cannot run packed"):
        make(model, replace(OPTIONS, layout="packed"))


@pytest.mark.parametrize(
    ("config", "settings"),
    [("GraniteConfig", {"logits_scaling": 3.0}), ("CohereConfig", {"logit_scale": 0.2})],
)
def test_logits_are_scaled_as_the_config_says(config: str, settings: dict[str, Any]) -> None:
    model, batch = small(config, initializer_range=0.3, **settings), some_segments()
    expected = plain_outputs(copy.deepcopy(model).eval(), batch, 0.8).log_probs.detach()
    backend = make(model, replace(OPTIONS, optimizer=None))
    torch.testing.assert_close(backend.log_probs([batch], 0.8)[0], expected, rtol=0, atol=1e-5)
    backend.close()


class SquashedLlama(transformers.LlamaForCausalLM):
    """Does more to its logits than its config says."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output


def test_logits_that_are_more_than_the_config_says_are_refused() -> None:
    model = SquashedLlama(small("LlamaConfig").config)  # whose random logits are too small for the cap to matter
    with pytest.raises(UnsupportedError, match="logits of SquashedLlama are not its hidden states times"):
        make(model, OPTIONS)


class FarSightedMistral(transformers.MistralForCausalLM):
    """Its masks have a window, which its attention is not told of."""

    def __init__(self, config: Any):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.config = copy.deepcopy(config)
            layer.self_attn.config.sliding_window = None


def test_windows_that_attention_is_not_told_of_are_refused_however_long_they_are() -> None:
    config = small("MistralConfig", sliding_window=4000, max_position_embeddings=8192).config
    with pytest.raises(UnsupportedError, match="FarSightedMistral has attention of another kind than training has"):
        make(FarSightedMistral(config), OPTIONS)
    make(transformers.MistralForCausalLM(config), OPTIONS).close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("Gemma2Config", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
        ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_capped_scores_and_sinks_in_chunks_change_nothing(
    config: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither log-probs nor the step, whose backward computes chunks again."""
    model, batch = small(config, sliding_window=4, initializer_range=0.3, **settings), some_segments()
    found = {}
    for size in (2**22, 64):
        monkeypatch.setitem(attention._CHUNK_ELEMENTS, "cpu", size)
        monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", size)
        backend = make(copy.deepcopy(model), OPTIONS)
        log_probs = backend.log_probs([batch], 0.8)[0]
        backend.update([batch], ClippedLoss(), 0.8)
        found[size] = (log_probs, dict(backend.weights()))
        backend.close()
    torch.testing.assert_close(found[64][0], found[2**22][0], rtol=0, atol=1e-4)
    for name, weight in found[2**22][1].items():
        torch.testing.assert_close(found[64][1][name], weight, rtol=0, atol=1e-4, msg=name)
