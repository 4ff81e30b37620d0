"""The type of the computation where `train.dtype` is unset, chosen by the devices."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal

from hotseat.config.schema import Config

Dtype = Literal["bf16", "fp16", "fp32"]

_FOR_16_BITS = ("train.fp32_master", "rollout.fp32_head")  # options that change nothing in fp32


def dtype_of(config: Config) -> Dtype:
    """Return the type of the computation, which must be set or chosen already."""
    assert config.train.dtype is not None, "with_dtype comes first"
    return config.train.dtype


def with_dtype(config: Config, has_gpus: bool) -> Config:
    """Return the config with a type: the one that is set, or bf16 on GPUs and fp32 on CPUs."""
    return config if config.train.dtype is not None else _with(config, "bf16" if has_gpus else "fp32")


def with_dtype_of(config: Config, other: Config) -> Config:
    """Return the config with the type of another one, such as that of a checkpoint, unless it sets one itself."""
    if config.train.dtype is not None or other.train.dtype is None:
        return config
    return _with(config, other.train.dtype)


def idle_in_fp32(config: Config) -> list[str]:
    """List the keys of options for 16-bit computations that a config sets."""
    default = Config()
    return [key for key in _FOR_16_BITS if attrgetter(key)(config) != attrgetter(key)(default)]


def _with(config: Config, dtype: Dtype) -> Config:
    config = config.with_options({"train.dtype": dtype})
    if dtype != "fp32":
        return config
    # Reset options without effect, which are errors in a file: a run's saved config must load again.
    default = Config()
    return config.with_options({key: attrgetter(key)(default) for key in idle_in_fp32(config)})
