"""Warns of a dtype that the CPU of this machine computes slowly."""

from __future__ import annotations

from pathlib import Path

from hotseat.config import Config

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")  # Intel and AMD; ARM


def has_bf16_units(cpuinfo: str) -> bool | None:
    """Tell from the text of /proc/cpuinfo whether the CPU multiplies in bf16; None if the text does not say."""
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return any(flag in lines[0] for flag in BF16_FLAGS) if lines else None


def slow_dtype(config: Config, cpuinfo: str | None = None) -> str | None:
    """Return a warning about bf16 on a CPU without units for it; None if there is nothing to warn of."""
    if config.train.dtype != "bf16":
        return None
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            return None
    if has_bf16_units(cpuinfo) is not False:
        return None
    return (
        "train.dtype is bf16, and this CPU has no units for it (/proc/cpuinfo lists none of"
        f" {', '.join(BF16_FLAGS)}): a step can take many times as long as in fp32. Set train.dtype to fp32 or leave it"
        " unset; in OpenRLHF's commands, give --param_dtype fp32"
    )
