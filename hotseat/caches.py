"""Folders for what compilers compile: in the user's cache directory, so that the next start finds it there.

Inductor's default is a temporary directory, which a restart of the machine or of a container empties. Each compiler
keeps its files apart by versions, devices and sources. A variable that is set already takes precedence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# Variable of each compiler and its folder in `~/.cache/hotseat`.
FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of Hotseat in the user's cache directory."""
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path(environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")) / "hotseat"


def keep_compiled(environment: MutableMapping[str, str] | None = None) -> None:
    """Set the variables in this process's environment, or in the one passed. Call it before torch is imported.

    Where the user has no directory to write to, compilers keep their defaults.
    """
    environment = os.environ if environment is None else environment
    folder = cache_folder(environment)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and os.access(folder, os.W_OK):
        for variable, name in FOLDERS.items():
            environment.setdefault(variable, str(folder / name))
