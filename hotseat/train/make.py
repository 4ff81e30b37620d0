"""Makes the training backend that the options name."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from hotseat.determinism import keep_float32, use_deterministic_kernels
from hotseat.errors import UserError
from hotseat.extensions import load
from hotseat.registry.backends import backend_entry
from hotseat.train.backend import Backend, TrainOptions, ZeroOptions
from hotseat.train.model_checks import check_attention
from hotseat.train.policy_models import Model


def make_backend(model: Model, options: TrainOptions, *, device: str | torch.device = "cpu") -> Backend:
    """Make one rank of the model, with the backend that the options name."""
    keep_float32()
    if options.is_deterministic:
        use_deterministic_kernels()
    options = replace(options, zero=_needed(options.zero, int(os.environ.get("WORLD_SIZE", "1"))))
    backend: Backend = _kind(options)(model, options, device=device)
    return backend


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
    entry = backend_entry(options.backend)
    if entry.package is not None and find_spec(entry.package) is None:
        raise UserError(f"{entry.title} is not installed: {entry.hint}")


def _kind(options: TrainOptions) -> Any:
    entry = backend_entry(options.backend)
    assert entry.has_zero_options or options.zero is None, f"{entry.name} has no ZeRO"
    return load(entry.backend)
