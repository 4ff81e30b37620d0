"""Makes FSDP2 backends for the conformance suite, every layer sharded by itself as in a large model."""

from __future__ import annotations

from transformers import PreTrainedModel

from hotseat.train.backend import TrainOptions
from hotseat.train.fsdp import FSDPBackend

from . import adapters, conformance

SCENARIOS = conformance.SCENARIOS | adapters.SCENARIOS


def make(model: PreTrainedModel, options: TrainOptions) -> FSDPBackend:
    return FSDPBackend(model, options, unit_bytes=0)
