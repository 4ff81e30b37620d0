"""Measures memory and use of this node's GPUs through the driver's management library, without a CUDA context."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from hotseat.cluster.lease import DeviceMemory


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent of the driver's last period, up to 1 s


def device_memory(name: str) -> DeviceMemory | None:
    """Measure the device that CUDA_VISIBLE_DEVICES calls by this name, an index or a UUID. None: no such GPU."""
    library = _library()
    handle = None if library is None else _handle(name)
    if library is None or handle is None:
        return None
    memory = _Memory()
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    return DeviceMemory(used=memory.used, total=memory.total)


def device_busy(name: str) -> float | None:
    """Return the share of the last moments in which this device computed; None: no such GPU, or it does not tell."""
    library = _library()
    handle = None if library is None else _handle(name)
    if library is None or handle is None:
        return None
    use = _Utilization()
    return use.gpu / 100 if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0 else None


def own_device_name(index: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES calls a device of this node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


@functools.cache
def _library() -> Any | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


@functools.cache
def _handle(name: str) -> Any | None:
    library, handle = _library(), ctypes.c_void_p()
    assert library is not None
    if name.isdigit():
        status = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        status = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    return handle if status == 0 else None
