"""Deterministic kernels for the process: equal inputs give equal bits, or an operation that cannot raises."""

from __future__ import annotations

import os

# Read by cuBLAS when its first handle is made, by flash-attn at every call, and by vLLM when it is imported.
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
FLASH = {"FLASH_ATTENTION_DETERMINISTIC": "1"}
BATCH_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}


def use_deterministic_kernels() -> None:
    """Switch torch to deterministic algorithms. Call it before the first model is on a device."""
    import torch

    for name, value in (CUBLAS | FLASH).items():
        os.environ.setdefault(name, value)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)


def use_batch_invariant_kernels() -> None:
    """Have vLLM compute an answer alike whatever is decoded beside it. Call it before vLLM is imported; GPUs only."""
    for name, value in BATCH_INVARIANT.items():
        os.environ.setdefault(name, value)
