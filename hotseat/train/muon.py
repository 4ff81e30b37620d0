"""Muon for the matrices inside a model, AdamW for all else, over any sharding.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, as `torch.optim.Muon` has it. With
gradient G, momentum B, learning rate η, momentum factor μ and weight decay λ, for a matrix W [rows, columns]:

    B ← μ B + (1 − μ) G
    U = (1 − μ) G + μ B
    W ← (1 − η λ) W − η √max(1, rows / columns) · orthogonalize(U)

The momentum is sharded as the weights are, because it is computed entry by entry. Only `orthogonalize` needs whole
matrices: ranks add up their shares of U, each orthogonalises some of the matrices, and all get the results. It begins
by rounding to bf16, so no more than bf16 is sent. A rank alone and many ranks compute the same.

DeepSpeed has a Muon too, which OpenRLHF uses: the same formula, in fp16. Under ZeRO 1 and 2 it orthogonalises while
gradients are summed, so their norm, by which a step is clipped or left out, could not be known before. It is not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hotseat.train.backend import AdamW, Muon
from hotseat.train.fragments import in_buckets, local

_BUCKET = 2**26  # entries that are orthogonalised between two messages: 128 MiB in bf16


@dataclass(frozen=True)
class MatrixStretch:
    """A rank's stretch of one matrix in the tensor that the optimizer steps; its size may be 0."""

    shape: tuple[int, int]
    start: int  # in the matrix, flattened
    size: int
    offset: int = 0  # in the tensor, flattened


@dataclass(frozen=True)
class _Step:
    """One matrix in a step: this rank's entries of U and of the weight."""

    stretch: MatrixStretch
    update: Tensor
    weight: Tensor
    learning_rate: float

    def __len__(self) -> int:
        return math.prod(self.stretch.shape)


def matrix_names(model: PreTrainedModel, trained: Mapping[str, Tensor]) -> list[str]:
    """Name the weights that Muon is for: matrices, but neither embeddings nor heads."""
    apart = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    body = {id(weight) for weight in model.base_model.parameters()}
    if head is not None:
        apart.add(id(head.weight))
    return [name for name, each in trained.items() if each.ndim == 2 and id(each) in body and id(each) not in apart]


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW whose parameter groups with `is_muon` are stepped by Muon instead.

    What it steps may be a shard, or shards of many weights laid end to end: `bind` says where matrices are in there.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], adamw: AdamW, muon: Muon):
        groups = [
            {"params": [*matrices], "weight_decay": adamw.weight_decay, "is_muon": True},
            {"params": [each for each in others if each.ndim >= 2], "weight_decay": adamw.weight_decay},
            {"params": [each for each in others if each.ndim < 2], "weight_decay": 0.0},
        ]
        super().__init__(
            [{"is_muon": False} | group for group in groups if group["params"]],
            lr=0.0,
            betas=adamw.betas,
            eps=adamw.eps,
            fused=True,
        )
        self._momentum = muon.momentum
        self._stretches: dict[int, list[MatrixStretch]] = {}
        self._is_sharded = False

    def bind(self, stretches: Mapping[Tensor, Sequence[MatrixStretch]], *, is_sharded: bool) -> None:
        """Say which stretches of matrices are in each tensor, in the same order on all ranks.

        is_sharded: ranks have different stretches, and the same tensors otherwise.
        """
        self._stretches = {id(tensor): [*of_tensor] for tensor, of_tensor in stretches.items()}
        self._is_sharded = is_sharded

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step of all groups. With sharded matrices all ranks together."""
        assert closure is None
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["is_muon"]]
            super().step()
        finally:
            self.param_groups = groups
        steps = (step for group in groups if group["is_muon"] for step in self._steps(group))
        for bucket in in_buckets(steps, len, _BUCKET):
            self._step_matrices(bucket)

    def _steps(self, group: dict[str, Any]) -> Iterator[_Step]:
        for tensor in group["params"]:
            if tensor.grad is None:
                continue
            gradient, weight = local(tensor.grad).reshape(-1), local(tensor.detach()).view(-1)
            momentum = local(self.state[tensor]["momentum_buffer"]).view(-1)
            for stretch in self._stretches[id(tensor)]:
                here = slice(stretch.offset, stretch.offset + stretch.size)
                momentum[here].lerp_(gradient[here], 1 - self._momentum)
                update = gradient[here].lerp(momentum[here], self._momentum)
                weight[here].mul_(1 - group["lr"] * group["weight_decay"])
                yield _Step(stretch, update, weight[here], group["lr"])

    def _step_matrices(self, bucket: Sequence[_Step]) -> None:
        size, rank = (dist.get_world_size(), dist.get_rank()) if self._is_sharded else (1, 0)
        whole = bucket[0].update.new_zeros(sum(map(len, bucket)), dtype=torch.bfloat16)
        matrices = whole.split([*map(len, bucket)])
        for step, matrix in zip(bucket, matrices, strict=True):
            matrix[step.stretch.start : step.stretch.start + step.stretch.size] = step.update
        if size > 1:
            dist.all_reduce(whole)
        for number, (step, matrix) in enumerate(zip(bucket, matrices, strict=True)):
            if number % size == rank:
                matrix.copy_(orthogonalize(matrix.view(step.stretch.shape)).reshape(-1))
            else:
                matrix.zero_()
        if size > 1:
            dist.all_reduce(whole)
        for step, matrix in zip(bucket, matrices, strict=True):
            rows, columns = step.stretch.shape
            factor = step.learning_rate * math.sqrt(max(1, rows / columns))
            step.weight.add_(matrix[step.stretch.start : step.stretch.start + step.stretch.size], alpha=-factor)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Move the singular values of a matrix close to 1, by torch's Newton-Schulz iteration in bf16."""
    # Wide, so that torch's factor for tall matrices is 1.
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    result = nn.Parameter(torch.zeros_like(wide, dtype=torch.bfloat16))
    result.grad = -wide.to(torch.bfloat16)
    torch.optim.Muon([result], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return result.detach().T if matrix.shape[0] > matrix.shape[1] else result.detach()
