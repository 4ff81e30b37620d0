"""The insides of DeepSpeed's optimizers: where a weight's master copy and gradient are, for each ZeRO stage; and the
weights of a model under ZeRO, gathered whole, replaced, and cut into fragments for checkpoints.

All that depends on DeepSpeed's own names is here, in `zero.py` and in `zero_config.py`; written for 0.19.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotseat.train.adamw import start_state
from hotseat.train.fragments import Fragment, in_buckets
from hotseat.train.tensor import Cut, TensorGroup


@dataclass(frozen=True)
class WeightStretch:
    """A rank's stretch of one weight, where the optimizer steps it."""

    start: int  # in the weight, flattened
    size: int
    owner: Tensor  # what the optimizer steps: one weight, or parts of many laid end to end
    offset: int = 0  # in the owner, flattened

    def of(self, tensor: Tensor) -> Tensor:
        """Return the stretch [size] of the owner, or of state that is as large."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.size]


class Stage(ABC):
    """A model under one ZeRO stage."""

    are_gradients_sharded = True
    scaler: Any = None  # of the loss, for fp16: DeepSpeed's
    owners: Sequence[Tensor] = ()  # what the optimizer steps

    @abstractmethod
    def pieces(self, weights: Mapping[str, nn.Parameter]) -> dict[str, WeightStretch]:
        """Return this rank's stretch of each weight that it has one of, by name."""

    @abstractmethod
    def owner(self, weight: nn.Parameter) -> Tensor:
        """Return what the optimizer steps on this rank for the group of a trained weight."""

    def scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.cur_scale)

    def gradient_unit(self) -> float:
        return 1 / self.scale()

    @abstractmethod
    def backward(self, loss: Tensor, is_last: bool) -> None: ...

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return tensors that together have the norm of this rank's gradients."""

    @abstractmethod
    def are_of(self, weights: Collection[int]) -> list[bool]:
        """Tell for each of `gradients` whether it belongs to one of the weights with these ids.

        The optimizer must have those weights in groups apart from others.
        """

    @abstractmethod
    def step(self, factor: float) -> None:
        """Take an optimizer step with gradients times the factor."""

    @abstractmethod
    def forget_gradients(self) -> None: ...

    def abandon(self) -> None:  # noqa: B027
        """Clear what a failed forward or backward has left behind, except gradients. Called on a single rank only."""

    @abstractmethod
    def refresh(self) -> None:
        """Set the weights that forwards use to those that are stepped."""

    @abstractmethod
    def live(self, weights: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """Return the tensors that hold the weights which forwards use."""

    def gradient_memory(self) -> list[Tensor]:
        """Return the tensors that hold memory of gradients between updates."""
        return []

    def release(self) -> None:  # noqa: B027
        """Release weights that were gathered for forwards without a backward."""

    @abstractmethod
    def destroy(self) -> None: ...


class Unsharded(Stage):
    """Stage 0, and models that are only scored unless their weights are sharded.

    DeepSpeed sums gradients over ranks. For 16-bit weights its optimizer of stage 0 has neither a layout of its own nor
    a choice of types: masters are kept here, one for each weight.
    """

    are_gradients_sharded = False

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        masters: Sequence[Tensor],
        engine: Any = None,
        optimizer: torch.optim.AdamW | None = None,
        scaler: Any = None,
    ):
        self.owners = masters
        self._trained = trained
        self._engine, self._optimizer, self.scaler = engine, optimizer, scaler
        if optimizer is not None:
            start_state(optimizer, masters)

    def pieces(self, weights: Mapping[str, nn.Parameter]) -> dict[str, WeightStretch]:
        masters = dict(zip(map(id, self._trained), self.owners, strict=True))
        owners = {name: masters.get(id(weight), weight) for name, weight in weights.items()}
        return {name: WeightStretch(0, owner.numel(), owner) for name, owner in owners.items()}

    def owner(self, weight: nn.Parameter) -> Tensor:
        return next(owner for trained, owner in zip(self._trained, self.owners, strict=True) if trained is weight)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self._engine.backward(loss * self.scale(), scale_wrt_gas=False)
        if is_last:
            for weight, master in zip(self._trained, self.owners, strict=True):
                if master is not weight and weight.grad is not None:
                    master.grad = weight.grad.to(master.dtype)
                    weight.grad = None

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.owners if master.grad is not None]

    def are_of(self, weights: Collection[int]) -> list[bool]:
        owned = zip(self._trained, self.owners, strict=True)
        return [id(weight) in weights for weight, master in owned if master.grad is not None]

    def step(self, factor: float) -> None:
        assert self._optimizer is not None
        if factor != 1:
            torch._foreach_mul_(self.gradients(), factor)
        self._optimizer.step()
        if self.scaler is not None:
            self.scaler.update_scale(False)
        self.refresh()

    def forget_gradients(self) -> None:
        for tensor in (*self._trained, *self.owners):
            tensor.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        for weight, master in zip(self._trained, self.owners, strict=True):
            if master is not weight:
                weight.copy_(master)

    def live(self, weights: Mapping[str, nn.Parameter]) -> list[Tensor]:
        return [weight.detach() for weight in weights.values()]

    def destroy(self) -> None:
        if self._engine is not None:
            self._engine.destroy()


class _Sharded(Stage):
    """The common part of stages that shard."""

    def __init__(self, engine: Any, is_offloaded: bool, num_averaged: int):
        self._engine = engine
        self._zero = engine.optimizer
        self._is_offloaded = is_offloaded
        self._num_averaged = num_averaged  # ranks of which it averages gradients instead of summing them
        if self._zero.loss_scaler.dynamic:
            self.scaler = self._zero.loss_scaler

    def gradient_unit(self) -> float:
        return self._num_averaged * super().gradient_unit()

    def backward(self, loss: Tensor, is_last: bool) -> None:
        if not self._engine.is_deepcompile_active():
            self._engine.backward(loss, scale_wrt_gas=False)
            return
        # Each graph overwrites what another one left.
        before = [gradient.clone() for gradient in self.gradients()]
        if before:
            torch._foreach_zero_(self.gradients())
        self._engine.backward(loss, scale_wrt_gas=False)
        if before:
            torch._foreach_add_(self.gradients(), before)

    def gradients(self) -> list[Tensor]:
        if self._is_offloaded:
            # Gradients are on their way to host memory. DeepSpeed has taken their norms, which is all that is needed.
            return [norm.detach().float().view(1) for norm in self._zero.norm_for_param_grads.values()]
        return [gradient for group in self._zero.averaged_gradients.values() if group for gradient in group]

    def are_of(self, weights: Collection[int]) -> list[bool]:
        zero = self._zero
        if self._is_offloaded:
            return [id(zero.param_dict[number]) in weights for number in zero.norm_for_param_grads]
        groups = [(zero.bit16_groups[index][0], group) for index, group in zero.averaged_gradients.items() if group]
        return [id(first) in weights for first, group in groups for _ in group]

    def abandon(self) -> None:
        zero = self._zero
        zero._backward_active_depth = 0
        zero._remaining_grad_acc_hooks = 0
        zero._epilogue_ran_this_backward = False
        already = zero.params_already_reduced  # a list, or with stage 3 a dict
        for key in already if isinstance(already, dict) else range(len(already)):
            already[key] = False

    def step(self, factor: float) -> None:
        # DeepSpeed divides 32-bit gradients by the scale, which is a good time for any other factor too.
        self._zero.override_loss_scale(1 / factor)
        try:
            self._zero.step()
        finally:
            self._zero.custom_loss_scaler = False
        self._engine.global_steps += 1  # by which its compiler knows when to do more

    def destroy(self) -> None:
        self._engine.destroy()


class Flattened(_Sharded):
    """Stages 1 and 2: every rank has all weights, end to end, and steps its share of the elements."""

    def __init__(self, engine: Any, is_offloaded: bool, num_averaged: int, kept_gradients: Sequence[Tensor]):
        super().__init__(engine, is_offloaded, num_averaged)
        self.owners = self._zero.single_partition_of_fp32_groups
        start_state(self._zero.optimizer, self.owners, range(len(self.owners)))
        self._kept_gradients = kept_gradients

    def pieces(self, weights: Mapping[str, nn.Parameter]) -> dict[str, WeightStretch]:
        pieces = {}
        for name, weight in weights.items():
            if not weight.requires_grad:
                pieces[name] = WeightStretch(0, weight.numel(), weight)
            elif weight._hp_mapping is not None:
                place = weight._hp_mapping
                owner = self.owners[place.param_group_index]
                within = place.lp_fragment_address
                pieces[name] = WeightStretch(within.start, within.numel, owner, place.hp_fragment_address.start)
        return pieces

    def owner(self, weight: nn.Parameter) -> Tensor:
        groups = enumerate(self._zero.bit16_groups)
        return self.owners[next(index for index, group in groups if any(each is weight for each in group))]

    def forget_gradients(self) -> None:
        # DeepSpeed does the same after an overflow; there is no other way to leave out a step.
        zero = self._zero
        if self._engine.is_deepcompile_active():
            zero._release_preflattened_grad_buffers()
        zero.zero_grad(set_to_none=True)
        zero.micro_step_id = -1
        zero._epilogue_ran_this_backward = False
        zero.averaged_gradients = {}
        zero.all_grad_tensors = {}
        if self._is_offloaded:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()

    def abandon(self) -> None:
        super().abandon()
        zero = self._zero
        for group in zero.bit16_groups:
            for weight in group:
                weight.grad_accum = None
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.previous_reduced_grads.clear()
        zero._release_ipg_buffers()

    def refresh(self) -> None:
        self._zero.update_lp_params()

    def live(self, weights: Mapping[str, nn.Parameter]) -> list[Tensor]:
        return [*self._zero.bit16_groups_flat, *(weight.detach() for weight in weights.values())]

    def gradient_memory(self) -> list[Tensor]:
        return [*self._kept_gradients]


class Scattered(_Sharded):
    """Stage 3: every rank has a stretch of each weight, and gathers weights when a layer needs them."""

    def __init__(self, engine: Any, is_offloaded: bool, rank: int, num_ranks: int):
        self._rank = rank
        self._engine = engine
        self._zero = engine.optimizer
        self._is_trained = hasattr(self._zero, "fp32_partitioned_groups_flat")
        if self._is_trained:
            super().__init__(engine, is_offloaded, num_ranks)
            self.owners = self._zero.fp32_partitioned_groups_flat
            groups = [self._zero.sub_group_to_group_id[index] for index in range(len(self.owners))]
            start_state(self._zero.optimizer, self.owners, groups)

    def pieces(self, weights: Mapping[str, Any]) -> dict[str, WeightStretch]:
        pieces = {}
        for name, weight in weights.items():
            share = weight.partition_numel()
            start = min(self._rank * share, weight.ds_numel)
            size = min(share, weight.ds_numel - start)  # the last ranks' shares may be padded
            if self._is_trained and weight.requires_grad:
                group, offset, _ = self._zero.grad_position[self._zero.get_param_id(weight)]
                piece = WeightStretch(start, size, self.owners[group], offset)
            else:
                piece = WeightStretch(start, size, weight.ds_tensor)
            if size:
                pieces[name] = piece
        return pieces

    def owner(self, weight: nn.Parameter) -> Tensor:
        return self.owners[self._zero.grad_position[self._zero.get_param_id(weight)][0]]

    def forget_gradients(self) -> None:
        self._zero.zero_grad(set_to_none=True)
        self._zero.averaged_gradients = {}
        self._zero._offload_boundary_param_ids = set()
        if self._is_offloaded:
            self._zero.reset_cpu_buffers()

    def abandon(self) -> None:
        offload = self._zero.parameter_offload if self._is_trained else self._zero
        coordinator = offload.get_param_coordinator()
        coordinator.release_backward_leftovers()
        self.release()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()  # it may have recorded half of one
        if self._is_trained:
            super().abandon()
            for bucket in self._zero.ipg_buckets.values():
                bucket.clear_params()
            for group in self._zero.fp16_groups:
                for weight in group:
                    weight.grad = None  # on CPUs its own `zero_grad` fails where there is one

    def release(self) -> None:
        offload = self._zero.parameter_offload if self._is_trained else self._zero
        offload.partition_all_parameters()

    def refresh(self) -> None:
        self.release()  # they are gathered anew when they are used
        if self._is_trained:
            for group in range(len(self.owners)):
                self._zero._reassign_or_swap_out_partitioned_parameters(group)
            self._zero.invalidate_secondary_tensor()

    def live(self, weights: Mapping[str, Any]) -> list[Tensor]:
        tensors = [tensor for weight in weights.values() for tensor in (weight.detach(), weight.ds_tensor)]
        return [*tensors, self._zero.lp_param_buffer] if self._is_trained else tensors

    def gradient_memory(self) -> list[Tensor]:
        if not self._is_trained:
            return []
        buckets = [bucket.buffer for bucket in self._zero.ipg_buckets.values() if isinstance(bucket.buffer, Tensor)]
        return [self._zero.grad_partitions_flat_buffer, *buckets]


@dataclass(frozen=True)
class ShardedWeights:
    """Shares of the weights on this rank, by name, gathered to whole weights on demand."""

    parameters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, torch.Size]  # on this rank, of weights that are cut over layers
    pieces: Mapping[str, WeightStretch]  # stretches that this rank steps or holds
    cuts: Mapping[str, Cut]  # of weights that are cut over layers
    tensor: TensorGroup | None  # the ranks that have the parts of each layer
    device: torch.device
    are_masters_sharded: bool

    def gather(self, names: Collection[str], is_exact: bool) -> Iterator[tuple[str, Tensor]]:
        """Gather whole weights, each to be read before the next comes. All ranks together.

        is_exact: masters of trained weights instead of the weights that forwards use.
        """
        for name, weight in self._gather_parts(names, is_exact):
            cut = self.cuts.get(name)
            yield name, weight if cut is None or self.tensor is None else self.tensor.gather(weight, cut)

    def _gather_parts(self, names: Collection[str], is_exact: bool) -> Iterator[tuple[str, Tensor]]:
        """Gather as `gather` does, but of weights that are cut over layers only this rank's part."""
        import deepspeed

        masters = [name for name in names if is_exact and self.parameters[name].requires_grad]
        live = [name for name in names if not (is_exact and self.parameters[name].requires_grad)]
        with deepspeed.zero.GatheredParameters([self.parameters[name] for name in live]):
            for name in live:
                yield name, self.parameters[name].detach()
        counts = [math.prod(self.shapes[name]) for name in masters]
        # Every element is on one rank and zero elsewhere; a sum of integers keeps its bits.
        whole = torch.zeros(sum(counts), dtype=torch.float32, device=self.device)
        places = dict(zip(masters, whole.split(counts), strict=True))
        for name, place in places.items():
            piece = self.pieces.get(name)
            if piece is not None:
                place[piece.start : piece.start + piece.size] = piece.of(piece.owner)
        if masters and self.are_masters_sharded and dist.get_world_size() > 1:
            dist.all_reduce(whole.view(torch.int32), group=None if self.tensor is None else self.tensor.across)
        for name, place in places.items():
            yield name, place.view(self.shapes[name])

    def copies(self, names: Collection[str], is_exact: bool) -> dict[str, Tensor]:
        """Gather whole weights, and copy each. All ranks together."""
        return {name: weight.clone() for name, weight in self.gather(names, is_exact)}

    def buckets(self, names: Iterable[str], num_bytes: int, bucket_bytes: int) -> Iterator[list[str]]:
        """Group names of weights into buckets of at most `bucket_bytes`. num_bytes: per element."""
        return in_buckets(names, lambda name: math.prod(self.shapes[name]) * num_bytes, bucket_bytes)

    def replace(self, name: str, whole: Tensor) -> None:
        """Copy this rank's stretch out of a whole weight, if it has one."""
        piece, cut = self.pieces.get(name), self.cuts.get(name)
        if piece is not None:
            part = whole if cut is None else cut.of(whole)
            piece.of(piece.owner).copy_(part.reshape(-1)[piece.start : piece.start + piece.size])

    def fragment(self, name: str, stretch: Tensor) -> Fragment:
        """Describe a stretch, which lies in a tensor like the weight's piece does, as a part of the whole tensor."""
        start, cut = self.pieces[name].start, self.cuts.get(name)
        if cut is None:
            return Fragment(stretch, self.shapes[name], start)
        return Fragment(stretch, cut.whole, start, cut.part, cut.shift)
