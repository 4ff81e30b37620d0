"""Exported models on disk: each is complete or absent, and says which run and step it is of.

A model is written to a folder beside its own, or inside where that exists already, and put into place when every byte
is on disk: a new folder by one rename. Where the folder exists, the files of the model that it holds are replaced, and
all else in it is left alone: OpenRLHF's default has the checkpoints in there. `config.json`, without which nothing
loads the folder as a model, goes first and comes last.

`hotseat.json` inside is the marker: {"run": "rl-1", "step": 20, "checkpoint": digest, "files": {name: bytes}}. The
digest is that of the checkpoint of that step, null if there is none: names of runs are used again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotseat.files import sync, sync_tree

MARKER = "hotseat.json"
_CONFIG = "config.json"
_WRITING = "exporting"
# Of a model without a marker, these are replaced, too: an engine would load them beside the new ones.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Origin:
    """The run and the step that a model is of. checkpoint: the digest of that step's checkpoint, if there is one."""

    run: str
    step: int
    checkpoint: str | None


def begin_export(folder: Path) -> Path:
    """Make an empty folder to write a model into that will go to `folder`."""
    beside, inside = folder.with_name(f".{folder.name}.{_WRITING}"), folder / f".{_WRITING}"
    for leftover in (beside, inside):
        shutil.rmtree(leftover, ignore_errors=True)
    # Inside, if it can be: a folder that exists may be on another disk than the one around it.
    writing = inside if folder.is_dir() else beside
    writing.mkdir(parents=True)
    return writing


def finish_export(writing: Path, folder: Path, more: Mapping[str, bytes], origin: Origin) -> None:
    """Put a model that was written after `begin_export` into place. more: further files, such as the tokenizer's."""
    for name, content in more.items():
        (writing / name).parent.mkdir(parents=True, exist_ok=True)
        (writing / name).write_bytes(content)
    files = {str(path.relative_to(writing)): path.stat().st_size for path in writing.rglob("*") if path.is_file()}
    (writing / MARKER).write_text(json.dumps({**asdict(origin), "files": files}, indent=1) + "\n")
    sync_tree(writing)
    if writing.parent != folder:
        writing.rename(folder)
        sync(folder.parent)
        return
    for name in (_CONFIG, MARKER, *_replaced(folder)):
        _remove(folder / name)
    sync(folder)
    last = [_CONFIG, MARKER]
    for path in sorted(writing.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
        _remove(folder / path.name)
        path.rename(folder / path.name)
    sync(folder)
    writing.rmdir()


def is_exported(folder: Path, origin: Origin) -> bool:
    """Tell whether a folder holds the whole model of that run and step."""
    marker = _marker(folder)
    if any(name not in marker or marker[name] != value for name, value in asdict(origin).items()):
        return False
    # Sizes of weights alone: users may edit the rest.
    return all(
        (folder / name).exists() and (not name.endswith(".safetensors") or (folder / name).stat().st_size == num_bytes)
        for name, num_bytes in marker["files"].items()
    )


def run_of(folder: Path) -> str | None:
    """Return the name of the run whose model a folder holds; None if it does not say."""
    return _marker(folder).get("run")


def _marker(folder: Path) -> dict[str, Any]:
    """Return what the marker of a folder says; nothing if there is none, or if it is damaged."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return {**marker, "run": str(marker["run"]), "files": dict(marker["files"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _replaced(folder: Path) -> list[str]:
    """List the files of the model that a folder holds: those that its marker names, or weights."""
    names = _marker(folder).get("files")
    if names is None:
        return [path.name for pattern in _WEIGHTS for path in folder.glob(pattern)]
    inside = os.path.realpath(folder)
    return [name for name in names if os.path.realpath(folder / name).startswith(f"{inside}{os.sep}")]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
