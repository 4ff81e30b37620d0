"""Kernels of the process: deterministic ones, where equal inputs give equal bits, and float32 that is float32."""

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


def keep_float32() -> None:
    """Have cuDNN multiply float32 numbers as they are, as cuBLAS does. Call it in every process that runs a model.

    Otherwise convolutions may round them to TF32 in one process and not in another, depending on the sizes of batches
    and the addresses of weights, and engine and trainer compute different numbers from the same image.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False


def use_batch_invariant_kernels() -> None:
    """Have vLLM compute an answer alike whatever is decoded beside it. Call it before vLLM is imported; GPUs only."""
    for name, value in BATCH_INVARIANT.items():
        os.environ.setdefault(name, value)
