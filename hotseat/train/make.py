"""The choice of the backend that trains a model."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hotseat.determinism import keep_float32, use_deterministic_kernels
from hotseat.errors import UserError
from hotseat.train.backend import Backend, TrainOptions, ZeroOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.models import check_attention
from hotseat.train.zero import ZeroBackend
from hotseat.train.zero_config import HINT


def make_backend(
    model: str | Path | PreTrainedModel,
    options: TrainOptions,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> Backend:
    """Make one rank of the model, with the backend that the options name."""
    keep_float32()
    if options.is_deterministic:
        use_deterministic_kernels()
    options = replace(options, zero=_needed(options.zero, int(os.environ.get("WORLD_SIZE", "1"))))
    return _kind(options)(model, options, device=device, trust_remote_code=trust_remote_code)


def _needed(zero: ZeroOptions | None, num_ranks: int) -> ZeroOptions | None:
    """Return the settings with the stage that so many ranks need.

    One rank has nothing to shard: stage 2 then computes what stage 3 does, to the last bit, without gathering each
    weight before its layer runs. Stage 3 stays where DeepSpeed offers more with it: offloading, DeepCompile.
    """
    if zero is None or num_ranks > 1 or zero.stage < 3 or zero.zpg > 1 or zero.adam_offload or zero.deepcompile:
        return zero
    return replace(zero, stage=2)


def check_options(options: TrainOptions) -> None:
    """Raise if the backend that the options name does not have what they ask for, or is not installed."""
    _kind(options).check(options)
    check_attention(options)
    if options.zero is not None and find_spec("deepspeed") is None:
        raise UserError(f"DeepSpeed is not installed: {HINT}")


def _kind(options: TrainOptions) -> type[FSDPBackend] | type[ZeroBackend]:
    return FSDPBackend if options.zero is None else ZeroBackend
