"""A base in NF4 on a CUDA device: the bytes of a CPU, captured graphs, and engines that leave the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotseat.algorithms.nf4 import Nf4Linear, dequantise, level_pairs, quantise
from hotseat.weights.transfer import check_digests

from .test_nf4_engines import CONFIGS, engine_of, log_probs_of, trainer_of
from .test_transformers_engine import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = [5, 9, 1, 44, 23, 8, 60, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_has_the_bytes_of_a_cpu_and_gives_its_numbers(dtype):
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(512, 4096)).to(dtype)
    here, there = quantise(weight), quantise(weight.cuda())
    assert all(torch.equal(ours, theirs.cpu()) for ours, theirs in zip(here, there, strict=True))
    on_cpu = dequantise(*here, level_pairs(), dtype)
    assert torch.equal(on_cpu, dequantise(*there, level_pairs("cuda"), dtype).cpu())
    compiled = torch.compile(dequantise)
    assert torch.equal(on_cpu, compiled(*there, level_pairs("cuda"), dtype).cpu())


def test_compiled_layers_have_the_same_gradient():
    torch.manual_seed(0)
    layer = Nf4Linear(torch.nn.Linear(256, 128, device="cuda"))
    x = torch.randn(16, 256, device="cuda", requires_grad=True)
    [expected] = torch.autograd.grad((layer(x) ** 2).sum(), x)
    [found] = torch.autograd.grad((torch.compile(layer)(x) ** 2).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_an_engine_holds_the_bytes_of_the_trainer_also_after_it_left_the_device(tmp_path: Path, kind: str) -> None:
    random_model(CONFIGS[0], 0).save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path, "cuda", "bf16_master")
    with engine_of(tmp_path, kind, "cuda", "bfloat16") as engine:
        for is_kept in (True, False):
            engine.load_weights(trainer.weights(dtype=torch.bfloat16, form="apart"), 0)
            sent = trainer.digest(dtype=torch.bfloat16, form="apart")
            check_digests(0, sent, engine.digest(), "engine")
            found = engine.score([TOKENS], 1.0)[0][1:]
            assert found == pytest.approx(log_probs_of(trainer, TOKENS)[1:], abs=5e-2)
            engine.offload(["weights", "kv_cache"], keep_weights=is_kept)
            engine.onload(["weights", "kv_cache"])
            if is_kept:
                check_digests(0, sent, engine.digest(), "engine")
