"""The place of each weight of a Hugging Face model in the live parameters of a vLLM model.

vLLM fuses projections (q, k and v in one matrix, gate and up in another) and gives each tensor-parallel rank a slice.
Both are known from the type of the layer. A `Piece` is what one rank holds of one weight, as a view of the live
parameter; the digests of all pieces of a weight add up to the digest of the whole.

Experts of some models (`_EXPERTS`) are copied into their pieces as they are, where vLLM's own way takes every expert's
projections one by one. No digest reaches those of other models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hotseat.algorithms.adapters import factor_names
from hotseat.algorithms.nf4 import SCALES
from hotseat.rollout.live_weights import WeightNames


@dataclass(frozen=True)
class Piece:
    """A rank's part of one weight."""

    name: str  # the weight's, in the Hugging Face model
    live: Tensor  # a view: what the next step would use
    offset: tuple[int, ...]  # of its first element in the whole weight
    shape: tuple[int, ...]  # of the whole weight
    is_counted: bool  # False: another rank holds the same, and counts it
    is_taken_here: bool = False  # `take` loads it, since vLLM's loader has another name for it, or other pieces
    zeros: Tensor | None = None  # live values that have to be 0 here, since another rank has those of the weight

    def take(self, whole: Tensor) -> None:
        """Copy this piece out of a new weight."""
        self.live.copy_(self.window(whole))
        if self.zeros is not None:
            self.zeros.zero_()

    def as_sent(self, dtype: torch.dtype | None) -> Tensor:
        """Return the live values in the dtype in which they came, if vLLM holds the same ones in a wider one."""
        if dtype is None or dtype.itemsize >= self.live.dtype.itemsize:
            return self.live
        narrow = self.live.to(dtype)
        return narrow if torch.equal(narrow.to(self.live.dtype), self.live) else self.live

    def window(self, whole: Tensor) -> Tensor:
        """Return this piece of a whole weight."""
        return whole[
            tuple(slice(start, start + size) for start, size in zip(self.offset, self.live.shape, strict=True))
        ]


# Models whose experts have a known place in vLLM, and modules that have another name in transformers than in vLLM.
_EXPERTS: Mapping[str, Mapping[str, str]] = {
    "GptOssForCausalLM": {},
    "DeepseekV2ForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "MixtralForCausalLM": {"block_sparse_moe": "mlp"},
    "Qwen2MoeForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
}
FP8 = torch.float8_e4m3fn
_NUM_PARTS = {"in_proj_qkv": 3}  # weights of the Hugging Face model that are several outputs of one layer of vLLM
_BELOW_ADAPTER = ".base_layer"  # the name that vLLM gives a layer inside its adapter


def pieces(model: nn.Module, rank: int) -> Iterator[Piece]:
    """Yield the pieces of every known parameter, under every name it may have. `rank`: the tensor-parallel one."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    names = _EXPERTS.get(type(model).__name__)
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        prefix = prefix.removesuffix(_BELOW_ADAPTER)
        renamed = ".".join((names or {}).get(part, part) for part in prefix.split("."))
        if isinstance(module, RoutedExperts):
            if names is not None:
                yield from _of_experts(module, renamed.removesuffix(".routed_experts"), rank)
            continue
        for name, parameter in module.named_parameters(recurse=False):
            live = parameter.detach()
            if live.dtype == FP8:  # vLLM's kernels take FP8 weights transposed
                live = live.t()
            owner = modules.get(prefix.rpartition(".")[0])
            for piece in _of_parameter(module, owner, renamed, name, live, rank, packed):
                yield replace(piece, is_taken_here=renamed != prefix)


def renamed(every: Iterable[Piece], model: nn.Module, names: Collection[str]) -> Iterator[Piece]:
    """Give pieces the names of the Hugging Face model where vLLM's model has its parts under other names.

    names: of all weights of the Hugging Face model.
    """
    hf_names = _hf_names(model, names)
    for piece in every:
        yield replace(piece, name=hf_names.get(piece.name, piece.name))


def _hf_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return the names of the Hugging Face model by those that its weights have in vLLM, before they are fused.

    In models that see images they differ: vLLM's own table says how.
    """
    table: Any = getattr(model, "hf_to_vllm_mapper", None)
    if table is None:
        return {}
    if hasattr(table, "orig_to_new_stacked"):  # pieces of fused weights are apart already
        table = replace(table, orig_to_new_stacked={})
    return {table._map_name(name): name for name in names} | {name: name for name in names}


@dataclass(frozen=True)
class _Parameter:
    """A parameter `name` of the module at `prefix`. packed: names of the weights that layers fuse, by the layer's."""

    prefix: str
    name: str
    live: Tensor
    packed: Mapping[str, Sequence[str]]
    is_counted: bool  # False: another rank holds the same, and counts it

    @property
    def full(self) -> str:
        return f"{self.prefix}.{self.name}" if self.prefix else self.name

    def piece(self, start: int, total: int, dim: int = 0, live: Tensor | None = None) -> Piece:
        """Return the whole parameter, or these rows of it, as one piece of a weight of size `total` in `dim`."""
        return self._piece(self.full, self.live if live is None else live, start, total, dim)

    def _piece(self, full: str, view: Tensor, start: int, total: int, dim: int = 0, is_counted: bool = True) -> Piece:
        offset = tuple(start if d == dim else 0 for d in range(view.dim()))
        shape = tuple(total if d == dim else size for d, size in enumerate(view.shape))
        return Piece(full, view, offset, shape, is_counted and self.is_counted)

    def fused(
        self, sizes: Sequence[int], parts: Sequence[int], totals: Sequence[int], counted: Sequence[bool]
    ) -> Iterator[Piece]:
        """Yield the pieces of weights that are fused here, in the order of their sizes on this rank.

        parts: which of each weight it holds. totals: their sizes on all ranks. counted: whether this rank counts them.
        """
        parent, _, last = self.prefix.rpartition(".")
        names = self.packed.get(last, ())
        if self.live.shape[0] != sum(sizes):
            return  # fused in another way: no digest reaches it
        places = list(zip(self.live.split(list(sizes)), sizes, parts, totals, counted, strict=True))
        # Some checkpoints have one fused weight too (Phi-3, GLM-4), under that name, which others do not have.
        fused_here = [(self.full, places)]
        nums = [_NUM_PARTS.get(each, 1) for each in names]
        if sum(nums) == len(sizes):
            each_place = iter(places)
            fused_here += [
                (f"{parent}.{each}.{self.name}", list(islice(each_place, num)))
                for each, num in zip(names, nums, strict=True)
            ]
        for whole, own in fused_here:
            first, size_of_whole = 0, sum(total for _, _, _, total, _ in own)
            for view, size, at, total, counts in own:
                yield self._piece(whole, view, first + at * size, size_of_whole, is_counted=counts)
                first += total


def _of_parameter(
    module: Any, owner: Any, prefix: str, name: str, live: Tensor, rank: int, packed: Mapping[str, Sequence[str]]
) -> Iterator[Piece]:
    """Yield the pieces of a parameter. owner: the module that its module is a part of."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
    is_cut, num_rows = is_linear and module.tp_size > 1, live.shape[0] if live.dim() else 1
    part = module.tp_rank if is_cut else 0
    parameter = _Parameter(prefix, name, live, packed, is_counted=is_cut or rank == 0)
    is_conv = isinstance(owner, GatedDeltaNetAttention) and prefix.rpartition(".")[2] == "conv1d"
    if isinstance(module, QKVParallelLinear):
        kv, all_kv = module.num_kv_heads, module.total_num_kv_heads
        width, v_width = module.head_size, module.v_head_size
        # If there are fewer heads of keys than ranks, neighbouring ranks hold the same one.
        kv_part, copy = divmod(part, module.num_kv_head_replicas)
        sizes = [module.num_heads * width, kv * width, kv * v_width]
        totals = [module.total_num_heads * width, all_kv * width, all_kv * v_width]
        yield from parameter.fused(sizes, [part, kv_part, kv_part], totals, [True, copy == 0, copy == 0])
    elif isinstance(module, MergedColumnParallelLinear):
        totals = list(module.output_sizes)
        sizes = [total // module.tp_size for total in totals]
        yield from parameter.fused(sizes, [part] * len(sizes), totals, [True] * len(sizes))
    elif isinstance(module, ColumnParallelLinear) and is_conv:
        # Its channels are those of keys, of queries and of values, of which each rank has some.
        totals = [owner.key_dim, owner.key_dim, owner.value_dim]
        sizes = [total // owner.tp_size for total in totals]
        yield from parameter.fused(sizes, [part] * 3, totals, [True] * 3)
    elif isinstance(module, ColumnParallelLinear):
        yield parameter.piece(part * num_rows, num_rows * module.tp_size)
    elif isinstance(module, RowParallelLinear) and name in ("weight", SCALES):
        yield parameter.piece(part * live.shape[1], live.shape[1] * module.tp_size, dim=1)
    elif isinstance(module, VocabParallelEmbedding):
        at = module.shard_indices
        parameter = replace(parameter, is_counted=module.tp_size > 1 or rank == 0)
        rows = live[: at.num_org_elements]  # the rows after these are padding
        yield parameter.piece(at.org_vocab_start_index, module.org_vocab_size, live=rows)
    elif isinstance(module, GatedDeltaNetAttention) or name == "sinks":  # a number for each head
        total = module.num_attention_heads if name == "sinks" else module.num_v_heads
        is_cut = total > num_rows
        yield replace(parameter, is_counted=is_cut or rank == 0).piece(rank * num_rows if is_cut else 0, total)
    else:
        yield replace(parameter, is_counted=rank == 0).piece(0, num_rows)


def adapter_pieces(model: nn.Module, rank: int, names: WeightNames) -> Iterator[Piece]:
    """Yield the pieces of the adapters' factors: in the memory from which vLLM applies the first of its adapters.

    Each rank holds the columns of A for its columns of the weight, and the rows of B for its rows.
    """
    if not names.factors:
        return
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    hf_names = _hf_names(model, names.first_names)
    for prefix, module in model.named_modules():
        if not prefix.endswith(_BELOW_ADAPTER):
            continue
        prefix = prefix.removesuffix(_BELOW_ADAPTER)
        adapter: Any = model.get_submodule(prefix)
        parts = _of_parameter(module, None, prefix, "weight", module.weight.detach(), rank, packed)
        named = [replace(piece, name=hf_names.get(piece.name, piece.name)) for piece in parts]
        weights = [piece for piece in named if names.shapes.get(piece.name) == piece.shape]
        if len(weights) != len(adapter.lora_a_stacked):
            continue  # arranged in another way
        for weight, all_a, all_b in zip(weights, adapter.lora_a_stacked, adapter.lora_b_stacked, strict=True):
            name_of_a, name_of_b = factor_names(weight.name)
            if name_of_a not in names.factors:
                continue
            num_ranks = names.factors[name_of_a][0]
            a, b = all_a[0, 0, :num_ranks], all_b[0, 0, :, :num_ranks]
            (out_size, in_size), (row, column) = weight.shape, weight.offset
            if weight.live.dtype == torch.uint8:  # two columns in NF4 share a byte
                in_size, column = 2 * in_size, 2 * column
            counts_a = weight.is_counted if a.shape[1] < in_size else rank == 0
            counts_b = weight.is_counted if b.shape[0] < out_size else rank == 0
            yield Piece(name_of_a, a, (0, column), (num_ranks, in_size), counts_a)
            yield Piece(name_of_b, b, (row, 0), (out_size, num_ranks), counts_b)


def _of_experts(experts: Any, prefix: str, rank: int) -> Iterator[Piece]:
    """Yield the pieces of experts.

    Weights are `gate_up_proj` [experts, 2 x intermediate, hidden] and `down_proj` [experts, hidden, intermediate]. Each
    rank has its rows of every expert's gate and up, and its columns of every down.

    Where experts have biases (gpt-oss), the last two dimensions of weights are swapped in transformers, and rows of
    gate and up alternate on both sides. The first rank alone has the biases of `down_proj`, others have zeros.
    """
    parallel = experts.moe_config.moe_parallel_config
    size, part = parallel.tp_size, parallel.tp_rank
    gate_up, down = experts.w13_weight.detach(), experts.w2_weight.detach()
    num_experts, hidden, width = down.shape
    total = width * size

    def piece(name: str, view: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
        return Piece(f"{prefix}.{name}", view, offset, shape, size > 1 or rank == 0, is_taken_here=True)

    if experts.moe_config.has_bias:
        for expert in range(num_experts):  # one by one: a view of swapped dimensions is copied to be read
            of_gate_up, of_down = gate_up[expert : expert + 1].mT, down[expert : expert + 1].mT
            yield piece("gate_up_proj", of_gate_up, (expert, 0, part * 2 * width), (num_experts, hidden, 2 * total))
            yield piece("down_proj", of_down, (expert, part * width, 0), (num_experts, total, hidden))
        bias = experts.w13_bias.detach()
        yield piece("gate_up_proj_bias", bias, (0, part * 2 * width), (num_experts, 2 * total))
        first, bias = 0 if part == 0 else num_experts, experts.w2_bias.detach()
        of_bias = piece("down_proj_bias", bias[first:], (first, 0), (num_experts, hidden))
        yield of_bias if part == 0 else replace(of_bias, zeros=bias)
        return
    whole = (num_experts, 2 * total, hidden)
    if size == 1:
        yield piece("gate_up_proj", gate_up, (0, 0, 0), whole)
    else:  # Expert by expert: a half of all of them is not contiguous, and would be copied to be read or written.
        for expert in range(num_experts):
            for view, start in zip(gate_up[expert : expert + 1].split(width, dim=1), (0, total), strict=True):
                yield piece("gate_up_proj", view, (expert, start + part * width, 0), whole)
    yield piece("down_proj", down, (0, 0, part * width), (num_experts, hidden, total))
