"""The kernels of Llama-like layers, by Triton's interpreter; on a device they are in test_engine_gpu.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conformance import PATIENCE_S

pytestmark = pytest.mark.slow


def test_kernels_compute_what_torch_does() -> None:
    """In a process of its own: Triton chooses its interpreter when it is imported."""
    pytest.importorskip("triton", reason="needs Triton, whose interpreter runs kernels on a CPU")
    checks = subprocess.run(
        [sys.executable, "-m", "tests.rollout.kernel_checks"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert checks.returncode == 0, checks.stdout + checks.stderr
