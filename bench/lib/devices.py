"""Whether there is a GPU to measure on."""

from __future__ import annotations

import shutil


def has_gpu() -> bool:
    """Tell whether this machine has an NVIDIA device, without loading torch."""
    return shutil.which("nvidia-smi") is not None


def need_gpu() -> None:
    """End the benchmark, without an error, where there is none."""
    if not has_gpu():
        print("no GPU here: nothing measured")
        raise SystemExit(0)
