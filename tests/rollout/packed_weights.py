"""Weights to unpack in other processes, which import this module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch


class PackedWeights:
    """Named tensors that may be unpacked in other processes only; each of these leaves its process id in a folder."""

    def __init__(self, named_tensors: list[tuple[str, torch.Tensor]], folder: Path):
        self._named_tensors = named_tensors
        self._folder = folder
        self._packed_by = os.getpid()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert os.getpid() != self._packed_by, "unpacked where it was packed"
        (self._folder / str(os.getpid())).touch()
        yield from self._named_tensors
