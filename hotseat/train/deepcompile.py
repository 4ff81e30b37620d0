"""DeepSpeed's compiler of whole models (DeepCompile), on CUDA devices.

Gathering weights and summing gradients over ranks become operations of the compiled graph.

Its caller has to see to four things:

- A model must be one graph. Gradients of code outside of it would not be summed over ranks: torch is set to raise.
- Each graph counts for itself which gradients it has added to, so that two graphs in one update would overwrite each
  other's. Here every micro-batch is a whole of its own, and `zero_stages` adds them up.
- It mistakes a second graph of the same code for the first. Scoring is therefore compiled from separate code; and sizes
  are symbols from the first call, so that there is one graph for all of them, except for sizes of 0 and 1, which do not
  come here. Where weights are sharded it makes constants of sizes again, which is undone.
- Compiled, the gradients of an embedding may be added up in any order, and two runs differ in the last bits: a plain
  embedding of tokens is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

from hotseat.errors import RunError, UnsupportedError, UserError
from hotseat.train.backend import TrainOptions, ZeroOptions
from hotseat.train.packing import filler_batch, join
from hotseat.train.policy_models import mark_sizes
from hotseat.types import MicroBatch

KEY = "train.deepspeed.deepcompile"
# DeepSpeed's passes gather and release weights, and after so many updates also gather them ahead of time. The pass that
# keeps gathered weights is left out: it would keep them on the device while other roles use it.
_WARM_UP = 5


def check_deepcompile(options: TrainOptions, zero: ZeroOptions) -> None:
    """Raise if an option is set that does not go together with DeepCompile."""
    without = {
        "a stage that shards nothing": (zero.stage == 0, "set train.deepspeed.zero_stage to 1, 2 or 3"),
        "adapters": (options.lora is not None, "set train.lora.rank to 0"),
        "an optimizer in host memory": (zero.adam_offload, "set train.deepspeed.adam_offload to false"),
        "second copies of weights": (zero.zpg > 1, "set train.deepspeed.zpg to 1"),
        "hooks that sum gradients": (zero.overlap_comm, "set train.deepspeed.overlap_comm to false"),
        "a type to sum gradients in": (
            zero.grad_accum_dtype is not None,
            "leave train.deepspeed.grad_accum_dtype unset",
        ),
        "ranks that share layers": (zero.tensor_parallel_size > 1, "set train.deepspeed.tensor_parallel_size to 1"),
        "ranks that share sequences": (options.sequence_parallel_size > 1, "set train.sequence_parallel_size to 1"),
        "Liger's kernels": (options.liger_kernel, "set train.liger_kernel to false"),
        "a balancing loss of experts": (options.aux_loss_coefficient > 0, "set algorithm.aux_loss_coef to 0"),
        "replayed routing": (options.replays_routing, "set rollout.routing_replay to false"),
        "layers that are compiled one by one": (options.compile is True, "leave train.compile unset"),
        "recomputed activations": (options.gradient_checkpointing, "set train.gradient_checkpointing to false"),
        "packed sequences in fp32": (
            options.precision == "fp32" and options.layout != "padded",
            "set train.packing to false, or the precision to bf16",
        ),
    }
    for what, (is_asked, change) in without.items():
        if is_asked:
            raise UnsupportedError(
                f"{KEY} is true, and it does not go together with {what}: {change}, or {KEY} to false"
            )


def check_device(is_cuda: bool) -> None:
    """Raise unless there are a CUDA device and the tools to build DeepSpeed's operations."""
    if not is_cuda:
        raise UserError(f"{KEY} is true, and DeepSpeed compiles only for CUDA devices: set it to false")
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not cpp_extension.is_ninja_available():
        missing = "nvcc" if cpp_extension.CUDA_HOME is None else "ninja"
        raise UserError(
            f"{KEY} is true, and DeepSpeed builds operations for it with {missing}, which is not here: install it, or"
            f" set {KEY} to false"
        )


def build_operations() -> None:
    """Build DeepSpeed's operations, before a model is loaded. The first time on a machine it takes a minute."""
    from deepspeed.compile.util import get_deepcompile_handle

    try:
        get_deepcompile_handle()
    except Exception as error:
        raise RunError(
            f"{KEY} is true, and DeepSpeed could not build the operations for it ({type(error).__name__}: {error}). It"
            " needs nvcc of torch's CUDA version and, in TORCH_CUDA_ARCH_LIST if that is set, plain numbers such as"
            f" 9.0; or set {KEY} to false"
        ) from error


def filled(batch: MicroBatch) -> MicroBatch:
    """Add a filler batch to a micro-batch in which a count of segments or masked tokens may be 0 or 1."""
    is_small = batch.num_segments < 2 or int(batch.mask.sum()) < batch.num_segments + 2
    return join([replace(batch, fields={}), filler_batch()]) if is_small else batch


def compile_model(engine: Any, module: nn.Module, num_ranks: int) -> list[Tensor]:
    """Let calls of the engine run compiled code. Return the tensors that keep gradients between updates."""
    import deepspeed.compile.util as shared
    from deepspeed.compile.passes import prefetch, zero3_compile

    if shared.pre_backward_hooks:
        raise RunError(f"{KEY}: DeepSpeed compiles one model in a process, and this one has another already")
    schedule = None
    if engine.zero_optimization_partition_weights():
        gather = zero3_compile.add_z3_gather_release
        schedule = [(0, [gather]), (_WARM_UP, [gather, prefetch.schedule_prefetch])]
    keep_order(module.model.get_input_embeddings())
    makers = Backends(engine.get_deepcompile_backend, num_ranks)
    engine.get_deepcompile_backend = makers.make
    engine.compile("inductor", {"fullgraph": True}, schedule)
    if schedule is not None:
        keep_sizes()
    learn = module._compiled_call_impl
    score = torch.compile(_scoring(module), backend=makers.backend, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        mark_sizes((args, tuple(kwargs.values())))
        is_learning = torch.is_grad_enabled()
        makers.is_learning = is_learning
        try:
            return (learn if is_learning else score)(*args, **kwargs)
        except Unsupported as error:
            raise UnsupportedError(
                f"{KEY} is true, and {type(module.model).__name__} cannot be compiled as one graph"
                f" ({str(error).partition(chr(10))[0]}): set it to false"
            ) from error
        except BackendCompilerFailed as error:
            raise error.inner_exception from error

    module._compiled_call_impl = call
    return _kept_gradients(engine.optimizer) if engine.zero_optimization_stage() == 2 else []


def keep_order(embedding: nn.Module) -> None:
    """Add up the gradients of an embedding outside of compiled code, always in the same order."""
    if type(embedding) is nn.Embedding:
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        embedding.forward = lambda token_ids: torch.ops.hotseat.embed(embedding.weight, token_ids, padding)


def keep_sizes() -> None:
    """Let sizes of inputs be symbols again, which DeepSpeed makes constants of.

    DeepSpeed tells torch the true sizes of sharded weights, which are empty between calls. It also fixes the sizes of
    all other tensors to those of the first call, so that every other size would be compiled anew.
    """
    from deepspeed.compile import patch_fake_tensor
    from torch._dynamo.variables import builder

    of_torch = patch_fake_tensor.wrap_to_fake_tensor_and_record
    of_deepspeed = builder.wrap_to_fake_tensor_and_record

    def wrap(value: Any, *args: Any, **kwargs: Any) -> Any:
        return (of_deepspeed if hasattr(value, "ds_id") else of_torch)(value, *args, **kwargs)

    builder.wrap_to_fake_tensor_and_record = wrap


def forget_model() -> None:
    """Clear the globals in which DeepSpeed keeps a compiled model, weights too: the next model would find them."""
    import deepspeed.compile.backend as graphs
    import deepspeed.compile.util as shared

    shared.pre_backward_hooks.clear()
    shared.post_backward_hooks.clear()
    for state in (graphs.param_manager, graphs.profiling_results, graphs.graph_order_with_frame_id):
        state.clear()
    graphs.frames_partitioned.clear()


def _kept_gradients(optimizer: Any) -> list[Tensor]:
    """Return the gradients that DeepSpeed makes beforehand with stage 2, and hands over when a backward begins."""
    import deepspeed.compile.util as shared

    for hook in shared.pre_backward_hooks:
        hook(True)
    gradients = [gradient for group in optimizer.averaged_gradients.values() for gradient in group]
    optimizer.averaged_gradients = {}
    return gradients


def _scoring(module: nn.Module) -> Callable[..., Any]:
    def score(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return score


class Backends:
    """DeepSpeed's backends of torch.compile, with a guard against a rank that compiles alone.

    Ranks agree on memory while they compile: one that does so alone would wait forever.
    """

    def __init__(self, make: Callable[..., Any], num_ranks: int):
        self._make = make
        self._backend: Callable[..., Any] | None = None
        self._num_ranks = num_ranks
        self._passes: Any = None
        self._compiled: set[bool] = set()
        self.is_learning = False

    def make(self, *args: Any) -> Any:
        self._backend = self._make(*args)
        return self.backend

    def backend(self, graph: Any, inputs: Any) -> Any:
        import deepspeed.compile.backend as shared

        if shared.next_passes is not self._passes:  # everything is compiled anew
            self._passes = shared.next_passes
            self._compiled.clear()
        if self._num_ranks > 1 and self.is_learning in self._compiled:
            shapes = [tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)][:4]
            raise RunError(
                f"{KEY}: sizes {shapes} need another graph than those before, which ranks must compile together: set"
                f" {KEY} to false"
            )
        self._compiled.add(self.is_learning)
        assert self._backend is not None
        return self._backend(graph, inputs)


# --- operations that are not compiled ---------------------------------------------------------------------------------


@torch.library.custom_op("hotseat::embed", mutates_args=())
def _embed(weight: Tensor, token_ids: Tensor, padding: int) -> Tensor:
    return weight[token_ids]


@_embed.register_fake
def _(weight: Tensor, token_ids: Tensor, padding: int) -> Tensor:
    return weight.new_empty(*token_ids.shape, weight.shape[1])


@torch.library.custom_op("hotseat::embed_gradient", mutates_args=())
def _embed_gradient(gradient: Tensor, token_ids: Tensor, num_rows: int, padding: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(gradient, token_ids, num_rows, padding, False)


@_embed_gradient.register_fake
def _(gradient: Tensor, token_ids: Tensor, num_rows: int, padding: int) -> Tensor:
    return gradient.new_empty(num_rows, gradient.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    weight, token_ids, ctx.padding = inputs
    ctx.num_rows = weight.shape[0]
    ctx.save_for_backward(token_ids)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    [token_ids] = ctx.saved_tensors
    return torch.ops.hotseat.embed_gradient(gradient.contiguous(), token_ids, ctx.num_rows, ctx.padding), None, None


_embed.register_autograd(_differentiate, setup_context=_keep)
