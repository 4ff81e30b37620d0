"""The DeepSpeed backend: ZeRO stages 0 to 3.

DeepSpeed shards, gathers and sums over ranks, and keeps masters and loss scale. What a step means stays ours: gradients
are summed and not averaged, whether a step is taken and how it is clipped is decided before DeepSpeed hears of it, and
checkpoints have the format of every backend.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from transformers import PreTrainedModel

from hotseat.algorithms.digest import named_digests
from hotseat.errors import NotBuiltError, RunError, UserError
from hotseat.train.adamw import make_adamw, set_learning_rate
from hotseat.train.attention import has_flash
from hotseat.train.average import MovingAverage
from hotseat.train.backend import Part, Precision, TrainOptions, ZeroOptions
from hotseat.train.deepcompile import (
    build_operations,
    check_deepcompile,
    check_device,
    compile_model,
    filled,
    forget_model,
)
from hotseat.train.fragments import Fragment
from hotseat.train.logprobs import Compiler
from hotseat.train.lora import base_names
from hotseat.train.models import compiles, layers, load_model, prepare_model
from hotseat.train.ranks import Ranks
from hotseat.train.sequence import check_ranks
from hotseat.train.tensor import TENSOR_PARALLEL_SIZE, Cut, TensorGroup, cut_layers
from hotseat.train.trainer import Trainer, convert
from hotseat.train.zero_stages import Flattened, Scattered, Stage, Unsharded
from hotseat.types import MicroBatch

HINT = "install it with `pip install hotseat[deepspeed]`, or set train.backend to fsdp"

_COMPUTE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16_master": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BASE_BUCKET = 2**28  # bytes of a frozen base that are gathered at once, for its digest
_MAX_BUCKET = 500_000_000  # elements that are summed over ranks at once: DeepSpeed's own number
# Of the loss, in fp16: DeepSpeed's own numbers. The second overflow in a row and all after it halve the scale.
_SCALE = {
    "init_scale": 2**16,
    "scale_window": 1000,
    "delayed_shift": 2,
    "min_scale": 1,
    "consecutive_hysteresis": False,
}
_SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeroBackend(Trainer):
    """One rank. See `Backend` for the contract.

    persistent_size: with stage 3, weights of at most so many elements are whole on every rank.
    """

    name = "deepspeed"

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        options: TrainOptions,
        *,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        persistent_size: int = 100_000,
        _compiler: Compiler = "inductor",
    ):
        zero = options.zero or ZeroOptions()
        device = torch.device(device)
        self.check(options)
        # A model that is only scored has no gradients to sum: its layers are compiled one by one.
        self._is_whole = zero.deepcompile and options.optimizer is not None
        if zero.deepcompile:
            check_device(device.type == "cuda")
        check_ranks(zero.zpg, int(os.environ.get("WORLD_SIZE", "1")), "train.deepspeed.zpg")
        self._deepspeed = _import_deepspeed(device)
        if self._is_whole:
            build_operations()
        compute = _COMPUTE[options.precision]
        # A frozen base is never stepped: more bits than it is computed with would be of no use.
        dtype = compute if options.precision == "bf16" or options.lora is not None else torch.float32
        loaded = load_model(model, options, dtype, trust_remote_code)
        has_compiler = compiles(options.compile, device) and zero.tensor_parallel_size == 1
        is_compiled = has_compiler and not options.liger_kernel and not self._is_whole
        self._wrapped, layout = prepare_model(
            loaded,
            head=options.head,
            # Whole, it is to be one graph, not the cheapest for each micro-batch.
            layout="packed" if self._is_whole and options.layout == "auto" else options.layout,
            gradient_checkpointing=options.gradient_checkpointing,
            compiler=_compiler if has_compiler and not self._is_whole else None,
            lora=options.lora,
            liger_on=device if options.liger_kernel else None,
        )
        if self._is_whole and has_compiler:
            self._wrapped.compiler = _compiler  # for logits, which are no part of the graph
        self._saved_names = set(loaded.state_dict())
        if not dist.is_initialized():
            self._forget_groups()
        ranks = Ranks(device, options.timeout_s, always_group=True)
        self._deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        is_flash = has_flash(device, compute) and self._wrapped.has_plain_scores
        super().__init__(options, ranks, device, loaded, layout, is_flash)
        self._compute = compute
        self._tensor: TensorGroup | None = None
        self._cuts: dict[str, Cut] = {}  # by name of the weight
        if zero.tensor_parallel_size > 1:
            self._tensor = TensorGroup(zero.tensor_parallel_size, options.timeout_s)
            self._cuts = cut_layers(loaded, self._tensor)
        self._has_masters = options.optimizer is not None and options.precision in ("bf16_master", "fp16")
        self._weights = dict(loaded.named_parameters())
        self._shapes = {name: weight.shape for name, weight in self._weights.items()}  # here, of those that are cut
        exact = {name: weight.detach() for name, weight in self._weights.items() if weight.requires_grad}
        if is_compiled and zero.stage == 3:
            # Gathered as a whole before its compiled code runs, not one by one in the middle of it.
            self._deepspeed.utils.set_z3_leaf_modules(self._wrapped, list({type(layer) for layer in layers(loaded)}))
        self._engine: Any = None  # DeepSpeed's; None: a model that is only scored and is not sharded
        self._optimizer: torch.optim.AdamW | None = None
        try:
            self._stage = self._shard(zero, persistent_size, is_compiled)
            self._pieces = self._stage.pieces(self._weights)
        except BaseException:
            if self._is_whole:
                forget_model()
            raise
        for name, shard in self._shards().items() if self._has_masters else ():
            # DeepSpeed made it of a weight that had been rounded.
            start = self._pieces[name].start
            shard.copy_(exact[name].view(-1)[start : start + shard.numel()])
        if options.average_decay is not None:
            self._average = MovingAverage(self._shards(), options.average_decay)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """What DeepSpeed would refuse by an assertion, or not at all."""
        zero = options.zero or ZeroOptions()
        wanted, compute = zero.grad_accum_dtype, _NAMES[_COMPUTE[options.precision]]
        is_wider = zero.stage >= 2 or (zero.stage == 1 and compute == "fp16")
        if wanted not in (None, compute) and not (wanted == "fp32" and is_wider):
            raise NotBuiltError(
                f"gradients of a {compute} computation summed in {wanted} with ZeRO stage {zero.stage}: leave"
                f" grad_accum_dtype unset for {compute}, or choose fp32 with stage 2 or 3"
            )
        if zero.adam_offload and options.precision == "bf16":
            raise NotBuiltError(
                "adam_offload of weights in pure bf16, for which DeepSpeed needs an optimizer of its own: set"
                " train.fp32_master to true"
            )
        if zero.tensor_parallel_size > 1:
            _check_tensor(options, zero.tensor_parallel_size)
        if zero.deepcompile:
            check_deepcompile(options, zero)

    def _shard(self, zero: ZeroOptions, persistent_size: int, is_compiled: bool) -> Stage:
        options = self._options
        names = [name for name, weight in self._weights.items() if weight.requires_grad]
        trained = [self._weights[name] for name in names]
        masters: list[Tensor] = [*trained]
        if zero.stage == 0 and self._has_masters:
            masters = [
                weight.detach().to(self._device, torch.float32, copy=True).requires_grad_() for weight in trained
            ]
        if options.optimizer is not None:
            # Before weights are sharded: it asks for their dimensions.
            cut = [id(master) for name, master in zip(names, masters, strict=True) if name in self._cuts]
            self._optimizer = make_adamw(masters, options.optimizer, cut)
        for weight in self._weights.values():
            weight.data = weight.data.to(self._compute)
        if options.optimizer is None and zero.stage < 3:
            self._wrapped.to(self._device)
            return Unsharded([], [])
        num_elements = sum(map(Tensor.numel, trained))
        num_across = self._ranks.size // zero.tensor_parallel_size
        config = _config(options, zero, num_across, num_elements, persistent_size, is_compiled, self._is_whole)
        if zero.stage == 3:
            # One weight after the other; below, DeepSpeed would first take all of them to the device.
            self._deepspeed.zero.Init(module=self._wrapped, config_dict_or_path=config, dtype=self._compute)
        self._set_groups(self._tensor)
        self._engine, *_ = self._deepspeed.initialize(
            model=self._wrapped, optimizer=self._optimizer, config=config, mpu=self._tensor
        )
        kept = compile_model(self._engine, self._wrapped, self._ranks.size) if self._is_whole else []
        if zero.stage == 3:
            return Scattered(self._engine, zero.adam_offload, self._ranks.rank, self._ranks.size)
        if zero.stage > 0:
            num_averaged = self._ranks.size if self._is_whole else 1
            return Flattened(self._engine, zero.adam_offload, num_averaged, kept)
        assert self._optimizer is not None
        return Unsharded(trained, masters, self._engine, self._optimizer, _make_scaler(options))

    # --- forward and backward -----------------------------------------------------------------------------------------

    def _module(self) -> nn.Module:
        # A process may hold several workers, each with an environment and groups of its own.
        _number_device(self._device)
        self._set_groups(self._tensor)
        module: nn.Module = self._wrapped if self._engine is None else self._engine
        return module

    def _after_scoring(self) -> None:
        self._stage.release()

    def _given(self, batch: MicroBatch) -> MicroBatch:
        return filled(batch) if self._is_whole else batch

    def _before_forward(self, is_last: bool) -> None:
        # Numbers of micro-batches differ from update to update, so DeepSpeed is not to count.
        self._engine.set_gradient_accumulation_boundary(is_last or self._is_whole)

    def _backward(self, total: Tensor, is_last: bool) -> None:
        self._stage.backward(total, is_last)

    def _gradients(self) -> list[Tensor]:
        return self._stage.gradients()

    def _gradient_unit(self) -> float:
        return self._stage.gradient_unit()

    def _are_gradients_sharded(self) -> bool:
        return self._stage.are_gradients_sharded or self._tensor is not None

    def _counted(self) -> list[float] | None:
        if self._tensor is None:
            return None
        num_equal = 1 if self._stage.are_gradients_sharded else self._tensor.num_across
        are_cut = self._stage.are_of({id(self._weights[name]) for name in self._cuts})
        return [1 / (num_equal if is_cut else num_equal * self._tensor.size) for is_cut in are_cut]

    def _step(self, grad_norm: float, learning_rate: float) -> None:
        assert self._optimizer is not None
        set_learning_rate(self._optimizer, learning_rate)
        self._stage.step(self._clip_factor(grad_norm) * self._stage.gradient_unit())

    def _lower_loss_scale(self) -> bool:
        scaler = self._stage.scaler
        if scaler is None or scaler.cur_scale <= scaler.min_scale:
            return False
        scaler.update_scale(True)
        return True

    def _forget_gradients(self) -> None:
        if self._optimizer is not None:
            self._stage.forget_gradients()

    def _can_go_on(self) -> bool:
        return self._ranks.size == 1 and not self._is_whole

    def _abandon(self) -> None:
        self._stage.abandon()

    def fits(self, num_tokens: int, max_length: int, *, is_update: bool, with_entropy: bool = False) -> bool:
        if self._is_whole:
            return True  # what its compiler keeps of a trial could not be undone
        return super().fits(num_tokens, max_length, is_update=is_update, with_entropy=with_entropy)

    # --- residency ----------------------------------------------------------------------------------------------------

    def _tensors(self, part: Part) -> list[Tensor]:
        live = self._stage.live(self._weights)
        if part == "weights":
            return live
        if part == "gradients":
            return self._stage.gradient_memory()
        if self._optimizer is None:
            return []
        # Masters count as optimizer state, unless they are the weights themselves.
        weights = {tensor.untyped_storage().data_ptr() for tensor in live}
        masters = [owner for owner in self._stage.owners if owner.untyped_storage().data_ptr() not in weights]
        states = [value for owner in self._stage.owners for value in self._optimizer.state[owner].values()]
        found = [tensor.detach() for tensor in (*masters, *states) if tensor.ndim > 0]
        return [tensor for tensor in found if tensor.device.type == self._device.type]

    # --- weights out --------------------------------------------------------------------------------------------------

    def _stream(self, dtype: torch.dtype | None, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        dtype = self._outward(dtype)
        is_exact = self._has_masters and dtype != self._compute
        if is_exact:
            self._need("weights in another type than that of the computation", "optimizer")
        merge = self._merging(self._copies(self._factor_names(), is_exact))
        plain = base_names(list(self._weights))
        num_bytes = (torch.float32 if is_exact else dtype or self._compute).itemsize
        for bucket in self._buckets(plain, num_bytes, bucket_bytes):
            for name, weight in self._gather(bucket, is_exact):
                yield plain[name], convert(merge(plain[name], weight, 0), dtype)
        for name, buffer in self._saved_buffers().items():
            yield name, convert(buffer, self._type_of(name, dtype))

    def _gather(self, names: Collection[str], is_exact: bool) -> Iterator[tuple[str, Tensor]]:
        """Together. Whole weights, each to be read before the next comes; masters of what is trained, if exact."""
        for name, weight in self._gather_parts(names, is_exact):
            cut = self._cuts.get(name)
            yield name, weight if cut is None or self._tensor is None else self._tensor.gather(weight, cut)

    def _gather_parts(self, names: Collection[str], is_exact: bool) -> Iterator[tuple[str, Tensor]]:
        """The same; of weights that are cut, this rank's part."""
        masters = [name for name in names if is_exact and self._weights[name].requires_grad]
        live = [name for name in names if not (is_exact and self._weights[name].requires_grad)]
        with self._deepspeed.zero.GatheredParameters([self._weights[name] for name in live]):
            for name in live:
                yield name, self._weights[name].detach()
        counts = [math.prod(self._shapes[name]) for name in masters]
        # Every element is on one rank and zero elsewhere; a sum of integers keeps its bits.
        whole = torch.zeros(sum(counts), dtype=torch.float32, device=self._device)
        places = dict(zip(masters, whole.split(counts), strict=True))
        for name, place in places.items():
            piece = self._pieces.get(name)
            if piece is not None:
                place[piece.start : piece.start + piece.size] = piece.of(piece.owner)
        if masters and self._ranks.size > 1 and self._stage.are_gradients_sharded:
            dist.all_reduce(whole.view(torch.int32), group=None if self._tensor is None else self._tensor.across)
        for name, place in places.items():
            yield name, place.view(self._shapes[name])

    def _copies(self, names: Collection[str], is_exact: bool) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self._gather(names, is_exact)}

    def _whole(self, names: Collection[str]) -> dict[str, Tensor]:
        if self._has_masters:
            self._need("weights with all their bits", "optimizer")
        return self._copies(names, self._has_masters)

    def _shards(self) -> dict[str, Tensor]:
        self._need("what is trained", "optimizer")
        pieces = self._pieces.items()
        return {name: piece.of(piece.owner) for name, piece in pieces if self._weights[name].requires_grad}

    def _buckets(self, names: Iterable[str], num_bytes: int, bucket_bytes: int) -> Iterator[list[str]]:
        """Names of weights that go together, of so many bytes per element."""
        bucket: list[str] = []
        size = 0
        for name in names:
            needed = math.prod(self._shapes[name]) * num_bytes
            if bucket and size + needed > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += needed
        if bucket:
            yield bucket

    def _saved_buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._model.named_buffers() if name in self._saved_names}

    def _take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        buffers = self._saved_buffers()
        for name, tensor in named_tensors:
            if name in buffers:
                buffers[name].copy_(tensor)
            elif name in self._pieces:
                piece, cut = self._pieces[name], self._cuts.get(name)
                tensor = tensor if cut is None else cut.of(tensor)
                piece.of(piece.owner).copy_(tensor.reshape(-1)[piece.start : piece.start + piece.size])
        self._stage.refresh()

    def digest(self, *, dtype: torch.dtype | None = None) -> dict[str, int]:
        self._need("digest", "weights")
        return named_digests(self.weights(dtype=dtype))

    def _base_digest(self) -> dict[str, int]:
        plain = base_names([name for name, weight in self._weights.items() if not weight.requires_grad])
        buckets = self._buckets(plain, self._compute.itemsize, _BASE_BUCKET)
        weights = (weight for bucket in buckets for weight in self._gather(bucket, is_exact=False))
        found = named_digests((plain[name], weight) for name, weight in weights)
        return found | named_digests(self._saved_buffers().items())

    # --- on disk ------------------------------------------------------------------------------------------------------

    def _stored(self) -> dict[str, Tensor]:
        """What `FSDPBackend` stores, in stretches."""
        stored: dict[str, Tensor] = {}
        if not self._adapters:
            stored = {f"weight.{name}": buffer for name, buffer in self._saved_buffers().items()}
        for name, piece in self._pieces.items():
            is_trained = self._weights[name].requires_grad
            if is_trained or not self._adapters:
                stored[f"weight.{name}"] = self._fragment(name, piece.of(piece.owner))
            if self._optimizer is None or not is_trained:
                continue
            for key, value in self._optimizer.state[piece.owner].items():
                stored[f"optimizer.{name}.{key}"] = value if value.ndim == 0 else self._fragment(name, piece.of(value))
        if self._average is not None:
            for name, shard in self._average.shards.items():
                stored[f"average.{name}"] = self._fragment(name, shard)
        if self._stage.scaler is not None:
            stored["loss_scale"] = torch.tensor([float(getattr(self._stage.scaler, name)) for name in _SCALE_STATE])
        return stored

    def _fragment(self, name: str, stretch: Tensor) -> Fragment:
        start, cut = self._pieces[name].start, self._cuts.get(name)
        if cut is None:
            return Fragment(stretch, self._shapes[name], start)
        return Fragment(stretch, cut.whole, start, cut.part, cut.shift)

    def _read(self, directory: Path, state: dict[str, Tensor]) -> None:
        scale = state.pop("loss_scale", None)
        if scale is not None and "loss_scale" in dcp.FileSystemReader(directory).read_metadata().state_dict_metadata:
            state["loss_scale"] = scale
        super()._read(directory, state)
        if "loss_scale" in state:
            for name, value in zip(_SCALE_STATE, state["loss_scale"].tolist(), strict=True):
                setattr(self._stage.scaler, name, value if name == "cur_scale" else int(value))

    def _after_loading(self) -> None:
        self._stage.refresh()

    def close(self) -> None:
        super().close()
        if not dist.is_initialized():
            self._forget_groups()

    def _forget_groups(self) -> None:
        """DeepSpeed remembers groups of which nothing is left."""
        self._deepspeed.utils.groups._release_process_group_references()

    def _set_groups(self, tensor: TensorGroup | None) -> None:
        """DeepSpeed looks them up in a global, again and again."""
        self._deepspeed.utils.groups.mpu = tensor

    def _drop(self) -> None:
        try:
            self._stage.destroy()
        finally:
            if self._is_whole:
                forget_model()
        self._set_groups(None)
        if self._tensor is not None:
            self._tensor.close()
        del self._wrapped, self._engine, self._optimizer, self._weights, self._pieces, self._stage


def _check_tensor(options: TrainOptions, size: int) -> None:
    """What does not go together with layers that are cut."""
    given = f"{TENSOR_PARALLEL_SIZE} is {size}"
    if options.sequence_parallel_size > 1:
        raise NotBuiltError(
            f"{given} and train.sequence_parallel_size {options.sequence_parallel_size}: ranks share either layers or"
            " sequences; set one of the two to 1"
        )
    if options.lora is not None:
        raise NotBuiltError(
            f"{given}, and adapters beside layers that are cut are not built in: set train.lora.rank to"
            " 0, or the size to 1"
        )
    if options.compile:
        raise NotBuiltError(
            f"{given} and train.compile is true, but layers that are cut are not compiled: leave train.compile unset"
        )
    if options.liger_kernel:
        raise NotBuiltError(
            f"{given} and train.liger_kernel is true, but layers that are cut run without Liger's kernels: set"
            " train.liger_kernel to false"
        )


def _import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _number_device(device)
    try:
        import deepspeed
        import deepspeed.accelerator
    except ImportError as error:
        raise UserError(f"the DeepSpeed backend: {error}; {HINT}") from None
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise RunError(
            f"DeepSpeed in this process is set to {found} and cannot train on {device.type}: start training in a"
            " process of its own"
        )
    if device.type == "cpu":
        # It asks whether there are kernels for it that are fast; torch has others everywhere.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # On CPUs it would first compile collectives of its own, for minutes; gloo has them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It calls them by names that torch 2.13 has others for.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    return deepspeed


def _number_device(device: torch.device) -> None:
    """DeepSpeed reads the number of the process's device from the environment, again and again."""
    if device.type == "cpu":
        os.environ.setdefault("LOCAL_RANK", "0")
    else:
        index = torch.cuda.current_device() if device.index is None else device.index
        os.environ["LOCAL_RANK"] = str(index)


def _config(
    options: TrainOptions,
    zero: ZeroOptions,
    num_ranks: int,
    num_elements: int,
    persistent_size: int,
    is_compiled: bool,
    is_whole: bool,
) -> dict[str, Any]:
    """DeepSpeed's. Batch sizes are a formality: it is told which micro-batch is the last."""
    sharding: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": zero.overlap_comm,
        "reduce_bucket_size": max(1, min(num_elements, _MAX_BUCKET)),
    }
    if zero.stage == 3:
        sharding |= {
            "stage3_param_persistence_threshold": persistent_size,
            "zero_hpz_partition_size": zero.zpg,
            # Its own linear layers look up the number of each weight: compiled code would be made anew for every layer.
            "memory_efficient_linear": not (is_compiled or is_whole),
        }
    if zero.adam_offload:
        sharding["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    elif zero.stage in (1, 2):
        sharding["compute_grad_norm"] = False  # it is known by then
    config: dict[str, Any] = {
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "mean" if zero.stage == 3 or is_whole else "sum",  # neither of the two can sum
        "gradient_clipping": 0.0,
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW steps host memory too, and needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},
        "compile": {"deepcompile": is_whole},
    }
    if zero.stage == 0:
        return config
    if zero.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": zero.grad_accum_dtype}
        config["communication_data_type"] = zero.grad_accum_dtype
    if options.precision in ("bf16", "bf16_master"):
        is_pure = options.precision == "bf16" and options.optimizer is not None
        config["bf16"] = {
            "enabled": True,
            "check_grad_overflow": False,  # as above
            "bf16_master_weights_and_grads": is_pure,
            "bf16_optimizer_states": is_pure,
        }
    if options.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": int(math.log2(_SCALE["init_scale"])),
            "loss_scale_window": _SCALE["scale_window"],
            "hysteresis": _SCALE["delayed_shift"],
            "min_loss_scale": _SCALE["min_scale"],
        }
    return config


def _make_scaler(options: TrainOptions) -> Any:
    if options.precision != "fp16":
        return None
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(**_SCALE)
