"""The directory that `hotseat rlinf-path` prints: on PYTHONPATH, its package `rlinf` has what RLinf's script needs."""

from __future__ import annotations

from pathlib import Path

from hotseat.shim_package import ShimPackage

DIRECTORY = Path(__file__).resolve().parent
SHIM = ShimPackage("rlinf", "RLinf", DIRECTORY, "whose rlinf is Hotseat's")
