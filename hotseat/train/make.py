"""Which backend trains a model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from hotseat.train.backend import Backend, TrainOptions
from hotseat.train.fsdp import FSDPBackend


def make_backend(
    model: str | Path | PreTrainedModel,
    options: TrainOptions,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> Backend:
    """One rank of the model, behind the backend that the options name."""
    return FSDPBackend(model, options, device=device, trust_remote_code=trust_remote_code)
