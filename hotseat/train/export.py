"""Export of a model under training as a Hugging Face model in safetensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hotseat.observe.noise import without_deepspeeds_greeting
from hotseat.train.backend import TrainOptions
from hotseat.vision import copy_processor, sees_images


def write_model(
    directory: Path,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    options: TrainOptions,
    facts: Mapping[str, Any],
) -> None:
    """Write whole weights, by their names in files, with the config of `model` and further `facts` in config.json."""
    # The shell has no weights and is not sharded: it only knows names and files.
    with torch.device("meta"):
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # ours, which a shell never calls, is not one that transformers checks
        shell = type(model)(config).to(next(iter(weights.values())).dtype)
    if options.head == "policy":
        shell.generation_config = model.generation_config
    else:
        shell.config.value_head_prefix = options.value_head_prefix
    for name, fact in facts.items():
        setattr(shell.config, name, fact)
        if name == "pad_token_id":  # transformers looks it up in the config of the language model
            shell.config.get_text_config().pad_token_id = fact
    with without_deepspeeds_greeting():
        shell.save_pretrained(directory, state_dict=dict(weights))
    if sees_images(model.config) and model.name_or_path:
        copy_processor(model.name_or_path, directory)
