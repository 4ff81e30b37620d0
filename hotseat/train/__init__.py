"""Training backends: from micro-batches to new weights. See `backend.Backend` for the contract."""

from hotseat.train.backend import (
    PARTS,
    AdamW,
    Backend,
    LoraOptions,
    Muon,
    Outputs,
    Precision,
    TrainOptions,
    ZeroOptions,
)
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.make import make_backend
from hotseat.train.packing import join, split_by_count, split_by_tokens, take
from hotseat.train.schedule import Schedule
from hotseat.train.zero import ZeroBackend

__all__ = [
    "PARTS",
    "AdamW",
    "Backend",
    "FSDPBackend",
    "LoraOptions",
    "Muon",
    "Outputs",
    "Precision",
    "Schedule",
    "TrainOptions",
    "ZeroBackend",
    "ZeroOptions",
    "join",
    "make_backend",
    "split_by_count",
    "split_by_tokens",
    "take",
]
