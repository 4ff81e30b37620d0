"""The directory that `hotseat rlinf-path` prints: on PYTHONPATH, its package `rlinf` has what RLinf's script imports.

A process in which another rlinf can be imported is refused: which of the two runs would depend on the order of paths.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent


def refuse_another_rlinf() -> None:
    """Raise ImportError if another rlinf can be imported."""
    place = find_another_rlinf()
    if place is not None:
        raise ImportError(
            f"PYTHONPATH has {DIRECTORY}, whose rlinf is Hotseat's, but RLinf itself can be imported too, from {place}:"
            f" uninstall it or use an environment without it, or take {DIRECTORY} out of PYTHONPATH to run RLinf",
            name="rlinf",
        )


def find_another_rlinf() -> str | None:
    """Return the file from which a rlinf other than ours can be imported, or None if there is none."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec("rlinf", [entry for entry in sys.path if not _is_ours(entry)])
        else:  # such as that of a package installed in editable mode
            spec = finder.find_spec("rlinf", None)
        if isinstance(spec, ModuleSpec) and spec.origin is not None:
            return spec.origin
    return None


def _is_ours(entry: str) -> bool:
    return Path(entry).resolve() == DIRECTORY
