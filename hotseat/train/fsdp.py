"""The FSDP2 backend: torch's `fully_shard` over the ranks, a plain module where there is only one.

One rank has nothing to shard or gather, so the model runs unwrapped: the same maths without the hooks (which cost 8% on
a small model), and the same bits in every run. With 16-bit compute from 32-bit weights, `Masters` keeps both; a large
model is wrapped even on one rank, since the copies would take memory and the hooks hardly matter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from hotseat.algorithms.adapters import WeightForm
from hotseat.algorithms.digest import combine_digests, named_digests
from hotseat.algorithms.nf4 import quantise_layers
from hotseat.errors import UserError
from hotseat.placement.role_names import Part
from hotseat.train.adamw import make_adamw, set_learning_rate, start_state
from hotseat.train.attention import has_flash
from hotseat.train.average import MovingAverage
from hotseat.train.backend import AdamW, Muon, TrainOptions, check_parts
from hotseat.train.fragments import local
from hotseat.train.hooks import Gradients
from hotseat.train.logprobs import Compiler
from hotseat.train.lora import base_names
from hotseat.train.masters import COPIED_BYTES, Masters
from hotseat.train.muon import MatrixStretch, MuonWithAdamW, matrix_names
from hotseat.train.outgoing import Merge, as_they_are, convert
from hotseat.train.policy_models import Model, compiles, layers, load_model, prepare_model
from hotseat.train.ranks import Ranks
from hotseat.train.trainer import Trainer
from hotseat.types import Moved

# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FSDPBackend(Trainer):
    """One rank of a model under FSDP2. See `Backend` for the contract.

    copied_bytes: 16-bit copies of 32-bit weights are kept on a single rank if they take no more.
    unit_bytes: a layer at least this large is gathered when its turn comes; smaller ones all at once, since for them
        the messages would cost more than the memory.
    """

    name = "fsdp"

    def __init__(
        self,
        model: Model,
        options: TrainOptions,
        *,
        device: str | torch.device = "cpu",
        copied_bytes: int = COPIED_BYTES,
        unit_bytes: int = 8 << 20,
        _compiler: Compiler = "inductor",
    ):
        self.check(options)
        device = torch.device(device)
        # Weights that are never stepped (a model that is only scored, a frozen base) need no more bits than they are
        # computed with.
        if options.precision == "bf16_master" and options.optimizer is None:
            options = replace(options, precision="bf16")
        is_16_bit = options.precision == "bf16" or (options.precision == "bf16_master" and options.lora is not None)
        dtype = torch.bfloat16 if is_16_bit else torch.float32
        loaded = load_model(model, options, dtype)
        if options.has_nf4:
            quantise_layers(loaded, device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            loaded.to(device)  # where it will be whole: checks of the model take seconds of a core elsewhere
        self._wrapped, layout = prepare_model(
            loaded, options, device, _compiler if compiles(options.compile, device) else None
        )
        has_masters = options.precision == "bf16_master"
        # No variable here may refer to a weight, of which sharding makes a copy on the same device.
        is_large = has_masters and 2 * _widen(loaded) > copied_bytes
        ranks = Ranks(device, options.timeout_s, always_group=is_large)
        self._masters: Masters | None = None
        if ranks.size > 1 or is_large:
            _shard(self._wrapped, loaded, options, device, ranks.size, unit_bytes)
        else:
            self._wrapped.to(device)
            self._masters = Masters(loaded) if has_masters else None
        compute = torch.float32 if options.precision == "fp32" else torch.bfloat16
        is_flash = has_flash(device, compute) and self._wrapped.has_plain_scores
        super().__init__(options, ranks, device, loaded, layout, is_flash)
        # Listed once: while a layer is gathered the model shows other tensors under the same names.
        self._weights = dict(loaded.named_parameters())
        if self._masters is not None:
            self._weights |= self._masters.weights
        self._trained = {name: weight for name, weight in self._weights.items() if weight.requires_grad}
        self._optimizer: torch.optim.AdamW | None = None
        if options.optimizer is not None:
            self._optimizer = self._make_optimizer(options.optimizer, options.muon)
            start_state(self._optimizer, [*self._trained.values()])
        self._host_mesh = None  # of the average: a DTensor is where its mesh is
        if options.average_decay is not None:
            self._average = MovingAverage(self._shards(), options.average_decay)
            if isinstance(self._wrapped, FSDPModule):
                self._host_mesh = init_device_mesh("cpu", (ranks.size,))

    def _make_optimizer(self, adamw: AdamW, muon: Muon | None) -> torch.optim.AdamW:
        if muon is None:
            return make_adamw(self._trained.values(), adamw)
        names = matrix_names(self._model, self._trained)
        others = [weight for name, weight in self._trained.items() if name not in names]
        optimizer = MuonWithAdamW([self._trained[name] for name in names], others, adamw, muon)
        stretches = {}
        for name in names:
            weight = self._trained[name]
            rows, columns = weight.shape
            first = min(self._first_row(weight), rows) if isinstance(weight, DTensor) else 0
            stretches[weight] = [MatrixStretch((rows, columns), first * columns, local(weight.detach()).numel())]
        optimizer.bind(stretches, is_sharded=isinstance(self._wrapped, FSDPModule) and self._ranks.size > 1)
        return optimizer

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        if options.precision == "fp16":
            raise UserError(
                "FSDP2 has no fp16, for which the loss must be scaled: set train.backend to deepspeed, or train.dtype"
                " to bf16"
            )

    # --- forward and backward -----------------------------------------------------------------------------------------

    def _module(self) -> nn.Module:
        return self._wrapped

    def _after_scoring(self) -> None:
        # Without a backward some modules would keep their gathered weights, and use them after they have changed.
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _before_forward(self, is_last: bool) -> None:
        if isinstance(self._wrapped, FSDPModule):
            self._wrapped.set_requires_gradient_sync(is_last)

    def _backward(self, total: Tensor, is_last: bool) -> None:
        total.backward()
        if self._masters is not None:
            self._masters.add_up()

    def _gradients(self) -> Gradients:
        gradients = [local(weight.grad) for weight in self._trained.values() if weight.grad is not None]
        return Gradients(gradients, is_sharded=isinstance(self._wrapped, FSDPModule))

    def _step(self, grad_norm: float, learning_rate: float) -> None:
        assert self._optimizer is not None
        factor = self._clip_factor(grad_norm)
        if factor < 1:
            torch._foreach_mul_(self._gradients().tensors, factor)
        set_learning_rate(self._optimizer, learning_rate, self._muon_rate())
        self._optimizer.step()
        self._update_copies()

    def _update_copies(self) -> None:
        if self._masters is not None:
            self._masters.update_copies()

    def _forget_gradients(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        if self._masters is not None:
            self._masters.forget_gradients()

    def _lower_loss_scale(self) -> bool:
        return False

    def _can_continue(self) -> bool:
        return self._ranks.size == 1

    def _abandon(self) -> None:
        if isinstance(self._wrapped, FSDPModule):
            reset_sharding(self._wrapped)

    # --- residency ----------------------------------------------------------------------------------------------------

    def offload(self, parts: Collection[Part]) -> Moved:
        self._need("offload")
        check_parts(parts)
        num_bytes = 0
        if self._masters is not None and Part.WEIGHTS in parts:
            # Before weights leave: torch then gives back what is free, and only segments in which nothing is in use.
            num_bytes = self._masters.drop_copies()
        return super().offload(parts) + Moved(num_bytes, 0, 0.0)

    def onload(self, parts: Collection[Part]) -> Moved:
        moved = super().onload(parts)
        if self._masters is not None and Part.WEIGHTS in parts:
            moved += Moved(self._masters.make_copies(), 0, 0.0)
        return moved

    def _tensors(self, part: Part) -> list[Tensor]:
        if part == Part.WEIGHTS:
            return [local(weight.detach()) for weight in self._weights.values()] + self._outgoing.packed()
        if part == Part.GRADIENTS:
            return [local(weight.grad) for weight in self._weights.values() if weight.grad is not None]
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        # A step count per weight is a few bytes, and too many to be worth moving.
        return [local(value) for state in states for value in state.values() if value.ndim > 0]

    # --- weights out --------------------------------------------------------------------------------------------------

    def _stream(self, dtype: torch.dtype | None, bucket_bytes: int, form: WeightForm) -> Iterator[tuple[str, Tensor]]:
        dtype, factors = self._outgoing.dtype(dtype), self._whole(self._outgoing.factor_names())
        if form != "merged":
            yield from self._outgoing.factors(factors, dtype)
        if form == "adapters":
            return
        merge = self._outgoing.merging(factors) if form == "merged" else as_they_are
        bucket: list[tuple[str, DTensor]] = []
        size = 0
        for name, weight in self._state(form).items():
            if not isinstance(weight, DTensor):
                yield name, convert(merge(name, weight, 0), self._outgoing.buffer_dtype(name, dtype))
                continue
            num_bytes = weight.numel() * (dtype or weight.dtype).itemsize
            if bucket and (size + num_bytes > bucket_bytes or (dtype or weight.dtype) != (dtype or bucket[0][1].dtype)):
                yield from self._gather(bucket, dtype, merge)
                bucket, size = [], 0
            bucket.append((name, weight))
            size += num_bytes
        if bucket:
            yield from self._gather(bucket, dtype, merge)

    def digest(self, *, dtype: torch.dtype | None = None, form: WeightForm = "merged") -> dict[str, int]:
        self._need("digest", Part.WEIGHTS)
        dtype, factors = self._outgoing.dtype(dtype), self._whole(self._outgoing.factor_names())
        if form == "merged":
            return self._digests(self._state(form), dtype, self._outgoing.merging(factors))
        digests = named_digests(self._outgoing.factors(factors, dtype))
        return digests if form == "adapters" else digests | self._digests(self._state(), dtype, as_they_are)

    def _base_digest(self) -> dict[str, int]:
        frozen = {name: tensor for name, tensor in self._state().items() if name not in self._trained}
        return self._digests(frozen, None, as_they_are)

    def _digests(self, state: Mapping[str, Tensor], dtype: torch.dtype | None, merge: Merge) -> dict[str, int]:
        # Every rank hashes the rows it holds: digests of slices add up, so nothing is gathered but the digests.
        first_rows = {name: self._first_row(tensor) for name, tensor in state.items() if isinstance(tensor, DTensor)}
        offsets = {name: (first_row, *[0] * (state[name].ndim - 1)) for name, first_row in first_rows.items()}
        # A tensor that is the same on every rank counts once.
        here = {name: tensor for name, tensor in state.items() if name in offsets or self._ranks.rank == 0}
        rows = ((name, merge(name, local(tensor), first_rows.get(name, 0))) for name, tensor in here.items())
        mine = named_digests(
            ((name, convert(tensor, self._outgoing.buffer_dtype(name, dtype))) for name, tensor in rows), offsets
        )
        everyone = self._ranks.gather(mine, "add up the digests of the weights")
        return {name: combine_digests(part[name] for part in everyone if name in part) for name in state}

    def _take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        state = self._state()
        for name, tensor in named_tensors:
            rows = local(state[name])
            first = self._first_row(state[name]) if isinstance(state[name], DTensor) else 0
            rows.copy_(tensor[first : first + len(rows)] if rows.ndim else tensor)
        self._update_copies()

    def _first_row(self, weight: Tensor) -> int:
        """Return the index of the first row of a weight that this rank holds."""
        return self._ranks.rank * -(-weight.shape[0] // self._ranks.size)

    def _state(self, form: WeightForm = "apart") -> dict[str, Tensor]:
        """Return weights without adapters, then buffers that are saved, each once under its first name."""
        state = {plain: self._weights[name].detach() for name, plain in base_names(list(self._weights)).items()}
        return state | self._outgoing.buffers(form)

    def _gather(
        self, bucket: list[tuple[str, DTensor]], dtype: torch.dtype | None, merge: Merge
    ) -> Iterator[tuple[str, Tensor]]:
        """Gather all weights of a bucket at once.

        Rank r holds rows r·n to (r + 1)·n of each, n = ceil(rows / ranks).
        """
        size = self._ranks.size
        shapes = [(-(-weight.shape[0] // size), *weight.shape[1:]) for _, weight in bucket]
        counts = [math.prod(shape) for shape in shapes]
        send = torch.zeros(sum(counts), dtype=dtype or bucket[0][1].dtype, device=self._device)
        for (name, weight), place in zip(bucket, send.split(counts), strict=True):
            rows = merge(name, weight.to_local(), self._first_row(weight))
            place[: rows.numel()].copy_(rows.reshape(-1))
        received = send.new_empty(size, send.numel())
        _all_gather(received.view(-1), send)
        for (name, weight), shape, part in zip(bucket, shapes, received.split(counts, dim=1), strict=True):
            yield name, part.reshape(size * shape[0], *shape[1:])[: weight.shape[0]]

    def _whole(self, names: Collection[str]) -> dict[str, Tensor]:
        weights = {name: self._trained[name].detach() for name in names}
        sharded = [(name, weight) for name, weight in weights.items() if isinstance(weight, DTensor)]
        return weights | (dict(self._gather(sharded, None, as_they_are)) if sharded else {})

    def _shards(self) -> dict[str, Tensor]:
        return {name: local(weight.detach()) for name, weight in self._trained.items()}

    # --- on disk ------------------------------------------------------------------------------------------------------

    def _stored(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint holds, by name: weights, and the optimizer state of each.

        With adapters only trained weights are stored: the others are a hundred times as much, and are in the model's
        own files, which `load` compares by their digests.
        """
        trained = {name: weight.detach() for name, weight in self._trained.items()}
        stored = {
            f"weight.{name}": tensor for name, tensor in (trained if self._outgoing.adapters else self._state()).items()
        }
        if self._optimizer is not None:
            for name, weight in self._trained.items():
                for key, value in self._optimizer.state[weight].items():
                    stored[f"optimizer.{name}.{key}"] = value
        if self._average is not None:
            for name, shard in self._average.shards.items():
                stored[f"average.{name}"] = self._like(self._trained[name], shard)
        return stored

    def _after_loading(self) -> None:
        self._update_copies()

    def _like(self, weight: Tensor, shard: Tensor) -> Tensor:
        """Wrap a shard in host memory as this rank's part of a tensor that is sharded like `weight`."""
        if not isinstance(weight, DTensor):
            return shard
        return DTensor.from_local(
            shard, self._host_mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
        )

    def _drop(self) -> None:
        del self._wrapped, self._optimizer, self._weights, self._trained, self._masters


def _widen(model: PreTrainedModel) -> int:
    """Give weights that are trained 32 bits, and return the number of all that have them."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return sum(weight.numel() for weight in model.parameters() if weight.dtype == torch.float32)


def _shard(
    policy: nn.Module, model: PreTrainedModel, options: TrainOptions, device: torch.device, size: int, unit_bytes: int
) -> None:
    mesh = init_device_mesh(device.type, (size,))
    # Sums over ranks are taken in 32 bits, whatever the weights are.
    compute = torch.bfloat16 if options.precision == "bf16_master" else None
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in layers(model):
        if sum(weight.nbytes for weight in layer.parameters()) < unit_bytes:
            continue
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=size > 1)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Summed, not averaged; and by a plain sum, because gloo has no other.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reset_sharding(root: FSDPModule, *, by_hand: bool = False) -> None:
    """Reset FSDP on a single rank after a failed forward or backward, so that a forward can begin.

    by_hand: do not use torch's own way, which exists from 2.13.
    """
    groups = [group for module in root.modules() if isinstance(module, FSDPModule) for group in _groups(module)]
    if hasattr(root, "reset_iter_state") and not by_hand:
        root.reset_iter_state()
    else:
        _reset_states(root)
        for group in groups:
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._to_sharded()
    for group in groups:  # what earlier micro-batches of the update have summed
        for weight in group.fsdp_params:
            weight.unsharded_accumulated_grad = None
            if hasattr(weight, "_unsharded_param"):
                weight._unsharded_param.grad = None


def _groups(module: Any) -> list[Any]:
    """List groups of weights that are gathered together. torch 2.11 and 2.12 have at most one for each module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


def _reset_states(root: Any) -> None:
    idle = type(root._get_fsdp_state()._training_state).IDLE
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        state._training_state = idle
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.all_gather_state = None
        state._comm_ctx.post_forward_order.clear()
        if hasattr(state._comm_ctx, "reduce_scatter_states"):
            state._comm_ctx.reduce_scatter_states.clear()
        else:
            state._comm_ctx.reduce_scatter_state = None
        for group in _groups(module):
            group._training_state = idle
