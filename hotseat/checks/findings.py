"""Findings of `hotseat check` on this machine: packages, devices, limits; and how to get what is missing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hotseat import __version__
from hotseat.cluster.device_memory import device_memory
from hotseat.machine import available_bytes
from hotseat.registry.backends import BACKENDS
from hotseat.registry.engines import ENGINES

LEAST_SHM_GIB, LEAST_TEMPORARY_GIB, LEAST_FILES = 1.0, 5.0, 4096
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """A fact about a machine. advice: what to do about it; nothing if it is fine. stops: no run can start so."""

    what: str
    text: str
    advice: str = ""
    stops: bool = False


def findings() -> Iterator[Finding]:
    """Look at this machine: first for what is quick to find, last for what has to be imported."""
    for check in CHECKS:
        yield from check()


def basics() -> Iterator[Finding]:
    yield Finding("Hotseat", f"{__version__}, Python {platform.python_version()} on {platform.machine()}")
    for name in ("torch", "transformers", "ray"):
        version = _version(name)
        if version is None:
            yield Finding(name, "not installed", "install Hotseat with its dependencies: docs/install.md", stops=True)
        else:
            yield Finding(name, version)


def host() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("host", f"{cores} cores, {available_bytes() / GIB:.1f} GiB of memory available")


def shared_memory() -> Iterator[Finding]:
    """Ray's objects and pushes of weights lie there."""
    if not Path("/dev/shm").is_dir():
        return
    free = shutil.disk_usage("/dev/shm").free / GIB
    advice = (
        f"give it {LEAST_SHM_GIB:.0f} GiB or more, such as docker run --shm-size 8g" if free < LEAST_SHM_GIB else ""
    )
    yield Finding("/dev/shm", f"{free:.1f} GiB free", advice)


def temporary_files() -> Iterator[Finding]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / GIB
    advice = (
        "make room, or set TMPDIR: Ray writes its objects there when memory is full"
        if free < LEAST_TEMPORARY_GIB
        else ""
    )
    yield Finding("temporary files", f"{folder}: {free:.0f} GiB free", advice)


def open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {min(hard, 65536)}: each process of Ray has many connections" if soft < LEAST_FILES else ""
    yield Finding("open files", f"at most {soft}", advice)


def compiler() -> Iterator[Finding]:
    """Triton and torch.compile make their kernels with it."""
    missing = [] if shutil.which("cc") or shutil.which("gcc") else ["a C compiler (apt-get install gcc)"]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("Python's headers (apt-get install python3-dev)")
    text = "found, with Python's headers" if not missing else f"no {' and no '.join(missing)}"
    yield Finding("C compiler", text, "needed on GPUs, for kernels and compiled layers" if missing else "")


def engines() -> Iterator[Finding]:
    from hotseat.rollout.kinds import engine_kind

    for entry in ENGINES.values():
        if entry.package is not None:
            problem = engine_kind(entry.name).problem()
            yield Finding(f"engine {entry.name}", _installed(entry.package) or "not installed", problem or "")


def backends() -> Iterator[Finding]:
    for entry in BACKENDS.values():
        if entry.package is not None:
            there = _version(entry.package)
            yield Finding(f"backend {entry.name}", there or "not installed", "" if there else entry.hint)


def sandbox() -> Iterator[Finding]:
    there = shutil.which("bwrap")
    yield Finding(
        "sandbox", there or "no bubblewrap", "" if there else "apt-get install bubblewrap, to grade generated code"
    )


def hub() -> Iterator[Finding]:
    is_offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    token = "with a token" if os.environ.get("HF_TOKEN") else "without a token"
    yield Finding("model hub", "not asked (HF_HUB_OFFLINE)" if is_offline else token)


def devices() -> Iterator[Finding]:
    """Import torch, and compare what it sees with what the driver of the devices says."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count and device_memory("0") is not None:
        advice = f"torch {torch.__version__} cannot use it: install a torch for CUDA that the device's driver supports"
        yield Finding("devices", "a GPU, which torch does not see", advice, stops=True)
    elif not count:
        yield Finding("devices", "no GPU: runs compute on CPUs")
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        used = (total - free) / GIB
        advice = f"{used:.1f} GiB are in use by other processes" if used > 2 else ""
        yield Finding(f"device {number}", f"{torch.cuda.get_device_name(number)}, {total / GIB:.0f} GiB", advice)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(basics, host, shared_memory, temporary_files, open_files, compiler, engines, backends, sandbox, hub, devices),
)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _installed(package: str) -> str | None:
    from hotseat.cluster.node_facts import ABSENT, versions

    version = versions().get(package, ABSENT)
    return None if version == ABSENT else version
