"""The head of a teacher, read out of its checkpoint: with it a policy makes logits of the teacher's hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hotseat.errors import UserError
from hotseat.model_source import ModelSource
from hotseat.train.divergence import Head
from hotseat.train.policy_models import logit_changes
from hotseat.vision import policy_class


def load_head(source: ModelSource, dtype: torch.dtype) -> Head:
    """Read weight and bias of a language model's output embedding, which may be that of its input too, and no more."""
    config = source.config()
    with torch.device("meta"):
        model = policy_class(config).from_config(config, **source.arguments)
    embedding = model.get_output_embeddings()
    scale, cap = logit_changes(config)

    def read(parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        every = model.named_parameters(remove_duplicate=False)
        names = [name for name, each in every if each is parameter]
        return _read(source, names, parameter.shape).to(dtype)

    weight = read(embedding.weight)
    assert weight is not None
    return Head(weight, read(getattr(embedding, "bias", None)), scale, cap)


def _read(source: ModelSource, names: list[str], shape: torch.Size) -> Tensor:
    """Return the first tensor of one of these names."""
    for file in sorted(_folder(source.name).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in set(names) & set(tensors.keys()):
                tensor: Tensor = tensors.get_tensor(name)
                if tensor.shape == shape:
                    return tensor
    raise UserError(
        f"reference.model {source}: its head, {' or '.join(names)}, is not in its *.safetensors, and a policy needs it"
        " to learn from the whole vocabulary: set algorithm.distill.top_k"
    )


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
