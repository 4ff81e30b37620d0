"""Compiled layers: the same numbers, and no more compilations than there are kinds of work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from hotseat.train.backend import LoraOptions, TrainOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.logprobs import token_log_probs
from hotseat.train.policy_models import layers
from hotseat.types import MicroBatch

from . import varlen_on_cpu
from .conformance import OPTIONS, ClippedLoss, assert_close, copy_weights, groups_of_four, some_segments, tiny_model
from .test_policy_models import small

assert varlen_on_cpu
PACKED = replace(OPTIONS, layout="packed")
# Scoring, and learning: layers in each, scores of logits in both, their gradient in the second.
NUM_GRAPHS = 4


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of tests before in this process
    yield
    torch._dynamo.reset()


def train(
    model: PreTrainedModel,
    options: TrainOptions,
    batches: Sequence[MicroBatch],
    compiler: Any,
    *,
    has_flash: bool = True,
) -> tuple[dict[str, Tensor], list[int]]:
    """Log-probs before each update and weights after the last; how many graphs there were after each update."""
    options = replace(options, compile=compiler is not None)
    backend = FSDPBackend(model, options, unit_bytes=0, _compiler=compiler or "none")
    backend._forward_pass.has_flash = has_flash
    found, counts = {}, []
    for index, batch in enumerate(batches):
        found[f"log-probs {index}"] = backend.log_probs([batch], 0.8)[0]
        backend.update([batch], ClippedLoss(), 0.8)
        counts.append(getattr(compiler, "frame_count", 0))
    found |= copy_weights(backend)
    backend.close()
    return found, counts


def some_batches(*nums_segments: int) -> list[MicroBatch]:
    return [some_segments(num, seed=seed) for seed, num in enumerate(nums_segments)]


@pytest.mark.long
def test_compiled_layers_train_their_adapters_alike() -> None:
    """Behind frozen embeddings the first layer's input needs no gradient: a graph of its own."""
    batches, options = some_batches(5, 9, 3), replace(PACKED, lora=LoraOptions(3))
    expected, _ = train(tiny_model(), options, batches, None)
    compiler = CompileCounterWithBackend("aot_eager")
    found, counts = train(tiny_model(), options, batches, compiler)
    assert_close(found, expected, 1e-5)
    assert counts == [NUM_GRAPHS + 1] * 3
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["LlamaConfig", *(pytest.param(f"Qwen{n}Config", marks=pytest.mark.long) for n in (2, 3))]
)
def test_compiled_layers_train_alike(config: str) -> None:
    batches = some_batches(5, 9, 3)
    expected, _ = train(small(config), PACKED, batches, None)
    compiler = CompileCounterWithBackend("aot_eager")
    found, counts = train(small(config), PACKED, batches, compiler)
    assert_close(found, expected, 1e-5)
    assert counts == [NUM_GRAPHS] * 3
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("options", "has_flash"),
    [
        pytest.param(replace(PACKED, gradient_checkpointing=True), True, id="recomputed", marks=pytest.mark.long),
        pytest.param(replace(OPTIONS, layout="padded"), False, id="padded", marks=pytest.mark.long),
        pytest.param(PACKED, False, id="without the kernel", marks=pytest.mark.long),
        pytest.param(replace(OPTIONS, layout="shared", precision="bf16"), True, id="shared", marks=pytest.mark.long),
        pytest.param(replace(PACKED, precision="bf16_master"), True, id="wrapped", marks=pytest.mark.long),
    ],
)
def test_it_compiles_what_else_can_be_asked_for(options: TrainOptions, has_flash: bool) -> None:
    batches = [groups_of_four(num) for num in (8, 12, 4)]
    expected, _ = train(small("Qwen2Config"), options, batches, None, has_flash=has_flash)
    compiler = CompileCounterWithBackend("aot_eager")
    found, counts = train(small("Qwen2Config"), options, batches, compiler, has_flash=has_flash)
    assert_close(found, expected, 1e-5)
    assert counts[0] >= NUM_GRAPHS
    assert counts[1] == counts[2]


@pytest.mark.slow
@pytest.mark.long
def test_a_layer_may_have_more_variants_than_torch_compiles_by_default() -> None:
    """Torch would run the recomputation of a compiled forward without compiling it, and then refuse the result."""
    options = replace(OPTIONS, layout="shared", gradient_checkpointing=True)
    batches = [groups_of_four(8), some_segments(5)]
    expected, _ = train(small("Qwen2Config"), options, batches, None)
    with torch._dynamo.config.patch(recompile_limit=2):
        found, counts = train(small("Qwen2Config"), options, batches, CompileCounterWithBackend("eager"))
    assert_close(found, expected, 1e-5)
    assert counts[1] > 2 + 2  # of layers, and of logits


@pytest.mark.slow
def test_other_sizes_compile_nothing() -> None:
    compiler = CompileCounterWithBackend("eager")
    _, counts = train(tiny_model(), PACKED, some_batches(5, 9, 3, 12, 1, 7, 2, 20), compiler)
    assert counts == [NUM_GRAPHS] * 8


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [pytest.param(1, marks=pytest.mark.long), 6])
def test_more_layers_compile_nothing(num_layers: int) -> None:
    compiler = CompileCounterWithBackend("eager")
    _, counts = train(small("Qwen2Config", num_hidden_layers=num_layers), PACKED, some_batches(5), compiler)
    assert counts == [NUM_GRAPHS]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_with_the_compiler_of_torch() -> None:
    batches = some_batches(5, 9, 3)
    expected, _ = train(tiny_model(), PACKED, batches, None)
    found, _ = train(tiny_model(), PACKED, batches, "inductor")
    assert_close(found, expected, 1e-5)


def test_unset_on_a_cpu_compiles_nothing() -> None:
    backend = FSDPBackend(tiny_model(), replace(OPTIONS, compile=None))
    assert not any("forward" in vars(layer) for layer in layers(backend._model))
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("with_entropy", "dtype"), [(False, torch.float64), (True, torch.float64), (True, torch.bfloat16)]
)
def test_compiled_scores_and_gradients_of_logits(with_entropy: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((11, 5), (17, 5), (17,))
    )
    targets = torch.randint(0, 17, (11,), generator=generator)
    upstream = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    compiler = CompileCounterWithBackend("aot_eager")
    found = []
    for chosen in (None, compiler):
        log_probs, entropy = token_log_probs(
            hidden,
            weight,
            targets,
            temperature=0.7,
            bias=bias,
            with_entropy=with_entropy,
            chunk_rows=4,
            compiler=chosen,
        )
        total = (upstream[0] * log_probs).sum() + (0.0 if entropy is None else (upstream[1] * entropy).sum())
        found.append([log_probs, entropy, *torch.autograd.grad(total, [hidden, weight, bias])])
    assert {each.dtype for each in found[1][2:]} == {dtype}
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][2:], found[0][2:], **tolerance)
    assert compiler.frame_count == 2
