"""DeepSpeed's compiler: what it gets is one graph, and what it cannot do is refused. To train with it takes a CUDA
device: see `test_deepcompile_gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import cpp_extension
from transformers import PreTrainedModel

from hotseat.errors import RunError, UnsupportedError, UserError
from hotseat.train import zero_stages
from hotseat.train.backend import LoraOptions, TrainOptions, ZeroOptions
from hotseat.train.deepcompile import Backends, check_device, filled, keep_order, keep_sizes
from hotseat.train.logprobs import token_log_probs
from hotseat.train.packing import LayoutKind, model_input
from hotseat.train.policy_models import mark_sizes, prepare_model
from hotseat.train.zero import ZeroBackend

from . import varlen_on_cpu
from .conformance import OPTIONS, some_segments, tiny_model, tiny_value_model

assert varlen_on_cpu
DEEP = ZeroOptions(2, deepcompile=True)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "head", "with_entropy"),
    [
        ("packed", "policy", True),
        pytest.param("padded", "value", False, marks=pytest.mark.long),
        pytest.param("padded", "policy", True, marks=pytest.mark.long),
        pytest.param("packed", "policy", False, marks=pytest.mark.long),
        pytest.param("packed", "value", False, marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_a_whole_model_is_one_graph_for_all_sizes(layout: LayoutKind, head: Any, with_entropy: bool) -> None:
    model = tiny_model() if head == "policy" else tiny_value_model()
    wrapped, _ = prepare_model(model, TrainOptions(head=head, layout=layout), torch.device("cpu"))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(wrapped._call_impl, backend=counter, fullgraph=True)
    batches = [some_segments(num_segments, seed=num_segments) for num_segments in (5, 9, 3, 14, 1)]
    for num_wanted in (0, 1):
        none = torch.zeros_like(batches[0].mask)
        none[3 : 3 + num_wanted] = True
        batches.append(replace(batches[0], mask=none))
    for batch in batches:
        inputs = model_input(filled(batch), layout, device=torch.device("cpu"), has_flash=True)
        mark_sizes(inputs)
        found = [_outputs_and_gradients(model, call(inputs, 0.8, with_entropy)) for call in (compiled, wrapped)]
        for name, ours in found[0].items():
            torch.testing.assert_close(ours, found[1][name], rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_sizes_stay_symbols_beside_sharded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.compile.patch_fake_tensor import GuardBuilder, patch_fake_tensor
    from torch._dynamo.variables import builder
    from torch._subclasses import FakeTensorMode

    # What DeepSpeed changes in torch, and never changes back.
    for owner, name in (
        (builder, "wrap_to_fake_tensor_and_record"),
        (GuardBuilder, "TENSOR_MATCH"),
        (FakeTensorMode, "from_tensor"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    patch_fake_tensor()
    assert _num_graphs() == 3  # once it is 1, `keep_sizes` can go
    keep_sizes()
    assert _num_graphs() == 1


@pytest.mark.slow
def test_ranks_do_not_compile_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet while they compile: one that is alone would wait."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed.compile.backend as shared

    inputs = (torch.zeros(1, 13),)
    for num_ranks in (1, 2):
        backends = Backends(lambda: lambda graph, inputs: "compiled", num_ranks)
        backends.make()
        for passes in (["first"], ["second"]):  # after which everything is compiled anew
            monkeypatch.setattr(shared, "next_passes", passes)
            for is_learning in (False, True):
                backends.is_learning = is_learning
                assert backends.backend(None, inputs) == "compiled"
        if num_ranks == 1:
            assert backends.backend(None, inputs) == "compiled"
        else:
            with pytest.raises(RunError, match=r"sizes \[\(1, 13\)\] need another graph than those before"):
                backends.backend(None, inputs)


def _num_graphs() -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(torch.sin, backend=counter)
    for length in (5, 9, 3):
        values = torch.ones(length, 4)
        mark_sizes(values)
        compiled(values)
    return counter.frame_count


def _outputs_and_gradients(model: PreTrainedModel, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    sum((value * (1 + index)).sin().sum() for index, value in enumerate(outputs.values())).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return {**outputs, **gradients}


@pytest.mark.slow
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_log_probs_in_a_graph_are_those_without(has_bias: bool, with_entropy: bool) -> None:
    """The number of chunks is no part of the graph."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((17, 5), (17,)))
    counter = CompileCounterWithBackend("aot_eager")

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        found = token_log_probs(
            hidden,
            weight,
            targets,
            temperature=0.7,
            bias=bias if has_bias else None,
            with_entropy=with_entropy,
            chunk_rows=4,
        )
        return tuple(value for value in found if value is not None)

    compiled = torch.compile(score, backend=counter, fullgraph=True)
    leaves = [weight, *([bias] if has_bias else [])]
    for num_rows in (11, 3, 4, 20):
        hidden = torch.randn(num_rows, 5, generator=generator).requires_grad_()
        targets = torch.randint(0, 17, (num_rows,), generator=generator)
        mark_sizes((hidden, targets))
        results = []
        for call in (compiled, score):
            outputs = call(hidden, targets)
            total = sum(((1 + index) * value.sin()).sum() for index, value in enumerate(outputs))
            results.append([*outputs, *torch.autograd.grad(total, [hidden, *leaves])])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("padding", [None, 3])
def test_an_embedding_that_is_not_compiled_computes_the_same(padding: int | None) -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(7, 5, padding_idx=padding)
    token_ids = torch.tensor([[1, 3, 1], [6, 0, 3]])
    expected = _values_and_gradient(embedding, embedding, token_ids)
    keep_order(embedding)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(embedding, backend=counter, fullgraph=True)
    torch.testing.assert_close(_values_and_gradient(compiled, embedding, token_ids), expected)
    assert "hotseat.embed" in str(counter.graphs[0].graph)


def _values_and_gradient(call: Any, embedding: torch.nn.Embedding, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    values = call(token_ids)
    [gradient] = torch.autograd.grad(values.sin().sum(), [embedding.weight])
    return values, gradient


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": replace(DEEP, stage=0)}, "a stage that shards nothing: set train.deepspeed.zero_stage to 1, 2 or 3"),
        ({"zero": replace(DEEP, adam_offload=True)}, "host memory: set train.deepspeed.adam_offload to false"),
        ({"zero": replace(DEEP, stage=3, zpg=2)}, "second copies of weights: set train.deepspeed.zpg to 1"),
        ({"zero": replace(DEEP, tensor_parallel_size=2)}, "ranks that share layers: set .* to 1"),
        ({"sequence_parallel_size": 2}, "ranks that share sequences: set train.sequence_parallel_size to 1"),
        ({"lora": LoraOptions(4)}, "adapters: set train.lora.rank to 0, or train.deepspeed.deepcompile to false"),
        ({"liger_kernel": True}, "Liger's kernels: set train.liger_kernel to false"),
        ({"aux_loss_coefficient": 0.1}, "a balancing loss of experts: set algorithm.aux_loss_coef to 0"),
        ({"compile": True}, "layers that are compiled one by one: leave train.compile unset"),
        ({"gradient_checkpointing": True}, "recomputed activations: set train.gradient_checkpointing to false"),
        ({"zero": replace(DEEP, overlap_comm=True)}, "hooks that sum gradients: set .*overlap_comm to false"),
        ({"zero": replace(DEEP, grad_accum_dtype="fp32")}, "a type to sum gradients in: leave .* unset"),
        ({}, "packed sequences in fp32: set train.packing to false"),
    ],
)
def test_what_it_does_not_go_together_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"train.deepspeed.deepcompile is true, .* {message}"):
        ZeroBackend("no/model", TrainOptions(**({"zero": DEEP} | options)))


def test_it_needs_a_cuda_device() -> None:
    with pytest.raises(UserError, match="DeepSpeed compiles only for CUDA devices: set it to false"):
        ZeroBackend("no/model", replace(OPTIONS, layout="padded", zero=DEEP))


@pytest.mark.parametrize("missing", ["nvcc", "ninja"])
def test_what_operations_are_built_with_is_asked_for(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None if missing == "nvcc" else "/cuda")
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: missing != "ninja")
    with pytest.raises(UserError, match=f"builds operations for it with {missing}, which is not here: install it"):
        check_device(is_cuda=True)


# --- micro-batches that add up ----------------------------------------------------------------------------------------


class Engine:
    """As DeepSpeed's, compiled: the gradient of the last backward is all that is left, averaged over ranks."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace(
            single_partition_of_fp32_groups=[],
            optimizer=None,
            averaged_gradients={},
            loss_scaler=SimpleNamespace(dynamic=True, cur_scale=8.0),
        )

    def is_deepcompile_active(self) -> bool:
        return True

    def backward(self, loss: Tensor, scale_wrt_gas: bool) -> None:
        self.optimizer.averaged_gradients = {0: [loss.detach().clone(), 10 * loss.detach()]}


def test_gradients_of_micro_batches_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_stages, "start_state", lambda *args: None)
    stage = zero_stages.Flattened(Engine(), False, num_averaged=2, kept_gradients=[])
    for loss in (1.0, 2.0, 4.0):
        stage.backward(torch.tensor([loss]), is_last=loss == 4.0)
    assert [gradient.item() for gradient in stage.gradients()] == [7.0, 70.0]
    assert stage.gradient_unit() == 2 / 8.0
