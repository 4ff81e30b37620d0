"""The FSDP2 backend: torch's `fully_shard` over the ranks, a plain module where there is only one.

One rank in fp32 or bf16 has nothing to shard, gather or convert, so the model runs unwrapped: the same maths without
the hooks (which cost 8% on a small model), and the same bits in every run. With 16-bit compute from 32-bit weights even
one rank is wrapped, for the conversion.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from hotseat import faults
from hotseat.algorithms.digest import combine_digests, named_digests
from hotseat.errors import BatchError, NonFiniteError, RunError
from hotseat.train.attention import has_flash
from hotseat.train.backend import (
    PARTS,
    Loss,
    Outputs,
    Part,
    TrainOptions,
    UpdateReport,
    check_parts,
    check_temperature,
    needs_entropy,
)
from hotseat.train.logprobs import Compiler
from hotseat.train.packing import model_input
from hotseat.train.policy import layers, load_model, prepare_model
from hotseat.train.ranks import Ranks
from hotseat.train.residency import Shelf
from hotseat.types import MicroBatch, Moved

_KIND = {"backend": "fsdp", "format": 1}
_MAX_NAMED = 16  # samples in an error message
_LAST_WRITE_S = 5.0  # for a snapshot that is being written when the backend is closed

# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FSDPBackend:
    """One rank. See `Backend` for the contract.

    unit_bytes: a layer at least this large is gathered when its turn comes; smaller ones all at once, since for them
        the messages would cost more than the memory.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        options: TrainOptions,
        *,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        unit_bytes: int = 8 << 20,
        _compiler: Compiler = "inductor",
    ):
        self._options = options
        self._device = torch.device(device)
        loaded = load_model(model, torch.bfloat16 if options.precision == "bf16" else torch.float32, trust_remote_code)
        self._policy, self._layout = prepare_model(
            loaded,
            layout=options.layout,
            gradient_checkpointing=options.gradient_checkpointing,
            compiler=_compiler if _compiles(options, self._device) else None,
        )
        self._model = loaded
        self._saved_names = set(loaded.state_dict())
        self._ranks = Ranks(self._device, options.timeout_s, always_group=options.precision == "bf16_master")
        if self._ranks.size > 1 or options.precision == "bf16_master":
            _shard(self._policy, loaded, options, self._device, self._ranks.size, unit_bytes)
        else:
            self._policy.to(self._device)
        compute = torch.float32 if options.precision == "fp32" else torch.bfloat16
        self._has_flash = has_flash(self._device, compute)
        # Taken once: while a layer is gathered the model shows other tensors under the same names.
        self._weights = dict(loaded.named_parameters())
        self._trained = {name: weight for name, weight in self._weights.items() if weight.requires_grad}
        self._optimizer = None if options.optimizer is None else _adamw(self._trained, options)
        self._version = 0
        self._num_skipped = 0
        self._skipped_samples: list[tuple[str, ...]] = []  # of the last updates in a row that were not finite
        self._shelves: dict[Part, Shelf] = {part: Shelf(self._device) for part in PARTS}
        self._aside: set[Part] = set()
        self._is_halfway = False  # an update failed while it summed gradients
        self._writing: Future[None] | None = None  # of a snapshot
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def movable(self) -> frozenset[Part]:
        return frozenset(PARTS) if self._device.type == "cuda" else frozenset()

    def gather_facts(self, fact: Any, what: str) -> list[Any]:
        return self._ranks.gather(fact, what)

    # --- forward and backward -----------------------------------------------------------------------------------------

    def log_probs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        check_temperature(temperature)
        self._need("log_probs", "weights")
        found: list[tuple[Tensor, MicroBatch]] = []
        try:
            with torch.no_grad():
                for batch in self._in_step(micro_batches):
                    log_probs = self._forward(batch or _company(), temperature).log_probs
                    if batch is not None:
                        found.append((log_probs, batch))
        finally:
            # Without a backward some would keep their gathered weights, and use them after they have changed.
            for module in self._policy.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        # Only now: each copy waits until the device is done.
        each = iter([log_probs.to(batch.token_ids.device) for log_probs, batch in found])
        return [next(each) if batch.num_tokens > 0 else torch.zeros(0) for batch in micro_batches]

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> UpdateReport:
        check_temperature(temperature)
        self._need("update", "weights", "gradients", "optimizer")
        if self._optimizer is None:
            raise RunError("update of a model that was loaded without an optimizer, only to be scored")
        work = self._in_step(micro_batches)
        if not work:
            raise BatchError("update without a micro-batch on any rank: nothing to learn from")
        losses, metrics = self._backward(work, loss, temperature)
        gradients = [_local(weight.grad) for weight in self._trained.values() if weight.grad is not None]
        grad_norm = self._norm(gradients)
        mine: list[float] = torch.stack(losses).tolist() if losses else []
        facts = self._ranks.gather(
            {
                "loss": sum(mine),
                "metrics": _sum_metrics(metrics),
                "tokens": sum(batch.num_tokens for batch in micro_batches),
                "sampled": sum(int(batch.mask.sum()) for batch in micro_batches),
                "suspects": () if math.isfinite(sum(mine)) else _suspects(micro_batches, mine),
                "samples": () if math.isfinite(grad_norm) else _first_samples(micro_batches),
            },
            "add up the losses of an update",
        )
        step_loss = sum(fact["loss"] for fact in facts)
        learning_rate = self._options.schedule.learning_rate(self._version)
        faults.reach("update.middle")
        is_finite = math.isfinite(step_loss) and math.isfinite(grad_norm)
        if is_finite:
            self._step(gradients, grad_norm, learning_rate)
        self._optimizer.zero_grad(set_to_none=True)
        self._count(is_finite, step_loss, grad_norm, facts)
        return UpdateReport(
            version=self._version,
            loss=step_loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            is_skipped=not is_finite,
            num_skipped=self._num_skipped,
            num_tokens=sum(fact["tokens"] for fact in facts),
            num_sampled=sum(fact["sampled"] for fact in facts),
            metrics=_add_up([fact["metrics"] for fact in facts]),
        )

    def _backward(
        self, work: Sequence[MicroBatch | None], loss: Loss, temperature: float
    ) -> tuple[list[Tensor], list[Mapping[str, Tensor | float]]]:
        """Gradients summed over `work` and all ranks; the loss and metrics of each micro-batch of this rank."""
        losses, metrics = [], []
        # Until the last micro-batch gradients are kept where a failure would leave them for the next update.
        self._is_halfway = True
        for index, batch in enumerate(work):
            if index:
                faults.reach("update.micro-batch")
            if isinstance(self._policy, FSDPModule):
                self._policy.set_requires_gradient_sync(index == len(work) - 1)
            if batch is None:
                (self._forward(_company(), temperature).log_probs * 0.0).sum().backward()
                continue
            there = batch.to(self._device)  # before the forward, so that nothing waits for the forward's end
            outputs = self._forward(batch, temperature, needs_entropy(loss))
            total, sums = loss(outputs, there)
            if not total.requires_grad:
                raise RunError(
                    f"the loss {type(loss).__name__} has no gradient: compute it from the log_probs (or entropy) of its"
                    " first argument, without detach"
                )
            total.backward()
            losses.append(total.detach())
            metrics.append(sums)
        self._is_halfway = False
        return losses, metrics

    def _in_step(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch | None]:
        """This rank's micro-batches, then None until it has as many as the rank that has most."""
        real = [batch for batch in micro_batches if batch.num_tokens > 0]
        most = self._ranks.max(len(real), "agree on the number of micro-batches")
        return [*real, *[None] * (most - len(real))]

    def _forward(self, batch: MicroBatch, temperature: float, with_entropy: bool = False) -> Outputs:
        inputs = model_input(batch, self._layout, device=self._device, has_flash=self._has_flash)
        log_probs, entropy = self._policy(inputs, temperature, with_entropy)

        def flat(values: Tensor) -> Tensor:
            return values.new_zeros(batch.num_tokens).index_copy(0, inputs.tokens, values)

        return Outputs(flat(log_probs), None if entropy is None else flat(entropy))

    def _norm(self, gradients: list[Tensor]) -> float:
        squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
        total = squares.square_().sum()
        if self._ranks.size > 1:
            dist.all_reduce(total)
        return float(total.sqrt_())

    def _step(self, gradients: list[Tensor], grad_norm: float, learning_rate: float) -> None:
        assert self._optimizer is not None
        limit = self._options.max_grad_norm
        # The same small term as torch's own clipping has, so that a reference loop agrees to the last bits.
        if limit is not None and limit / (grad_norm + 1e-6) < 1:
            torch._foreach_mul_(gradients, limit / (grad_norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._version += 1

    def _count(self, is_finite: bool, loss: float, grad_norm: float, facts: list[dict[str, Any]]) -> None:
        if is_finite:
            self._skipped_samples = []
            return
        self._num_skipped += 1
        suspects = tuple(sample for fact in facts for sample in fact["suspects"])
        self._skipped_samples.append(suspects or tuple(sample for fact in facts for sample in fact["samples"]))
        if len(self._skipped_samples) < self._options.max_non_finite:
            return
        named = list(dict.fromkeys(sample for samples in self._skipped_samples for sample in samples))
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        raise NonFiniteError(
            f"{len(self._skipped_samples)} updates in a row were not finite (last: loss {loss}, gradient norm"
            f" {grad_norm}), after version {self._version}; samples: {', '.join(named[:_MAX_NAMED])}{more}. Look at"
            " their rewards and advantages, or lower the learning rate"
        )

    # --- residency ----------------------------------------------------------------------------------------------------

    def put_aside(self, parts: Collection[Part]) -> Moved:
        self._need("put_aside")
        check_parts(parts)
        moved = Moved(0, 0, 0.0)
        for part in (part for part in PARTS if part in parts and part not in self._aside):
            if part in self.movable:
                moved += self._shelves[part].put_aside(self._tensors(part))
            self._aside.add(part)
        return moved

    def bring_back(self, parts: Collection[Part]) -> Moved:
        self._need("bring_back")
        check_parts(parts)
        moved = Moved(0, 0, 0.0)
        for part in (part for part in PARTS if part in parts and part in self._aside):
            if part in self.movable:
                moved += self._shelves[part].bring_back()
            self._aside.remove(part)
        return moved

    def _tensors(self, part: Part) -> list[Tensor]:
        if part == "weights":
            return [_local(weight.detach()) for weight in self._weights.values()]
        if part == "gradients":
            return [_local(weight.grad) for weight in self._weights.values() if weight.grad is not None]
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        # A step count per weight is a few bytes, and too many to be worth moving.
        return [_local(value) for state in states for value in state.values() if value.ndim > 0]

    def _need(self, what: str, *parts: Part) -> None:
        if self._is_closed:
            raise RunError(f"{what} of a backend that is closed")
        if self._is_halfway and isinstance(self._policy, FSDPModule):
            raise RunError(f"{what} after an update that failed halfway: load the last checkpoint in a new process")
        if self._is_halfway and self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
            self._is_halfway = False
        missing = [part for part in parts if part in self._aside]
        if missing:
            raise RunError(f"{what} needs {' and '.join(missing)} on the device: bring them back first")

    # --- weights out --------------------------------------------------------------------------------------------------

    def weights(self, *, dtype: torch.dtype | None = None, bucket_bytes: int = 2**28) -> Iterator[tuple[str, Tensor]]:
        self._need("weights", "weights")
        return self._stream(dtype, bucket_bytes)

    def _stream(self, dtype: torch.dtype | None, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        bucket: list[tuple[str, DTensor]] = []
        size = 0
        for name, weight in self._state().items():
            if not isinstance(weight, DTensor):
                yield name, _convert(weight, dtype)
                continue
            num_bytes = weight.numel() * (dtype or weight.dtype).itemsize
            if bucket and (size + num_bytes > bucket_bytes or (dtype or weight.dtype) != (dtype or bucket[0][1].dtype)):
                yield from self._gather(bucket, dtype)
                bucket, size = [], 0
            bucket.append((name, weight))
            size += num_bytes
        if bucket:
            yield from self._gather(bucket, dtype)

    def digest(self, *, dtype: torch.dtype | None = None) -> dict[str, int]:
        self._need("digest", "weights")
        # Every rank hashes the rows it holds: digests of slices add up, so nothing is gathered but the digests.
        state, offsets = self._state(), {}
        for name, tensor in state.items():
            if isinstance(tensor, DTensor):
                first_row = self._ranks.rank * -(-tensor.shape[0] // self._ranks.size)
                offsets[name] = (first_row, *[0] * (tensor.ndim - 1))
        # What is the same on every rank counts once.
        here = {name: tensor for name, tensor in state.items() if name in offsets or self._ranks.rank == 0}
        mine = named_digests(((name, _convert(_local(tensor), dtype)) for name, tensor in here.items()), offsets)
        everyone = self._ranks.gather(mine, "add up the digests of the weights")
        return {name: combine_digests(part[name] for part in everyone if name in part) for name in state}

    def _state(self) -> dict[str, Tensor]:
        """Weights, then buffers that are saved, each once under its first name."""
        state = {name: weight.detach() for name, weight in self._weights.items()}
        return state | {name: buffer for name, buffer in self._model.named_buffers() if name in self._saved_names}

    def _gather(self, bucket: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """One all-gather for the whole bucket. Rank r holds rows r·n to (r + 1)·n of each, n = ceil(rows / ranks)."""
        size = self._ranks.size
        shapes = [(-(-weight.shape[0] // size), *weight.shape[1:]) for _, weight in bucket]
        counts = [math.prod(shape) for shape in shapes]
        send = torch.zeros(sum(counts), dtype=dtype or bucket[0][1].dtype, device=self._device)
        for (_, weight), place in zip(bucket, send.split(counts), strict=True):
            local = weight.to_local()
            place[: local.numel()].copy_(local.reshape(-1))
        received = send.new_empty(size, send.numel())
        _all_gather(received.view(-1), send)
        for (name, weight), shape, part in zip(bucket, shapes, received.split(counts, dim=1), strict=True):
            yield name, part.reshape(size * shape[0], *shape[1:])[: weight.shape[0]]

    # --- on disk ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        self._write(Path(directory), self._to_save("save"))

    def snapshot(self, directory: str | Path) -> None:
        state = self._to_save("snapshot")
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        writing: Future[None] = Future()

        def write() -> None:
            try:
                self._write(Path(directory), copied)
            except BaseException as error:  # torch's own is no `Exception`
                writing.set_exception(error)
            else:
                writing.set_result(None)
            finally:
                copied.clear()  # who keeps the future must not keep the memory

        self._writing = writing
        # Not a pool: its threads would be waited for when the interpreter ends, and a disk may hang.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    def is_written(self) -> bool:
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def _to_save(self, what: str) -> dict[str, Tensor]:
        """All that `save` writes: the live tensors, counters and random states."""
        self._need(what, "weights", "optimizer")
        if self._writing is not None:
            raise RunError(f"{what} while the snapshot before is being written: wait until `is_written` says it is")
        counters = {"version": self._version, "num_skipped": self._num_skipped}
        state = self._stored() | {f"counter.{name}": torch.tensor(value) for name, value in counters.items()}
        state[f"random.cpu.{self._ranks.rank}"] = torch.get_rng_state()
        if self._device.type == "cuda":
            state[f"random.cuda.{self._ranks.rank}"] = torch.cuda.get_rng_state(self._device)
        return state

    def _write(self, directory: Path, state: dict[str, Tensor]) -> None:
        if self._ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "backend.json").write_text(json.dumps(_KIND | {"num_ranks": self._ranks.size}) + "\n")
        self._ranks.wait_to_save("create the folder of a checkpoint")
        faults.reach("save.during")
        _alone_is_fine()
        dcp.save(state, checkpoint_id=directory, process_group=self._ranks.saving, no_dist=self._ranks.size == 1)

    def saved_bytes(self) -> int:
        return sum(_local(tensor).nbytes for tensor in self._stored().values())

    def load(self, directory: str | Path) -> None:
        self._need("load", "weights", "optimizer")
        directory = Path(directory)
        kind = _read_kind(directory)
        counters = {name: torch.tensor(0) for name in ("version", "num_skipped")}
        state = self._stored() | {f"counter.{name}": value for name, value in counters.items()}
        random: dict[str, Tensor] = {}
        # With another number of ranks nothing says which random state continues which: each rank goes on with its own.
        if kind["num_ranks"] == self._ranks.size:
            random["cpu"] = torch.get_rng_state()
            if self._device.type == "cuda":
                random["cuda"] = torch.cuda.get_rng_state(self._device)
            state |= {f"random.{kind}.{self._ranks.rank}": value for kind, value in random.items()}
        _alone_is_fine()
        try:
            dcp.load(state, checkpoint_id=directory, process_group=self._ranks.saving, no_dist=self._ranks.size == 1)
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items())
            raise RunError(f"{directory} does not fit this model and optimizer: {reasons}") from error
        self._version, self._num_skipped = int(counters["version"]), int(counters["num_skipped"])
        self._skipped_samples = []
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)

    def _stored(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint holds, by name: weights, and what the optimizer knows of each."""
        stored = {f"weight.{name}": tensor for name, tensor in self._state().items()}
        if self._optimizer is not None:
            for name, weight in self._trained.items():
                for key, value in self._optimizer.state[weight].items():
                    stored[f"optimizer.{name}.{key}"] = value
        return stored

    def export(self, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
        self._need("export", "weights")
        whole = {}
        for name, tensor in self.weights(dtype=dtype):
            if self._ranks.rank == 0:
                whole[name] = tensor.to("cpu", copy=True)
        if self._ranks.rank == 0:
            # Without weights of its own, and unsharded: only what it knows about names and files is wanted.
            with torch.device("meta"):
                shell = type(self._model)(copy.deepcopy(self._model.config)).to(dtype or _dtype(self._model))
            shell.generation_config = self._model.generation_config
            shell.save_pretrained(directory, state_dict=whole)
        self._ranks.wait("export the model")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._writing is not None:
            wait([self._writing], timeout=_LAST_WRITE_S)  # its folder may be removed next
        del self._policy, self._model, self._optimizer, self._weights, self._trained, self._shelves
        self._ranks.close()


def _compiles(options: TrainOptions, device: torch.device) -> bool:
    if options.compile is not None:
        return options.compile
    # Triton builds a small C library for each kernel.
    has_compiler = "CC" in os.environ or any(map(shutil.which, ("cc", "gcc", "clang")))
    return device.type == "cuda" and has_triton() and has_compiler


def _shard(
    policy: nn.Module,
    model: PreTrainedModel,
    options: TrainOptions,
    device: torch.device,
    size: int,
    unit_bytes: int,
) -> None:
    mesh = init_device_mesh(device.type, (size,))
    # Sums over ranks are taken in 32 bits, whatever the weights are.
    compute = {"fp32": None, "bf16": None, "bf16_master": torch.bfloat16}[options.precision]
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


def _adamw(weights: Mapping[str, nn.Parameter], options: TrainOptions) -> torch.optim.AdamW:
    assert options.optimizer is not None
    groups = [
        {
            "params": [weight for weight in weights.values() if weight.ndim >= 2],
            "weight_decay": options.optimizer.weight_decay,
        },
        {"params": [weight for weight in weights.values() if weight.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=options.optimizer.betas,
        eps=options.optimizer.eps,
        fused=True,
    )
    # Made here rather than in the first step: memory is then known from the start, and there is always something to
    # save, load and move.
    for weight in weights.values():
        optimizer.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(weight, requires_grad=False),
        }
    return optimizer


def _company() -> MicroBatch:
    """What a rank without work runs, so that the others are not alone in a collective.

    Of all that is counted, nothing is one and no two are equal: a compiler would take either for a rule.
    """
    return MicroBatch(
        token_ids=torch.zeros(13, dtype=torch.int64),
        offsets=torch.tensor([0, 4, 13]),
        mask=torch.arange(13) >= 11,
        weights=torch.zeros(13),
        sample_ids=("", ""),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _convert(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _dtype(model: PreTrainedModel) -> torch.dtype:
    return next(model.parameters()).dtype


def _sum_metrics(metrics: Sequence[Mapping[str, Tensor | float]]) -> dict[str, Any]:
    """Each metric's sum over micro-batches, with one transfer from the device."""
    values = [(name, value) for sums in metrics for name, value in sums.items()]
    tensors = [value.detach().double().reshape(-1) for _, value in values if isinstance(value, Tensor)]
    numbers = iter(torch.cat(tensors).tolist() if tensors else [])

    def number(value: Tensor | float) -> Any:
        if not isinstance(value, Tensor):
            return value
        return next(numbers) if value.ndim == 0 else [next(numbers) for _ in range(value.numel())]

    return _add_up([{name: number(value)} for name, value in values])


def _add_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in totals:
                totals[name] = value
            elif isinstance(value, list):
                totals[name] = [a + b for a, b in zip(totals[name], value, strict=True)]
            else:
                totals[name] = max(totals[name], value) if name.endswith("_max") else totals[name] + value
    return totals


def _suspects(micro_batches: Sequence[MicroBatch], losses: Sequence[float]) -> tuple[str, ...]:
    """Samples of the micro-batches whose loss is not finite: those with a value that is not, or else all."""
    found: list[str] = []
    real = [batch for batch in micro_batches if batch.num_tokens > 0]
    for batch, loss in zip(real, losses, strict=True):
        if math.isfinite(loss):
            continue
        is_bad = torch.zeros(batch.num_segments, dtype=torch.bool)
        segment = batch.layout.token_segment.cpu()
        for values in (batch.weights, *batch.fields.values()):
            bad = ~values.detach().cpu().double().isfinite().reshape(values.shape[0], -1).all(-1)
            is_bad[segment[bad] if values.shape[0] == batch.num_tokens else bad] = True
        chosen = is_bad.nonzero().squeeze(-1).tolist() or range(batch.num_segments)
        found += [batch.sample_ids[place] for place in chosen]
    return tuple(dict.fromkeys(found))


def _first_samples(micro_batches: Sequence[MicroBatch]) -> tuple[str, ...]:
    """All samples of this rank."""
    return tuple(dict.fromkeys(sample for batch in micro_batches for sample in batch.sample_ids))


def _alone_is_fine() -> None:
    """torch warns that one rank saves alone, which it was told.

    For good: `catch_warnings` changes what every thread sees, and a checkpoint may be written by one of several.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _read_kind(directory: Path) -> dict[str, Any]:
    try:
        kind: dict[str, Any] = json.loads((directory / "backend.json").read_text())
    except FileNotFoundError:
        raise RunError(f"{directory} holds no state of a training backend: it has no backend.json") from None
    if {key: kind.get(key) for key in _KIND} != _KIND:
        raise RunError(
            f"{directory} was saved by the {kind.get('backend')} backend, format {kind.get('format')}; this is"
            f" {_KIND['backend']}, format {_KIND['format']}: go on with the backend that wrote it"
        )
    return kind
