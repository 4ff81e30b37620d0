"""Export of whole weights as a Hugging Face model, alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hotseat.train.backend import TrainOptions
from hotseat.train.export import write_model


def test_whole_weights_are_written_with_the_config_and_further_facts(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    weights = {name: torch.full_like(weight, 0.5) for name, weight in model.named_parameters()}
    write_model(tmp_path, model, weights, TrainOptions(), {"reward_mean": 1.5})
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(bool((weight == 0.5).all()) for weight in loaded.parameters())
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["reward_mean"], written["hidden_size"]) == (1.5, 4)
    assert not hasattr(model.config, "reward_mean")  # the model under training stays as it was
