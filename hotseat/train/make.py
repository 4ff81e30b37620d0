"""Which backend trains a model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from hotseat.train.backend import Backend, TrainOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.zero import ZeroBackend


def make_backend(
    model: str | Path | PreTrainedModel,
    options: TrainOptions,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> Backend:
    """One rank of the model, behind the backend that the options name."""
    kind = FSDPBackend if options.zero is None else ZeroBackend
    return kind(model, options, device=device, trust_remote_code=trust_remote_code)
