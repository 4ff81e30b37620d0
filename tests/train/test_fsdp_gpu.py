"""The same suite on a CUDA device, and what only a device has: varlen attention and memory of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import delta_nets
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from hotseat.algorithms.head import project
from hotseat.loop.workers.cutting import BatchSettings, MicroBatcher
from hotseat.train.backend import LoraOptions, TrainOptions, ZeroOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.logprobs import token_log_probs
from hotseat.train.make import make_backend
from hotseat.train.packing import split_by_count

from . import conformance
from .conformance import (
    OPTIONS,
    VOCAB_SIZE,
    ClippedLoss,
    ValueLoss,
    assert_close,
    assert_identical,
    copy_weights,
    groups_of_four,
    some_segments,
    tiny_model,
    tiny_value_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(model: PreTrainedModel, options: TrainOptions) -> FSDPBackend:
    return FSDPBackend(model, options, device="cuda")


@pytest.mark.parametrize("check", conformance.ONE_RANK, ids=lambda check: check.__name__)
def test_one_rank(check: Any, tmp_path: Path) -> None:
    check(make, tmp_path)


def mistral(window: int | None) -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=window,
        )
    )


@pytest.mark.parametrize(
    "made",
    [lambda: mistral(None), lambda: mistral(4), delta_nets.tiny],
    ids=["whole", "window", "linear attention"],
)
def test_varlen_attention_is_the_attention_of_single_segments(made: Callable[[], PreTrainedModel]) -> None:
    """In 16 bits both layouts are about as far from the exact values."""
    model = made()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = groups_of_four(20)
    found = {}
    for precision, layout in (
        ("fp32", "padded"),
        ("bf16", "padded"),
        ("bf16", "packed"),
        ("bf16", "shared"),
        ("bf16_master", "packed"),
        ("bf16_master", "shared"),
    ):
        model = type(model)(model.config)
        model.load_state_dict(state)
        backend = make(model, replace(OPTIONS, precision=precision, layout=layout))
        found[precision, layout] = backend.log_probs([batch], 1.0)[0]
        report = backend.update(split_by_count(batch, 7), ClippedLoss(0.01), 1.0)
        found[precision, layout + " gradient"] = torch.tensor(report.grad_norm)
        backend.close()
    exact = found["fp32", "padded"]
    padded_error = (found["bf16", "padded"] - exact).abs().max()
    for precision, layout in itertools.product(("bf16", "bf16_master"), ("packed", "shared")):
        assert (found[precision, layout] - exact).abs().max() <= 2 * padded_error
        torch.testing.assert_close(
            found[precision, f"{layout} gradient"], found["fp32", "padded gradient"], rtol=0.03, atol=0.0
        )


@pytest.mark.parametrize("precision", ["bf16", "bf16_master"])
@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_compiled_layers_are_as_exact_and_compiled_once(precision: Any, layout: Any) -> None:
    torch._dynamo.reset()
    found = {}
    for name, options in (
        ("exact", replace(OPTIONS, layout="padded")),
        ("plain", replace(OPTIONS, precision=precision, layout=layout)),
        ("compiled", replace(OPTIONS, precision=precision, layout=layout, compile=None)),
    ):
        backend = make(tiny_model(), options)
        counts = []
        for num_segments in (12, 8, 20, 16):
            batch = groups_of_four(num_segments)
            log_probs = backend.log_probs([batch], 1.0)[0]
            report = backend.update(split_by_count(batch, 4), ClippedLoss(), 1.0)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        found[name] = (log_probs, torch.tensor(report.grad_norm))
        backend.close()
    exact = found["exact"][0]
    assert (found["compiled"][0] - exact).abs().max() <= 2 * (found["plain"][0] - exact).abs().max()
    torch.testing.assert_close(found["compiled"][1], found["exact"][1], rtol=0.03, atol=0.0)
    assert 0 < counts[1] <= counts[-1] <= counts[1] + 2  # a batch that shares nothing is another case, once
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
def test_parts_leave_the_device_and_come_back(precision: Any) -> None:
    results = []
    for moves in (False, True):
        backend = make(tiny_model(), replace(OPTIONS, precision=precision))
        assert backend.movable == {"weights", "gradients", "optimizer"}
        batch = some_segments()
        backend.update([batch], ClippedLoss(), 1.0)
        if moves:
            before = torch.cuda.memory_allocated()
            away = backend.offload(["weights", "optimizer"])
            size = sum(weight.numel() for weight in tiny_model().parameters()) * (2 if precision == "bf16" else 4)
            assert away.num_bytes >= 3 * size
            assert before - torch.cuda.memory_allocated() >= 3 * size
            backend.onload(["weights", "optimizer"])
        (scored,) = backend.log_probs([batch], 1.0)
        results.append(copy_weights(backend) | {"scored": scored})
        backend.close()
    assert_identical(results[0], results[1])


@pytest.mark.parametrize("precision", ["bf16", "bf16_master"])
def test_memory_of_parts_that_leave_goes_back_to_the_device(precision: Any) -> None:
    """A model with weights of many sizes, which torch puts into segments together."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    parts = ["weights", "optimizer"]
    backend = make(MistralForCausalLM(config), replace(OPTIONS, precision=precision))
    backend.update([some_segments()], ClippedLoss(), 1.0)
    for _ in range(3):
        before = torch.cuda.memory_reserved()
        away = backend.offload(parts)
        assert away.num_bytes > 300 << 20
        assert before - torch.cuda.memory_reserved() >= away.num_bytes
        backend.onload(parts)
        backend.update([some_segments()], ClippedLoss(), 1.0)
    backend.close()


@contextmanager
def device_memory_of(num_bytes: int) -> Iterator[None]:
    """Let this process take so many bytes of device memory beyond what it holds."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("zero", [None, ZeroOptions(2), ZeroOptions(3)], ids=["fsdp", "zero2", "zero3"])
def test_a_device_that_is_full_gets_smaller_micro_batches(zero: ZeroOptions | None) -> None:
    """Memory truly runs out, in scoring and in an update, and the result is that of the smaller micro-batches."""
    options = replace(OPTIONS, backend="fsdp" if zero is None else "deepspeed", zero=zero)
    batch = some_segments(16_000)
    whole = BatchSettings(None, 16 * batch.num_segments, is_chosen=True)
    backend = make_backend(tiny_model(), options, device="cuda")
    backend.update([some_segments()], ClippedLoss(), 1.0)  # optimizer state and workspaces are there from now on
    cutter = MicroBatcher(backend)
    with device_memory_of(64 << 20):
        scored, log_probs = cutter.run(
            "rollout", whole, lambda settings: settings.cut(batch), lambda pieces: backend.log_probs(pieces, 1.0)
        )
    with device_memory_of(256 << 20):
        updated, report = cutter.run(
            "train",
            whole,
            lambda settings: settings.cut(batch),
            lambda pieces: backend.update(pieces, ClippedLoss(), 1.0),
        )
    weights = copy_weights(backend)
    backend.close()
    assert len(scored) > 1
    assert len(updated) > 1
    expected = make_backend(tiny_model(), options, device="cuda")
    expected.update([some_segments()], ClippedLoss(), 1.0)
    for ours, theirs in zip(log_probs, expected.log_probs(scored, 1.0), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.tensor(report.grad_norm), torch.tensor(expected.update(updated, ClippedLoss(), 1.0).grad_norm)
    )
    assert_close(weights, copy_weights(expected), 1e-5)
    expected.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master"])
def test_ligers_kernels_compute_the_same(precision: Any) -> None:
    pytest.importorskip("liger_kernel")
    found = {}
    for has_liger in (False, True, False):  # the third model is made of the classes that it was made of before
        options = replace(OPTIONS, precision=precision, liger_kernel=has_liger)
        model = tiny_model()
        backend = make(model, options)
        names = {type(module).__name__ for module in model.modules()} | {repr(model)}
        batch = some_segments()
        [scored] = backend.log_probs([batch], 1.0)
        reports = [backend.update([batch], ClippedLoss(0.01), 1.0) for _ in range(3)]
        state = copy_weights(backend) | {"scored": scored, "norm": torch.tensor([r.grad_norm for r in reports])}
        if has_liger:
            assert any("LigerRMSNorm" in name for name in names)
            found["liger"] = state
        elif "plain" in found:
            assert not any("Liger" in name for name in names)
            assert_identical(found["plain"], state)
        else:
            found["plain"] = state
        backend.close()
    tolerance = 1e-4 if precision == "fp32" else 0.05
    for name, tensor in found["plain"].items():
        torch.testing.assert_close(found["liger"][name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_ligers_kernels_beside_adapters_checkpointing_and_values() -> None:
    pytest.importorskip("liger_kernel")
    for more in (
        {"lora": LoraOptions(4)},
        {"gradient_checkpointing": True},
        {"head": "value"},
        {"backend": "deepspeed", "zero": ZeroOptions(3)},
    ):
        norms = []
        for has_liger in (False, True):
            options = replace(OPTIONS, liger_kernel=has_liger, **more)
            is_value = options.head == "value"
            backend = make_backend(tiny_value_model() if is_value else tiny_model(), options, device="cuda")
            loss = ValueLoss() if is_value else ClippedLoss(0.01)
            norms.append([backend.update([some_segments()], loss, 1.0).grad_norm for _ in range(2)])
            backend.close()
        torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_log_probs_of_16_bit_hidden_states_come_from_float32_logits(dtype: torch.dtype, compiler: str | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, device="cuda").to(dtype).requires_grad_()
        for shape in ((300, 64), (1111, 64), (1111,))
    )
    targets = torch.randint(0, 1111, (300,), generator=generator, device="cuda")
    leaves, exact = [hidden, weight, bias], [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    with torch.no_grad():
        logits = project(hidden, weight, bias)
    assert logits.dtype == torch.float32
    expected = (exact[0] @ exact[1].t() + exact[2]).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    log_probs, _ = token_log_probs(hidden, weight, targets, bias=bias, chunk_rows=128, compiler=compiler)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-4, atol=1e-4)
    ours = torch.autograd.grad(log_probs.sum(), leaves)
    theirs = torch.autograd.grad(expected.sum(), exact)
    for mine, true in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= 0.01 * true.norm()
