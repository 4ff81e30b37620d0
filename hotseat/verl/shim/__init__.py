"""The directory that `hotseat verl-path` prints: on PYTHONPATH, its package `verl` has verl's command `main_ppo`."""

from __future__ import annotations

from pathlib import Path

from hotseat.shim_package import ShimPackage

DIRECTORY = Path(__file__).resolve().parent
SHIM = ShimPackage("verl", "verl", DIRECTORY, "which runs verl's command on Hotseat", "hotseat.cli.main_ppo")
