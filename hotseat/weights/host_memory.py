"""Bytes in host memory, which the cluster hands to other processes of a node without a copy per receiver."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class HostData:
    """The bytes themselves, as numpy: that is what the cluster can put into shared memory."""

    array: np.ndarray  # [num_bytes] uint8

    def open(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.array)


def host_data(packed: Tensor) -> HostData:
    """Copy [num_bytes] uint8 from any device to host memory."""
    return HostData(packed.cpu().numpy())
