"""DeepSpeed's compiler on a CUDA device: it computes what the same stage does without."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from hotseat.errors import RunError, UnsupportedError
from hotseat.train.backend import TrainOptions, ZeroOptions
from hotseat.train.deepcompile import forget_model
from hotseat.train.packing import split_by_count
from hotseat.train.zero import ZeroBackend

from . import conformance
from .conformance import (
    OPTIONS,
    ClippedLoss,
    ValueLoss,
    assert_close,
    assert_identical,
    copy_weights,
    some_segments,
    tiny_model,
    tiny_value_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),  # the first one builds DeepSpeed's operations
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PADDED = replace(OPTIONS, layout="padded")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    forget_model()  # of a test that failed


def make(model: PreTrainedModel, options: TrainOptions, stage: int, deepcompile: bool = True) -> ZeroBackend:
    zero = ZeroOptions(stage, deepcompile=deepcompile)
    return ZeroBackend(model, replace(options, zero=zero), device="cuda", persistent_size=32)


def train(
    model: Callable[[], PreTrainedModel],
    loss: Any,
    options: TrainOptions,
    stage: int,
    deepcompile: bool,
    *,
    sizes: Sequence[int] = (4, 3, 5, 4, 3, 4, 6),  # the compiler's later passes come with the sixth
    num_alone: int = 0,
) -> dict[str, Tensor]:
    """What updates do of two micro-batches of a size, and one of so many segments; scores beside."""
    backend = make(model(), options, stage, deepcompile)
    found = {}
    for step, size in enumerate(sizes):
        cut = split_by_count(some_segments(2 * size + num_alone, seed=step), size)
        score = backend.log_probs(cut, 0.8) if options.head == "policy" else backend.values(cut)
        report = backend.update(cut, loss, 0.8)
        found |= {f"scores {step} {index}": each for index, each in enumerate(score)}
        found |= {f"loss {step}": torch.tensor(report.loss), f"norm {step}": torch.tensor(report.grad_norm)}
    found |= copy_weights(backend)
    backend.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_trains_as_without(stage: int) -> None:
    found = [train(tiny_model, ClippedLoss(0.01), PADDED, stage, deepcompile) for deepcompile in (True, False)]
    assert_close(*found, 1e-5)


def test_a_segment_that_is_alone_adds_up() -> None:
    found = [
        train(tiny_model, ClippedLoss(), PADDED, 2, deepcompile, sizes=(4, 3, 4), num_alone=1)
        for deepcompile in (True, False)
    ]
    assert_close(*found, 1e-5)


@pytest.mark.parametrize("precision", ["bf16_master", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_in_16_bits_it_is_as_exact_as_without(stage: int, precision: Any) -> None:
    """Packed. Fused operations round less often, so that numbers differ; neither is further from those in 32 bits."""
    options = replace(OPTIONS, precision=precision)
    deep, plain = (train(tiny_model, ClippedLoss(), options, stage, deepcompile) for deepcompile in (True, False))
    exact = train(tiny_model, ClippedLoss(), PADDED, stage, False)
    for kind in ("scores", "norm", "model."):
        names = [name for name in exact if name.startswith(kind)]
        errors = [max(float((each[name] - exact[name]).abs().max()) for name in names) for each in (deep, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-6, (kind, errors)


def test_a_value_model_trains_as_without() -> None:
    options = replace(PADDED, head="value")
    found = [train(tiny_value_model, ValueLoss(), options, 3, deepcompile) for deepcompile in (True, False)]
    assert_close(*found, 1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_leave_the_device_and_come_back(stage: int) -> None:
    results, remains = [], []
    for moves in (False, True):
        torch._dynamo.reset()
        backend = make(tiny_model(), replace(OPTIONS, precision="bf16_master"), stage)
        batch = some_segments()
        backend.update([batch], ClippedLoss(), 1.0)
        if moves:
            before = torch.cuda.memory_allocated()
            away = backend.offload(["weights", "gradients", "optimizer"])
            size = sum(weight.numel() for weight in tiny_model().parameters())
            # Weights in 2 bytes, masters and two moments in 4; gradients too, except those that stage 1 has only while
            # it learns.
            expected = size * (14 if stage == 1 else 16)
            assert away.num_bytes >= expected
            assert before - torch.cuda.memory_allocated() >= expected
            left = torch.cuda.memory_allocated()
            backend.onload(["weights", "gradients", "optimizer"])
        backend.update([batch], ClippedLoss(), 1.0)
        (scored,) = backend.log_probs([batch], 1.0)
        results.append(copy_weights(backend) | {"scored": scored})
        backend.close()
        del backend
        gc.collect()
        remains.append(torch.cuda.memory_allocated())  # what torch and cuBLAS keep
    assert_identical(*results)
    assert left <= remains[0] + 2 * size
    assert remains[1] <= remains[0] + size


@pytest.mark.parametrize(
    "check",
    [
        conformance.the_cut_into_micro_batches_does_not_matter,
        conformance.a_gradient_that_is_not_finite_is_skipped_too,
        conformance.micro_batches_without_a_token_to_learn_are_harmless,
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_suite(check: Any, stage: int, tmp_path: Path) -> None:
    check(lambda model, options: make(model, replace(options, layout="padded"), stage), tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_run_twice_is_bit_identical(stage: int) -> None:
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        backend = make(tiny_model(), PADDED, stage)
        for step in range(3):
            backend.update(split_by_count(some_segments(30, seed=step), 8), ClippedLoss(), 1.0)
        runs.append(copy_weights(backend))
        backend.close()
    assert_identical(*runs)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loaded_run_goes_on(stage: int, tmp_path: Path) -> None:
    """Not to the bit: which code is made depends on the sizes that come first."""
    backend = make(tiny_model(), PADDED, stage)
    backend.update([some_segments(seed=1)], ClippedLoss(), 1.0)
    backend.save(tmp_path / "state")
    backend.update([some_segments(seed=2)], ClippedLoss(), 1.0)
    expected = copy_weights(backend)
    backend.close()
    resumed = make(tiny_model(seed=7), PADDED, stage)
    resumed.update([some_segments(seed=5)], ClippedLoss(), 1.0)  # whatever it has learnt must be gone
    resumed.load(tmp_path / "state")
    resumed.update([some_segments(seed=2)], ClippedLoss(), 1.0)
    assert_close(copy_weights(resumed), expected, 1e-5)
    resumed.close()


def test_a_second_model_in_the_process_is_refused() -> None:
    first = make(tiny_model(), PADDED, 2)
    with pytest.raises(RunError, match="DeepSpeed compiles one model in a process, and this one has another already"):
        make(tiny_model(), PADDED, 2)
    first.update([some_segments()], ClippedLoss(), 1.0)
    first.close()


def test_a_model_that_is_no_single_graph_is_refused() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",
    )
    backend = make(MixtralForCausalLM(config), PADDED, 2)
    with pytest.raises(
        UnsupportedError, match="MixtralForCausalLM cannot be compiled as one graph .*: set it to false"
    ):
        backend.update([some_segments()], ClippedLoss(), 1.0)
    backend.close()
