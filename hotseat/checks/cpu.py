"""Finds a dtype that the CPU of this machine computes slowly, or that an engine cannot compute on it."""

from __future__ import annotations

import platform
from pathlib import Path

from hotseat.config import Config
from hotseat.registry.engines import DEFAULT_ENGINE, engine_entry

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")  # Intel and AMD; ARM
_FP32 = "Set train.dtype to fp32 or leave it unset; in OpenRLHF's commands, give --param_dtype fp32"


def has_bf16_units(cpuinfo: str) -> bool | None:
    """Tell from the text of /proc/cpuinfo whether the CPU multiplies in bf16; None if the text does not say."""
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return any(flag in lines[0] for flag in BF16_FLAGS) if lines else None


def slow_dtype(config: Config, cpuinfo: str | None = None) -> str | None:
    """Return a warning about bf16 on a CPU without units for it; None if there is nothing to warn of."""
    if config.train.dtype != "bf16" or has_bf16_units(_cpuinfo() if cpuinfo is None else cpuinfo) is not False:
        return None
    return (
        "train.dtype is bf16, and this CPU has no units for it (/proc/cpuinfo lists none of"
        f" {', '.join(BF16_FLAGS)}): a step can take many times as long as in fp32. {_FP32}"
    )


def engine_dtype_problem(config: Config, cpuinfo: str | None = None, machine: str | None = None) -> str | None:
    """Return why the engine cannot sample in bf16 on this CPU; None if it can. vLLM's build for ARM would end."""
    machine, engine = machine or platform.machine(), engine_entry(config.rollout.engine)
    if config.train.dtype != "bf16" or machine not in engine.needs_bf16_units:
        return None
    if has_bf16_units(_cpuinfo() if cpuinfo is None else cpuinfo) is not False:
        return None
    return (
        f"train.dtype is bf16 and rollout.engine {engine.name}, whose build for {machine} needs a CPU with units for"
        f" bf16, which this one lacks. {_FP32}, or set rollout.engine to {DEFAULT_ENGINE}"
    )


def _cpuinfo() -> str:
    """Return the text of /proc/cpuinfo; nothing where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
