"""The DeepSpeed backend: ZeRO stages 0 to 3.

DeepSpeed shards, gathers and sums over ranks, and keeps masters and loss scale. What a step means stays ours: gradients
are summed and not averaged, whether a step is taken and how it is clipped is decided before DeepSpeed is called, and
checkpoints have the format of every backend.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hotseat.algorithms.adapters import WeightForm
from hotseat.algorithms.delta_rule import delta_nets
from hotseat.algorithms.digest import named_digests
from hotseat.algorithms.nf4 import quantise_layers
from hotseat.errors import UnsupportedError
from hotseat.placement.role_names import Part
from hotseat.train.adamw import make_adamw, set_learning_rate
from hotseat.train.attention import has_flash
from hotseat.train.average import MovingAverage
from hotseat.train.backend import TrainOptions, ZeroOptions
from hotseat.train.deepcompile import build_operations, check_device, compile_model, filled, forget_model
from hotseat.train.hooks import Gradients
from hotseat.train.logprobs import Compiler
from hotseat.train.lora import base_names
from hotseat.train.muon import MatrixStretch, MuonWithAdamW, matrix_names
from hotseat.train.outgoing import as_they_are, convert
from hotseat.train.packing import LayoutKind
from hotseat.train.policy_models import Model, Policy, ValueModel, compiles, layers, load_model, prepare_model
from hotseat.train.ranks import Ranks
from hotseat.train.sequence import check_ranks
from hotseat.train.tensor import Cut, TensorGroup, cut_layers
from hotseat.train.trainer import Trainer
from hotseat.train.zero_config import (
    COMPUTE,
    SCALE_STATE,
    check_zero,
    deepspeed_config,
    import_deepspeed,
    make_scaler,
    number_device,
)
from hotseat.train.zero_stages import Flattened, Scattered, ShardedWeights, Stage, Unsharded
from hotseat.types import MicroBatch

_BASE_BUCKET = 2**28  # bytes of a frozen base that are gathered at once, for its digest


class ZeroBackend(Trainer):
    """One rank of a model under DeepSpeed. See `Backend` for the contract.

    persistent_size: with stage 3, weights of at most so many elements are whole on every rank.
    """

    name = "deepspeed"
    optional_state = frozenset({"loss_scale"})  # that of another backend, or of another precision

    def __init__(
        self,
        model: Model,
        options: TrainOptions,
        *,
        device: str | torch.device = "cpu",
        persistent_size: int = 100_000,
        _compiler: Compiler = "inductor",
    ):
        zero = options.zero or ZeroOptions()
        device = torch.device(device)
        self.check(options)
        # A model that is only scored has no gradients to sum: its layers are compiled one by one.
        self._is_whole = zero.deepcompile and options.optimizer is not None
        self._deepspeed = self._prepare(zero, device)
        compute = COMPUTE[options.precision]
        # A frozen base is never stepped: more bits than it is computed with would be of no use.
        dtype = compute if options.precision == "bf16" or options.lora is not None else torch.float32
        loaded = load_model(model, options, dtype)
        if options.has_nf4:
            quantise_layers(loaded, device)
        has_compiler = compiles(options.compile, device) and zero.tensor_parallel_size == 1
        is_compiled = has_compiler and not options.liger_kernel and not self._is_whole
        self._wrapped, layout = self._wrap(loaded, options, device, _compiler if has_compiler else None)
        if options.has_nf4:  # ZeRO 3 takes parameters to the device, and no buffers
            for buffer in self._wrapped.buffers():
                buffer.data = buffer.data.to(device)
        if not dist.is_initialized():
            self._forget_groups()
        ranks = Ranks(device, options.timeout_s, always_group=True)
        self._deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        is_flash = has_flash(device, compute) and self._wrapped.has_plain_scores
        super().__init__(options, ranks, device, loaded, layout, is_flash)
        self._tensor: TensorGroup | None = None
        self._cuts: dict[str, Cut] = {}  # by name of the weight
        if zero.tensor_parallel_size > 1:
            self._tensor = TensorGroup(zero.tensor_parallel_size, options.timeout_s)
            self._cuts = cut_layers(loaded, self._tensor)
        self._weights = dict(loaded.named_parameters())
        shapes = {name: weight.shape for name, weight in self._weights.items()}  # on this rank, of those that are cut
        exact = {name: weight.detach() for name, weight in self._weights.items() if weight.requires_grad}
        if is_compiled and zero.stage == 3:
            # Gathered as a whole before its compiled code runs, not one by one in the middle of it.
            self._deepspeed.utils.set_z3_leaf_modules(self._wrapped, list({type(layer) for layer in layers(loaded)}))
        self._engine: Any = None  # DeepSpeed's; None: a model that is only scored and is not sharded
        self._optimizer: torch.optim.AdamW | None = None
        self._matrices: list[str] = []  # names of weights that Muon steps
        try:
            self._stage = self._shard(zero, persistent_size, is_compiled)
            pieces = self._stage.pieces(self._weights)
        except BaseException:
            if self._is_whole:
                forget_model()
            raise
        self._sharded = ShardedWeights(
            self._weights, shapes, pieces, self._cuts, self._tensor, device, self._stage.are_gradients_sharded
        )
        if isinstance(self._optimizer, MuonWithAdamW):
            self._bind_matrices(self._optimizer, shapes)
        if self._has_masters:
            self._fill_masters(exact)
        if options.average_decay is not None:
            self._average = MovingAverage(self._shards(), options.average_decay)

    @property
    def _compute(self) -> torch.dtype:
        return COMPUTE[self._options.precision]

    @property
    def _has_masters(self) -> bool:
        return self._options.optimizer is not None and self._options.precision in ("bf16_master", "fp16")

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        check_zero(options)

    def _prepare(self, zero: ZeroOptions, device: torch.device) -> Any:
        """Check what the machine and the number of ranks allow, and import DeepSpeed."""
        if zero.deepcompile:
            check_device(device.type == "cuda")
        check_ranks(zero.zpg, int(os.environ.get("WORLD_SIZE", "1")), "train.deepspeed.zpg")
        deepspeed = import_deepspeed(device)
        if self._is_whole:
            build_operations()
        return deepspeed

    def _wrap(
        self, model: PreTrainedModel, options: TrainOptions, device: torch.device, compiler: Compiler | None
    ) -> tuple[Policy | ValueModel, LayoutKind]:
        """Prepare the model for training, its layers compiled unless DeepSpeed compiles it as a whole."""
        if not self._is_whole:
            return prepare_model(model, options, device, compiler)
        if delta_nets(model):
            raise UnsupportedError(
                f"train.deepspeed.deepcompile is true, and {type(model).__name__} has layers with linear attention,"
                " which are not part of a graph: set it to false"
            )
        if options.layout == "auto":  # one graph has one layout, not the cheapest for each micro-batch
            options = replace(options, layout="packed")
        wrapped, layout = prepare_model(model, options, device)
        wrapped.compiler = compiler  # for logits, which are no part of the graph
        return wrapped, layout

    def _fill_masters(self, exact: Mapping[str, Tensor]) -> None:
        """Copy weights as they were loaded into masters, which DeepSpeed made of rounded ones."""
        for name, shard in self._shards().items():
            start = self._sharded.pieces[name].start
            shard.copy_(exact[name].view(-1)[start : start + shard.numel()])

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
            # Made before weights are sharded, because it asks for their dimensions.
            self._optimizer = self._make_optimizer(dict(zip(names, masters, strict=True)), options)
        for weight in self._weights.values():
            weight.data = weight.data.to(self._compute)
        if options.optimizer is None and zero.stage < 3:
            self._wrapped.to(self._device)
            return Unsharded([], [])
        num_elements = sum(map(Tensor.numel, trained))
        num_across = self._ranks.size // zero.tensor_parallel_size
        config = deepspeed_config(options, zero, num_across, num_elements, persistent_size, is_compiled, self._is_whole)
        if zero.stage == 3:
            # This takes one weight after the other; `initialize` would first take all of them to the device.
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
        return Unsharded(trained, masters, self._engine, self._optimizer, make_scaler(options))

    def _make_optimizer(self, masters: Mapping[str, Tensor], options: TrainOptions) -> torch.optim.AdamW:
        assert options.optimizer is not None
        if options.muon is None:
            cut = [id(master) for name, master in masters.items() if name in self._cuts]
            return make_adamw(masters.values(), options.optimizer, cut)
        self._matrices = matrix_names(self._model, {name: self._weights[name] for name in masters})
        others = [master for name, master in masters.items() if name not in self._matrices]
        return MuonWithAdamW([masters[name] for name in self._matrices], others, options.optimizer, options.muon)

    def _bind_matrices(self, optimizer: MuonWithAdamW, shapes: Mapping[str, torch.Size]) -> None:
        """Tell Muon where this rank's stretches of matrices are, also of those of which it has none."""
        stretches: dict[Tensor, list[MatrixStretch]] = {}
        for name in self._matrices:
            rows, columns = shapes[name]
            piece = self._sharded.pieces.get(name)
            owner = self._stage.owner(self._weights[name])
            stretch = MatrixStretch((rows, columns), 0, 0)
            if piece is not None:
                stretch = MatrixStretch((rows, columns), piece.start, piece.size, piece.offset)
            stretches.setdefault(owner, []).append(stretch)
        is_sharded = self._stage.are_gradients_sharded and self._ranks.size > 1
        optimizer.bind(stretches, is_sharded=is_sharded)

    # --- forward and backward -----------------------------------------------------------------------------------------

    def _module(self) -> nn.Module:
        # A process may hold several workers, each with an environment and groups of its own.
        number_device(self._device)
        self._set_groups(self._tensor)
        module: nn.Module = self._wrapped if self._engine is None else self._engine
        return module

    def _after_scoring(self) -> None:
        self._stage.release()

    def _model_batch(self, batch: MicroBatch) -> MicroBatch:
        return filled(batch) if self._is_whole else batch

    def _before_forward(self, is_last: bool) -> None:
        # Numbers of micro-batches differ from update to update, so DeepSpeed is not to count.
        self._engine.set_gradient_accumulation_boundary(is_last or self._is_whole)

    def _backward(self, total: Tensor, is_last: bool) -> None:
        self._stage.backward(total, is_last)

    def _gradients(self) -> Gradients:
        stage, shares = self._stage, None
        if self._tensor is not None:
            num_equal = 1 if stage.are_gradients_sharded else self._tensor.num_across
            are_cut = stage.are_of({id(self._weights[name]) for name in self._cuts})
            shares = [1 / (num_equal if is_cut else num_equal * self._tensor.size) for is_cut in are_cut]
        is_sharded = stage.are_gradients_sharded or self._tensor is not None
        return Gradients(stage.gradients(), is_sharded, stage.gradient_unit(), shares)

    def _step(self, grad_norm: float, learning_rate: float) -> None:
        assert self._optimizer is not None
        set_learning_rate(self._optimizer, learning_rate, self._muon_rate())
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

    def _can_continue(self) -> bool:
        return self._ranks.size == 1 and not self._is_whole

    def _abandon(self) -> None:
        self._stage.abandon()

    def fits(self, num_tokens: int, max_length: int, *, is_update: bool, with_entropy: bool = False) -> bool:
        if self._is_whole:
            return True  # what its compiler keeps of a trial could not be undone
        return super().fits(num_tokens, max_length, is_update=is_update, with_entropy=with_entropy)

    def warm_up(self, max_length: int) -> None:
        if not self._is_whole:
            super().warm_up(max_length)

    # --- residency ----------------------------------------------------------------------------------------------------

    def _tensors(self, part: Part) -> list[Tensor]:
        live = self._stage.live(self._weights)
        if part == Part.WEIGHTS:
            return [*live, *self._outgoing.packed()]
        if part == Part.GRADIENTS:
            return self._stage.gradient_memory()
        if self._optimizer is None:
            return []
        # Masters count as optimizer state, unless they are the weights themselves.
        weights = {tensor.untyped_storage().data_ptr() for tensor in live}
        masters = [owner for owner in self._stage.owners if owner.untyped_storage().data_ptr() not in weights]
        states = [value for owner in self._stage.owners for value in self._optimizer.state[owner].values()]
        tensors = [tensor.detach() for tensor in (*masters, *states) if tensor.ndim > 0]
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

    # --- weights out --------------------------------------------------------------------------------------------------

    def _stream(self, dtype: torch.dtype | None, bucket_bytes: int, form: WeightForm) -> Iterator[tuple[str, Tensor]]:
        dtype = self._outgoing.dtype(dtype)
        # Beside NF4 it is an export that merges, in the type of the computation.
        is_exact = self._has_masters and (dtype != self._compute or (form == "merged" and bool(self._outgoing.nf4)))
        if is_exact:
            self._need("weights in another type than that of the computation", Part.OPTIMIZER)
        factors = self._sharded.copies(self._outgoing.factor_names(), is_exact)
        if form != "merged":
            yield from self._outgoing.factors(factors, dtype)
        if form == "adapters":
            return
        merge = self._outgoing.merging(factors) if form == "merged" else as_they_are
        plain = base_names(list(self._weights))
        num_bytes = (torch.float32 if is_exact else dtype or self._compute).itemsize
        for bucket in self._sharded.buckets(plain, num_bytes, bucket_bytes):
            for name, weight in self._sharded.gather(bucket, is_exact):
                yield plain[name], convert(merge(plain[name], weight, 0), dtype)
        for name, buffer in self._outgoing.buffers(form).items():
            yield name, convert(merge(name, buffer, 0), self._outgoing.buffer_dtype(name, dtype))

    def _whole(self, names: Collection[str]) -> dict[str, Tensor]:
        if self._has_masters:
            self._need("weights with all their bits", Part.OPTIMIZER)
        return self._sharded.copies(names, self._has_masters)

    def _shards(self) -> dict[str, Tensor]:
        self._need("what is trained", Part.OPTIMIZER)
        pieces = self._sharded.pieces.items()
        return {name: piece.of(piece.owner) for name, piece in pieces if self._weights[name].requires_grad}

    def _take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        buffers = self._outgoing.buffers()
        for name, tensor in named_tensors:
            if name in buffers:
                buffers[name].copy_(tensor)
            else:
                self._sharded.replace(name, tensor)
        self._stage.refresh()

    def digest(self, *, dtype: torch.dtype | None = None, form: WeightForm = "merged") -> dict[str, int]:
        self._need("digest", Part.WEIGHTS)
        return named_digests(self.weights(dtype=dtype, form=form))

    def _base_digest(self) -> dict[str, int]:
        plain = base_names([name for name, weight in self._weights.items() if not weight.requires_grad])
        buckets = self._sharded.buckets(plain, self._compute.itemsize, _BASE_BUCKET)
        weights = (weight for bucket in buckets for weight in self._sharded.gather(bucket, is_exact=False))
        digests = named_digests((plain[name], weight) for name, weight in weights)
        return digests | named_digests(self._outgoing.buffers().items())

    # --- on disk ------------------------------------------------------------------------------------------------------

    def _stored(self) -> dict[str, Tensor]:
        """Return the same tensors as `FSDPBackend._stored`, as stretches of flattened ones."""
        stored: dict[str, Tensor] = {}
        fragment = self._sharded.fragment
        if not self._outgoing.adapters:
            stored = {f"weight.{name}": buffer for name, buffer in self._outgoing.buffers().items()}
        for name, piece in self._sharded.pieces.items():
            is_trained = self._weights[name].requires_grad
            if is_trained or not self._outgoing.adapters:
                stored[f"weight.{name}"] = fragment(name, piece.of(piece.owner))
            if self._optimizer is None or not is_trained:
                continue
            for key, value in self._optimizer.state[piece.owner].items():
                stored[f"optimizer.{name}.{key}"] = value if value.ndim == 0 else fragment(name, piece.of(value))
        if self._average is not None:
            for name, shard in self._average.shards.items():
                stored[f"average.{name}"] = fragment(name, shard)
        if self._stage.scaler is not None:
            stored["loss_scale"] = torch.tensor([float(getattr(self._stage.scaler, name)) for name in SCALE_STATE])
        return stored

    def _restore(self, state: Mapping[str, Tensor]) -> None:
        if "loss_scale" in state:
            for name, value in zip(SCALE_STATE, state["loss_scale"].tolist(), strict=True):
                setattr(self._stage.scaler, name, value if name == "cur_scale" else int(value))

    def _after_loading(self) -> None:
        self._stage.refresh()

    def close(self) -> None:
        super().close()
        if not dist.is_initialized():
            self._forget_groups()

    def _forget_groups(self) -> None:
        """Make DeepSpeed forget process groups that no longer exist."""
        self._deepspeed.utils.groups._release_process_group_references()

    def _set_groups(self, tensor: TensorGroup | None) -> None:
        """Set the global in which DeepSpeed looks up process groups, also between calls."""
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
        del self._wrapped, self._engine, self._optimizer, self._weights, self._sharded, self._stage
