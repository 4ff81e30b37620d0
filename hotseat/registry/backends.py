"""The training backends, and the facts by which other code decides."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class BackendEntry:
    """Facts about a training backend."""

    name: str  # of `train.backend`
    title: str  # in messages
    summary: str  # for the docs
    backend: str  # "module:attribute" of its class, see `train.backend.Backend`
    package: str | None = None  # that it needs besides torch
    hint: str = ""  # how to get it
    has_zero_options: bool = False  # those of `train.deepspeed`, with the stage; else it shards as stage 3 does
    scales_loss: bool = False  # which fp16 needs
    shards_by_layer: bool = False  # weights and gradients, from stage 1 on; else gradients in buckets
    keeps_gradients: bool = False  # between updates; else they exist only during one, unsharded while they add up
    has_masters_apart: bool = False  # in the optimizer, beside 16-bit weights; else fp32 weights are their own
    copies_weights: bool = False  # fp32 ones of small models on one rank, in 16 bits
    steps_at_once: bool = False  # all weights in one optimizer step, which takes memory of its own


DEFAULT_BACKEND = "fsdp"

BACKENDS = Table[BackendEntry](
    "training backend",
    BackendEntry(
        "fsdp",
        "FSDP2",
        "torch's fully sharded data parallelism.",
        "hotseat.train.fsdp:FSDPBackend",
        shards_by_layer=True,
        copies_weights=True,
    ),
    BackendEntry(
        "deepspeed",
        "DeepSpeed",
        "DeepSpeed's ZeRO.",
        "hotseat.train.zero:ZeroBackend",
        package="deepspeed",
        hint="install it with `pip install hotseat[deepspeed]`, or set train.backend to fsdp",
        has_zero_options=True,
        scales_loss=True,
        keeps_gradients=True,
        has_masters_apart=True,
        steps_at_once=True,
    ),
)

backend_entry = BACKENDS.entry
