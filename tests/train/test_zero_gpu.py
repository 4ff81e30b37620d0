"""The DeepSpeed backend on a CUDA device: the suite, and memory that is given back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hotseat.train.backend import TrainOptions, ZeroOptions
from hotseat.train.zero import ZeroBackend

from . import conformance, test_fsdp_gpu
from .conformance import OPTIONS, ClippedLoss, assert_close, assert_identical, copy_weights, some_segments, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("check", conformance.ONE_RANK, ids=lambda check: check.__name__)
def test_one_rank(check: Any, stage: int, tmp_path: Path) -> None:
    def make(model: PreTrainedModel, options: TrainOptions) -> ZeroBackend:
        return ZeroBackend(model, replace(options, zero=ZeroOptions(stage)), device="cuda", persistent_size=32)

    check(make, tmp_path)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_master", "fp16"])
def test_parts_leave_the_device_and_come_back(precision: Any, stage: int) -> None:
    results = []
    for moves in (False, True):
        options = replace(OPTIONS, precision=precision, zero=ZeroOptions(stage))
        backend = ZeroBackend(tiny_model(), options, device="cuda", persistent_size=32)
        batch = some_segments()
        backend.update([batch], ClippedLoss(), 1.0)
        if moves:
            before = torch.cuda.memory_allocated()
            away = backend.offload(["weights", "gradients", "optimizer"])
            size = sum(weight.numel() for weight in tiny_model().parameters()) * (2 if precision == "bf16" else 4)
            assert away.num_bytes >= 2 * size
            assert before - torch.cuda.memory_allocated() >= 2 * size
            backend.onload(["weights", "gradients", "optimizer"])
        backend.update([batch], ClippedLoss(), 1.0)
        (scored,) = backend.log_probs([batch], 1.0)
        results.append(copy_weights(backend) | {"scored": scored})
        backend.close()
    assert_identical(results[0], results[1])


@pytest.mark.parametrize("stage", [2, 3])
def test_an_offloaded_optimizer_computes_the_same(stage: int) -> None:
    results = []
    for is_offloaded in (False, True):
        options = replace(OPTIONS, zero=ZeroOptions(stage, adam_offload=is_offloaded))
        backend = ZeroBackend(tiny_model(), options, device="cuda")
        for step in range(3):
            backend.update([some_segments(seed=step), some_segments(seed=step + 7)], ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        assert backend.offload(["optimizer"]).num_bytes == 0 or not is_offloaded
        backend.close()
    assert_close(results[0], results[1])


@pytest.mark.parametrize("stage", [2, 3])
def test_the_backends_agree(stage: int) -> None:
    options = replace(OPTIONS, precision="bf16_master", layout="packed", compile=None)
    zero = replace(options, zero=ZeroOptions(stage, grad_accum_dtype="fp32"))
    results = []
    for backend in (ZeroBackend(tiny_model(), zero, device="cuda"), test_fsdp_gpu.make(tiny_model(), options)):
        for step in range(5):
            backend.update([some_segments(seed=step)], ClippedLoss(), 1.0)
        results.append(copy_weights(backend))
        backend.close()
    assert_close(results[0], results[1], 1e-3)
