"""Conflicts of `train`."""

from __future__ import annotations

from hotseat.config.conflicts.conflict_list import Problems, conflict
from hotseat.config.schema import Config
from hotseat.registry.backends import BACKENDS, backend_entry


@conflict()
def fp16_without_loss_scaling(config: Config) -> Problems:
    if config.train.dtype == "fp16" and not backend_entry(config.train.backend).scales_loss:
        scaling = " or ".join(name for name, entry in BACKENDS.items() if entry.scales_loss)
        yield "train.dtype", f"fp16 needs loss scaling: set train.backend to {scaling}, or dtype to bf16"


@conflict()
def fp16_without_masters(config: Config) -> Problems:
    if config.train.dtype == "fp16" and not config.train.fp32_master:
        yield "train.fp32_master", "false: small updates of fp16 weights would be rounded away; set it to true"


@conflict()
def budgets_below_a_sequence(config: Config) -> Problems:
    parallel, is_pair = config.train.sequence_parallel_size, config.task_entry.rows == "pairs"
    what, least = ("pair", 2 * config.data.max_length) if is_pair else ("sequence", config.data.max_length)
    budgets = {"train": config.train.max_tokens_per_device}
    if config.has_rollouts:
        budgets["rollout"] = config.rollout.max_tokens_per_device
    for section, budget in budgets.items():
        if budget is not None and budget * parallel < least:
            over = f" over train.sequence_parallel_size {parallel} devices" if parallel > 1 else ""
            yield (
                f"{section}.max_tokens_per_device",
                f"{budget}{over} holds no {what} of data.max_length, {least} tokens",
            )


@conflict()
def shared_sequences_without_packing(config: Config) -> Problems:
    parallel = config.train.sequence_parallel_size
    if parallel > 1 and not config.train.packing:
        yield (
            "train.sequence_parallel_size",
            f"{parallel} devices can share only packed sequences, and train.packing is false",
        )


@conflict()
def shared_sequences_and_layers(config: Config) -> Problems:
    sequences, layers = config.train.sequence_parallel_size, config.train.tensor_parallel_size
    if sequences > 1 and layers > 1:
        yield (
            "train.deepspeed.tensor_parallel_size",
            f"{layers} ranks share layers, and train.sequence_parallel_size {sequences} share sequences: set one of the"
            " two to 1",
        )


@conflict()
def packing_for_attention_without_it(config: Config) -> Problems:
    if config.train.attention is not None and config.train.packing:
        yield (
            "train.attention",
            f"{config.train.attention} does not keep packed sequences apart: set train.packing to false, or leave"
            " train.attention unset",
        )
