"""The kernels of Llama-like layers, by Triton's interpreter; test_transformers_engine_gpu.py has them on a device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotseat.rollout.triton_kernels import triton_kernels

from . import kernel_checks
from .conformance import PATIENCE_S

pytestmark = pytest.mark.slow
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def test_models_compute_the_same_with_kernels() -> None:
    kernel_checks.models_compute_the_same_with_kernels(torch.device("cpu"), kernel_checks.PlainKernels)


@needs_triton
def test_layers_are_computed_without_kernels_where_triton_does_not_work() -> None:
    triton_kernels.cache_clear()
    with pytest.warns(UserWarning, match="without the faster kernels, since Triton does not work here"):
        assert triton_kernels(torch.device("cpu")) is None  # compiled kernels cannot read a CPU's memory


@needs_triton
@pytest.mark.parametrize(
    "arguments", [pytest.param(["part"], id="part"), pytest.param([], marks=pytest.mark.long, id="whole")]
)
def test_kernels_compute_what_torch_does(arguments: list[str]) -> None:
    """Run the checks in a process of their own: Triton chooses its interpreter when it is imported."""
    checks = subprocess.run(
        [sys.executable, "-m", "tests.rollout.kernel_checks", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert checks.returncode == 0, checks.stdout + checks.stderr
