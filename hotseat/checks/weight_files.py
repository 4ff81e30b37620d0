"""Checks the weight files of a model's folder by their headers, without torch and without reading a weight."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes, as in the library
_AGAIN = "copy or download it again"


def weights_problem(folder: Path) -> str | None:
    """Return why a folder with a config.json has no weights that can be loaded, by file; None if it has."""
    if (folder / SINGLE).is_file():  # transformers takes it before an index
        tensors = _names_in(folder / SINGLE)
        return tensors if isinstance(tensors, str) else None
    if (folder / INDEX).is_file():
        return _index_problem(folder)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        return f"{folder} has {listed}, but neither {SINGLE} nor {INDEX}, which says which weights they hold"
    pickled = next((path.name for path in sorted(folder.glob("*.bin"))), None)
    if pickled is not None:
        return (
            f"{folder} has weights as {pickled} only, which may run code when it is loaded: convert it to safetensors"
            " (load it with transformers, then save_pretrained)"
        )
    return f"{folder} has a config.json but no weights: there is neither {SINGLE} nor {INDEX} in it"


def _index_problem(folder: Path) -> str | None:
    index = folder / INDEX
    try:
        names = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{index} cannot be read: {type(error).__name__}: {error}; {_AGAIN}"
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        return f"{index} has no table of weights: {_AGAIN}"
    files = sorted(set(names.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        return f"{index} lists {len(files)} files, and {', '.join(absent)} {_is(absent)} missing: {_AGAIN}"
    for file in files:
        tensors = _names_in(folder / file)
        if isinstance(tensors, str):
            return tensors
        lost = [name for name, place in names.items() if place == file and name not in tensors]
        if lost:
            return f"{folder / file} has no {lost[0]}, which {index} says is in it: {_AGAIN}"
    return None


def _is(words: list[str]) -> str:
    return "is" if len(words) == 1 else "are"


def _names_in(file: Path) -> Mapping[str, object] | str:
    """Return the tensors that a safetensors file holds by its header, or why it does not hold them."""
    try:
        with file.open("rb") as stored:
            size, start = os.fstat(stored.fileno()).st_size, stored.read(8)
            if start == b"version ":
                return f"{file} is a pointer of Git LFS, not weights: run `git lfs pull` in its repository"
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= _MAX_HEADER:
                return f"{file} is no safetensors file ({size:,} bytes): {_AGAIN}"
            header = stored.read(length)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}"
    if len(header) < length:
        return f"{file} is cut short within its header: it has {size:,} bytes; {_AGAIN}"
    try:
        tensors = {name: facts for name, facts in json.loads(header).items() if name != "__metadata__"}
        needed = 8 + length + max((facts["data_offsets"][1] for facts in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return f"{file} is no safetensors file: its header cannot be read; {_AGAIN}"
    if size < needed:
        return f"{file} is cut short: it has {size:,} bytes, and its header says {needed:,}; {_AGAIN}"
    return tensors
