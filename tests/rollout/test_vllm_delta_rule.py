"""Qwen3.5 in vLLM: the rule over requests on CPUs, the text of a checkpoint with images, and where weights lie."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import delta_nets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Qwen3_5Config

from hotseat.algorithms.digest import tensor_digest
from hotseat.checks.model_configs import _check_prefixes
from hotseat.errors import UnsupportedError
from hotseat.rollout.fused_weights import Piece
from hotseat.rollout.vllm_delta_rule import state_bytes, text_config
from hotseat.types import Request, Sampling

from .conformance import named_weights, reference_log_probs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def write(directory: Path, seed: int = 0, **settings: Any) -> Any:
    model = delta_nets.tiny(seed, head_dim=32, **settings)  # vLLM's CPU kernels of attention want as much
    model.save_pretrained(directory)
    return model


def engine_of(directory: Path, **settings: Any) -> Any:
    from hotseat.model_source import ModelSource
    from hotseat.rollout.kinds import EngineOptions, EngineSettings
    from hotseat.rollout.vllm_engine import VllmEngine, weight_names
    from hotseat.rollout.vllm_versions import Core

    source = ModelSource(str(directory))
    core = Core(
        EngineSettings(
            model=source,
            max_length=300,
            num_slots=8,
            eos_token_ids=(),
            dtype="float32",
            num_threads=1,
            engine="vllm",
            options=EngineOptions(**settings),
        )
    )
    return VllmEngine(core, weight_names(source), max_length=256, num_slots=8, num_threads=1, call_timeout_s=600)


def check(engine: Any, model: Any, version: int) -> None:
    """Digests are those of the model, and so are log-probs of sequences of many chunks that run side by side."""
    engine.load_weights(named_weights(model), version)
    assert engine.digest() == {name: tensor_digest(tensor) for name, tensor in named_weights(model)}
    requests = [
        Request(f"{version}/{length}", tuple(2 + place % 90 for place in range(length)), Sampling(40, 0.8), seed=length)
        for length in (1, 3, 64, 65, 200)
    ]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        tokens = [*request.token_ids, *completion.token_ids]
        expected = reference_log_probs(model, tokens, 0.8)
        assert list(completion.log_probs) == pytest.approx(expected[len(request.token_ids) :], abs=3e-4)
        assert engine.score([tokens], 0.8)[0] == pytest.approx(expected, abs=3e-4)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_pushed_weights_are_sampled_from_and_digested(tmp_path: Path, ranks: int) -> None:
    write(tmp_path)
    engine = engine_of(tmp_path, tensor_parallel_size=ranks)
    try:
        assert engine.undigested == frozenset()
        for version in (1, 2):
            check(engine, delta_nets.tiny(version, head_dim=32), version)
    finally:
        engine.close()


@pytest.mark.long
def test_a_checkpoint_that_sees_images_is_served_as_its_text_model(tmp_path: Path) -> None:
    """With the names of its files, positions for images, an encoder, and drafts for which there is no use."""
    model = write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    extra = {"model.visual.patch_embed.weight": torch.zeros(3), "mtp.norm.weight": torch.zeros(3)}
    save_file(renamed | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = model.config.to_dict()
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = Qwen3_5Config(text_config=text, architectures=["Qwen3_5ForConditionalGeneration"])
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    assert "visual" not in json.dumps([*tensors])
    engine = engine_of(tmp_path)
    try:
        check(engine, delta_nets.tiny(1, head_dim=32), 1)
    finally:
        engine.close()


def test_the_config_of_the_text_has_one_position_for_each_token() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = Qwen3_5Config(text_config={"rope_parameters": rope})
    found = text_config(config, head_dtype="float32")
    assert found.architectures == ["Qwen3_5ForCausalLM"]
    assert found.head_dtype == "float32"
    assert not any("mrope" in name for name in found.rope_parameters)
    assert found.rope_parameters["rope_theta"] == 1e4
    other = SimpleNamespace(model_type="")
    assert text_config(other) is other  # as vLLM asks before it has read a file


def test_a_request_needs_memory_for_its_states() -> None:
    """Four heads of 8 x 4, and four tokens of 2 x 16 + 16 channels, in each of three layers, in fp32."""
    config = delta_nets.tiny().config
    assert state_bytes(config) == 4 * 3 * (4 * 8 * 4 + 4 * 48)
    config.model_type = "llama"
    assert state_bytes(config) == 0


def test_a_weight_in_a_wider_dtype_is_digested_as_it_came_unless_it_holds_something_else() -> None:
    sent = torch.randn(5).to(torch.bfloat16)
    piece = Piece("A_log", sent.float(), (0,), (5,), True)
    assert tensor_digest(piece.as_sent(torch.bfloat16)) == tensor_digest(sent)
    assert piece.as_sent(None) is piece.live
    piece.live.view(torch.int32)[3] += 1  # below what bf16 has
    assert piece.as_sent(torch.bfloat16) is piece.live
    assert tensor_digest(piece.live) != tensor_digest(sent)


def test_prefixes_are_refused_where_vllm_keeps_nothing_of_them() -> None:
    config = delta_nets.tiny().config
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="rollout.prefix_caching is true: on a CPU vLLM keeps no states"):
            _check_prefixes("vllm", config)
        with pytest.raises(UnsupportedError, match="true: on a CPU vLLM caches no prefixes of latent attention: unset"):
            _check_prefixes("vllm", DeepseekV3Config())
    _check_prefixes("transformers", DeepseekV3Config())
    _check_prefixes("transformers", config)
    config.model_type = "llama"
    _check_prefixes("vllm", config)
