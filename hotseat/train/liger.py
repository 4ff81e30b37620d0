"""Liger's kernels for the norms and gates of a model's layers, on a CUDA device.

They take the place of the compiler: norms and gates are fused either way. Liger's losses are not used: log-probs and
entropy come straight from hidden states here (see `logprobs`), and no logits are kept.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from hotseat.errors import UserError

HINT = "Liger is not installed: pip install 'hotseat[liger]', or set train.liger_kernel to false"


def is_installed() -> bool:
    return find_spec("liger_kernel") is not None


def check_liger(config: Any) -> None:
    """Raise if there are no kernels for a model of this config."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known

    kind = config.get_text_config().model_type
    if kind not in known:
        raise UserError(
            f"Liger has no kernels for a model of type {kind!r}, only for {', '.join(sorted(known))}: set"
            " train.liger_kernel to false"
        )


def check_device(is_cuda: bool) -> None:
    if not is_cuda:
        raise UserError("train.liger_kernel is true, and its kernels need a CUDA device: set it to false")


def use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Change the layers of this model, and of no other in this process."""
    check_device(device.type == "cuda")
    check_liger(model.config)
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    # Liger changes this model's modules, and also the classes that every later model of the kind would be made of.
    classes = vars(sys.modules[type(model).__module__])
    before = dict(classes)
    try:
        _apply_liger_kernel_to_instance(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    finally:
        classes.update(before)
