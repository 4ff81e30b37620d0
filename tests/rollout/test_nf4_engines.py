"""Engines with a base in NF4: they hold the trainer's bytes, and compute what it does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from hotseat.errors import WeightError
from hotseat.model_source import ModelSource
from hotseat.rollout.engine import Engine
from hotseat.rollout.kinds import EngineOptions, EngineProcess, EngineSettings, engine_kind
from hotseat.train.backend import AdamW, LoraOptions, Precision, TrainOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.lora import target_layers
from hotseat.types import MicroBatch
from hotseat.weights.transfer import check_digests

from .test_transformers_engine import random_model

SHAPE = {
    "vocab_size": 67,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
CONFIGS = [LlamaConfig(**SHAPE, tie_word_embeddings=True), Qwen2Config(**SHAPE)]
RANK = 3
vllm = pytest.param(
    "vllm",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    ],
)


@contextmanager
def engine_of(folder: Path, kind: str, device: str = "cpu", dtype: str = "float32") -> Iterator[Engine]:
    settings = EngineSettings(
        model=ModelSource(str(folder)),
        max_length=64,
        num_slots=4,
        eos_token_ids=(),
        dtype=dtype,
        num_threads=1,
        engine=kind,
        options=EngineOptions(
            logs=str(folder),
            cache_gib=1 / 16,
            adapter_rank=RANK,
            adapter_targets="all-linear",
            has_nf4=True,
        ),
    )
    layers = tuple(target_layers(settings.model, "all-linear"))
    engine = engine_kind(kind).make(settings, EngineProcess(0, torch.device(device), adapted_layers=layers))
    try:
        yield engine
    finally:
        engine.close()


def trainer_of(folder: Path, device: str = "cpu", precision: Precision = "fp32") -> FSDPBackend:
    """A policy with adapters that are not zero."""
    options = TrainOptions(optimizer=AdamW(), lora=LoraOptions(RANK, 12), has_nf4=True, precision=precision)
    trainer = FSDPBackend(str(folder), options, device=device)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in trainer._model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape) * 0.1)
    trainer._update_copies()
    return trainer


def log_probs_of(trainer: FSDPBackend, tokens: list[int]) -> list[float]:
    count = len(tokens)
    batch = MicroBatch.from_segments([torch.tensor(tokens)], [torch.tensor([False] + [True] * (count - 1))], ["a"])
    return trainer.log_probs([batch], 1.0)[0].tolist()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("kind", ["transformers", vllm])
def test_an_engine_holds_the_bytes_of_the_trainer_and_gives_its_log_probs(tmp_path, kind, config):
    random_model(config, 0).save_pretrained(tmp_path)
    trainer, tokens = trainer_of(tmp_path), [5, 9, 1, 44, 23, 8, 60, 2]
    with engine_of(tmp_path, kind) as engine:
        engine.load_weights(trainer.weights(form="apart"), 0)
        sent = trainer.digest(form="apart")
        # Two layers of seven weights, each of bytes, scales and two factors.
        assert sum(name.endswith(("proj.weight", ".absmax", "lora_A.weight", "lora_B.weight")) for name in sent) == 56
        check_digests(0, sent, engine.digest(), "engine")
        assert engine.undigested == frozenset()
        found, expected = engine.score([tokens], 1.0)[0][1:], log_probs_of(trainer, tokens)[1:]
        assert found == pytest.approx(expected, abs=2e-5)
        # Only adapters follow, and the base is still there.
        with torch.no_grad():
            for name, weight in trainer._model.named_parameters():
                if ".lora_" in name:
                    weight.mul_(-1.5)
        engine.load_weights(trainer.weights(form="adapters"), 1)
        check_digests(1, trainer.digest(form="apart"), engine.digest(), "engine")
        found, expected = engine.score([tokens], 1.0)[0][1:], log_probs_of(trainer, tokens)[1:]
        assert found == pytest.approx(expected, abs=2e-5)
        # One byte of one weight, and one scale.
        for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.absmax"):
            damaged = {each: tensor.clone() for each, tensor in trainer.weights(form="apart")}
            damaged[name][3, 1] += 1
            engine.load_weights(damaged.items(), 2)
            with pytest.raises(WeightError, match=f"engine serves other values of {name} than the trainer holds after"):
                check_digests(2, trainer.digest(form="apart"), engine.digest(), "engine")
