"""The Triton kernels of a CUDA device, where Triton works."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TritonKernels:
    """layers: the module `llama_kernels`. sample: that of `sampling_kernels`."""

    layers: Any
    sample: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


@functools.cache
def triton_kernels(device: torch.device) -> TritonKernels | None:
    """Return the kernels, or None if Triton is missing or does not work: it needs a C compiler."""
    if importlib.util.find_spec("triton") is None:
        return None
    one = torch.ones(1, 16, device=device)
    try:
        from hotseat.rollout import llama_kernels, sampling_kernels

        llama_kernels.rms_norm(one, one[0], 0.0)
    except Exception as error:
        warnings.warn(
            f"layers are computed without the faster kernels, since Triton does not work here: {error}", stacklevel=2
        )
        return None
    return TritonKernels(llama_kernels, sampling_kernels.sample)
