"""DeepSpeed's settings: its config, the options that it would refuse, and its import."""

from __future__ import annotations

import logging
import math
import os
import warnings
from typing import Any

import torch

from hotseat.errors import RunError, UnsupportedError, UserError
from hotseat.registry.backends import backend_entry
from hotseat.train.backend import Precision, TrainOptions, ZeroOptions
from hotseat.train.deepcompile import check_deepcompile
from hotseat.train.tensor import TENSOR_PARALLEL_SIZE

COMPUTE: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16_master": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MAX_BUCKET = 500_000_000  # elements that are summed over ranks at once: DeepSpeed's own number
# The loss scale in fp16: DeepSpeed's own numbers. The second overflow in a row and all after it halve the scale.
_SCALE = {
    "init_scale": 2**16,
    "scale_window": 1000,
    "delayed_shift": 2,
    "min_scale": 1,
    "consecutive_hysteresis": False,
}
SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def check_zero(options: TrainOptions) -> None:
    """Raise for options that DeepSpeed would refuse by an assertion, or not at all."""
    zero = options.zero or ZeroOptions()
    sum_dtype, compute = zero.grad_accum_dtype, _NAMES[COMPUTE[options.precision]]
    is_wider = zero.stage >= 2 or (zero.stage == 1 and compute == "fp16")
    if sum_dtype not in (None, compute) and not (sum_dtype == "fp32" and is_wider):
        raise UnsupportedError(
            f"gradients of a {compute} computation summed in {sum_dtype} with ZeRO stage {zero.stage}: leave"
            f" grad_accum_dtype unset for {compute}, or choose fp32 with stage 2 or 3"
        )
    if zero.adam_offload and options.precision == "bf16":
        raise UnsupportedError(
            "adam_offload of weights in pure bf16, for which DeepSpeed needs an optimizer of its own: set"
            " train.fp32_master to true"
        )
    if zero.tensor_parallel_size > 1:
        _check_tensor(options, zero.tensor_parallel_size)
    if zero.deepcompile:
        check_deepcompile(options, zero)


def _check_tensor(options: TrainOptions, size: int) -> None:
    """Raise for options that do not go together with layers that are cut."""
    setting = f"{TENSOR_PARALLEL_SIZE} is {size}"
    if options.sequence_parallel_size > 1:
        raise UnsupportedError(
            f"{setting} and train.sequence_parallel_size {options.sequence_parallel_size}: ranks share either layers or"
            " sequences; set one of the two to 1"
        )
    if options.lora is not None:
        raise UnsupportedError(
            f"{setting}, and adapters beside layers that are cut are not built in: set train.lora.rank to"
            " 0, or the size to 1"
        )
    if options.compile:
        raise UnsupportedError(
            f"{setting} and train.compile is true, but layers that are cut are not compiled: leave train.compile unset"
        )
    if options.liger_kernel:
        raise UnsupportedError(
            f"{setting} and train.liger_kernel is true, but layers that are cut run without Liger's kernels: set"
            " train.liger_kernel to false"
        )


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed and set it up for this kind of device."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    number_device(device)
    try:
        import deepspeed
        import deepspeed.accelerator
    except ImportError as error:
        raise UserError(f"the DeepSpeed backend: {error}; {backend_entry('deepspeed').hint}") from None
    accelerator = deepspeed.accelerator.get_accelerator().device_name()
    if accelerator != device.type:
        raise RunError(
            f"DeepSpeed in this process is set to {accelerator} and cannot train on {device.type}: start training in a"
            " process of its own"
        )
    if device.type == "cpu":
        # DeepSpeed asks for fast fp16 kernels, which a CPU may lack; torch has slower ones everywhere.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # On CPUs DeepSpeed would first compile collectives of its own, for minutes; gloo has them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls collectives by names that torch 2.13 has replaced.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    return deepspeed


def number_device(device: torch.device) -> None:
    """Set the number of the process's device in the environment, where DeepSpeed reads it again and again."""
    if device.type == "cpu":
        os.environ.setdefault("LOCAL_RANK", "0")
    else:
        index = torch.cuda.current_device() if device.index is None else device.index
        os.environ["LOCAL_RANK"] = str(index)


def deepspeed_config(
    options: TrainOptions,
    zero: ZeroOptions,
    num_ranks: int,
    num_elements: int,
    persistent_size: int,
    is_compiled: bool,
    is_whole: bool,
) -> dict[str, Any]:
    """Make DeepSpeed's config. Batch sizes are a formality: the backend says which micro-batch is the last."""
    sharding: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": zero.overlap_comm,
        "reduce_bucket_size": max(1, min(num_elements, _MAX_BUCKET)),
    }
    if zero.stage == 3:
        sharding |= {
            "stage3_param_persistence_threshold": persistent_size,
            "zero_hpz_partition_size": zero.zpg,
            # DeepSpeed's linear layers look up the number of each weight: code would be compiled anew for every layer.
            "memory_efficient_linear": not (is_compiled or is_whole),
        }
    if zero.adam_offload:
        sharding["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    elif zero.stage in (1, 2):
        sharding["compute_grad_norm"] = False  # the norm is known by then
    config: dict[str, Any] = {
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "mean" if zero.stage == 3 or is_whole else "sum",  # neither of the two can sum
        "gradient_clipping": 0.0,
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW steps host memory too, and needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},
        "compile": {"deepcompile": is_whole},
    }
    if zero.stage > 0:
        config |= _numbers(options, zero)
    return config


def _numbers(options: TrainOptions, zero: ZeroOptions) -> dict[str, Any]:
    """Return the types of numbers, as far as they are not DeepSpeed's own."""
    config: dict[str, Any] = {}
    if zero.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": zero.grad_accum_dtype}
        config["communication_data_type"] = zero.grad_accum_dtype
    if options.precision in ("bf16", "bf16_master"):
        is_pure = options.precision == "bf16" and options.optimizer is not None
        config["bf16"] = {
            "enabled": True,
            "check_grad_overflow": False,  # whether there is one is known by then
            "bf16_master_weights_and_grads": is_pure,
            "bf16_optimizer_states": is_pure,
        }
    if options.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": int(math.log2(_SCALE["init_scale"])),
            "loss_scale_window": _SCALE["scale_window"],
            "hysteresis": _SCALE["delayed_shift"],
            "min_loss_scale": _SCALE["min_scale"],
        }
    return config


def make_scaler(options: TrainOptions) -> Any:
    """Make a loss scaler for stage 0 in fp16; None for other precisions."""
    if options.precision != "fp16":
        return None
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(**_SCALE)
