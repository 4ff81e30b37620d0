"""Training backends: from micro-batches to new weights. See `backend.Backend` for the contract."""

from hotseat.train.backend import (
    PARTS,
    AdamW,
    Backend,
    LoraOptions,
    Loss,
    Muon,
    Outputs,
    Precision,
    TrainOptions,
    UpdateReport,
    ZeroOptions,
)
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.make import make_backend
from hotseat.train.packing import join, split_by_count, split_by_tokens, take
from hotseat.train.schedule import Schedule, ScheduleKind
from hotseat.train.zero import ZeroBackend

__all__ = [
    "PARTS",
    "AdamW",
    "Backend",
    "FSDPBackend",
    "LoraOptions",
    "Loss",
    "Muon",
    "Outputs",
    "Precision",
    "Schedule",
    "ScheduleKind",
    "TrainOptions",
    "UpdateReport",
    "ZeroBackend",
    "ZeroOptions",
    "join",
    "make_backend",
    "split_by_count",
    "split_by_tokens",
    "take",
]
