"""Layers over several ranks: tensor parallelism (Shoeybi et al., "Megatron-LM", 2019), with DeepSpeed's AutoTP.

The ranks of a tensor group, next to each other, bring the same micro-batches. Each has a part of every layer: some of
the heads and of the columns between the two halves of an MLP. AutoTP's layers add up what the parts give in the
forward and in the backward, so that everything outside of them (embeddings, norms, the head) is whole on every rank,
computes the same there and gets the same gradient. Which layers are cut which way is transformers' own plan for the
model: where a plan says nothing, AutoTP would guess from names.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hotseat.errors import UnsupportedError, UserError
from hotseat.train.experts import has_experts
from hotseat.train.sequence import divisors

TENSOR_PARALLEL_SIZE = "train.deepspeed.tensor_parallel_size"
_CUT = ("colwise", "rowwise")  # how linear layers are cut
_DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "columns between the halves of an MLP",
}
# Norms of queries and keys: whole, but applied to a part of the heads, so that gradients are summed over the group.
_SUMMED = "replicated_with_grad_allreduce"
_WHOLE = "embedding_rowwise"  # a plan may cut embeddings; the head reads them whole


@dataclass(frozen=True)
class Cut:
    """The part of a weight that a rank holds, and where it lies in the whole weight."""

    dim: int
    start: int  # along that dimension
    part: tuple[int, ...]  # its shape
    whole: tuple[int, ...]

    @property
    def shift(self) -> tuple[int, ...]:
        return tuple(self.start if dim == self.dim else 0 for dim in range(len(self.whole)))

    def of(self, whole: Tensor) -> Tensor:
        """Cut this rank's part out of the whole weight."""
        return whole.narrow(self.dim, self.start, self.part[self.dim])


class TensorGroup:
    """Two groups of this rank: ranks that have the parts of each layer, and ranks that have the same part.

    Its methods have the names of Megatron's `mpu`, by which DeepSpeed calls them.
    """

    def __init__(self, size: int, timeout_s: float):
        """Make the groups. All ranks together."""
        timeout = datetime.timedelta(seconds=timeout_s)
        self.size = size
        self.num_across = dist.get_world_size() // size
        self.rank = dist.get_rank() % size
        self.group: Any = dist.new_subgroups(size, timeout=timeout)[0]
        # All ranks make all groups, in the same order.
        groups = [dist.new_group(range(first, dist.get_world_size(), size), timeout=timeout) for first in range(size)]
        self.across: Any = groups[self.rank]  # those with the same part

    def gather(self, part: Tensor, cut: Cut) -> Tensor:
        """Gather the whole of a weight that is cut. All ranks together."""
        parts = [torch.empty(cut.part, dtype=part.dtype, device=part.device) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous().view(cut.part), group=self.group)
        return torch.cat(parts, cut.dim)

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            dist.destroy_process_group(self.across)
        self.group = self.across = None

    # --- what DeepSpeed asks ------------------------------------------------------------------------------------------

    def get_model_parallel_group(self) -> Any:
        return self.group

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_data_parallel_group(self) -> Any:
        return self.across

    def get_data_parallel_world_size(self) -> int:
        return self.num_across

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.across)


def cut_layers(model: PreTrainedModel, group: TensorGroup) -> dict[str, Cut]:
    """Keep this rank's part of each layer, in place; return how each weight was cut, by name. All ranks together."""
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    plan = _plan(model.config)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    set_autotp_mode(training=True)
    auto = AutoTP(
        module=model,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        keep_module_on_host=True,  # where they are
        partition_config=AutoTPConfig(tp_size=group.size, layer_specs=TPPlanConverter.convert(plan)),
        model_config=model.config,
        training_mode=True,
    )
    auto.mp_group, auto.mp_size = group.group, group.size
    auto.update_linear_policies()
    auto._replace_module(model)
    auto.register_replicated_grad_hooks(model)
    cuts = {}
    for name, weight in model.named_parameters():
        part, whole = tuple(weight.shape), shapes[name]
        if part == whole:
            continue
        [dim] = [dim for dim in range(len(whole)) if part[dim] != whole[dim]]
        assert part[dim] * group.size == whole[dim], f"{name}: {part} of {whole}"
        cuts[name] = Cut(dim, group.rank * part[dim], part, whole)
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)  # the whole weight can be freed
    for pattern in [pattern for pattern, style in plan.items() if style in _CUT]:
        layer = re.compile(rf"(.*\.)?{re.escape(pattern).replace(re.escape('*'), '.*')}\.weight")
        if not any(layer.fullmatch(name) for name in cuts):
            raise UnsupportedError(
                f"AutoTP found no {pattern} to cut in {type(model).__name__}: set {TENSOR_PARALLEL_SIZE} to 1; ZeRO"
                " stage 3 shards weights too"
            )
    return cuts


def _plan(config: Any) -> dict[str, str]:
    """Return how transformers would cut the layers of a model of this config."""
    plan: Mapping[str, str] = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if style != _WHOLE}


def check_cut(size: int, model_config: Any) -> None:
    """Raise unless the layers of a model of this config can be cut over so many ranks."""
    if size == 1:
        return
    config, name = model_config.get_text_config(), type(model_config).__name__.removesuffix("Config")
    instead = "set it to 1; ZeRO stage 3 shards weights too"
    if has_experts(model_config):
        raise UnsupportedError(
            f"{TENSOR_PARALLEL_SIZE} is {size}, and {name} is a mixture of experts, which are not cut: {instead}"
        )
    styles = set(_plan(model_config).values())
    unknown = sorted(styles - {*_CUT, _SUMMED})
    if unknown or not styles >= {*_CUT}:
        why = f"asks for {', '.join(unknown)}, which is not built in" if unknown else "does not say how to cut them"
        raise UnsupportedError(
            f"{TENSOR_PARALLEL_SIZE} is {size}, and the plan of transformers for the layers of {name} {why}: {instead}"
        )
    counts = {what: getattr(config, key, None) for key, what in _DIVIDED.items()}
    known = {what: count for what, count in counts.items() if isinstance(count, int)}
    for what, count in known.items():
        if count % size:
            raise UserError(
                f"{TENSOR_PARALLEL_SIZE} is {size}, and the model's {count} {what} do not divide over {size} ranks: set"
                f" it to {divisors(math.gcd(*known.values()))}"
            )
