"""Numbers as tokens, exactly: the id of a float32 is its 32 bits, read as an unsigned integer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NUM_IDS = 2**32


def ids_of(values: np.ndarray) -> np.ndarray:
    """Return the id of each number, as float32: any shape in, int64 of the same shape out."""
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.int64)


def values_of(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the number of each id: float32, of the same shape."""
    return np.asarray(token_ids, dtype=np.int64).astype(np.uint32).view(np.float32)


def tensor_of(token_ids: Tensor) -> Tensor:
    """Return the number of each id: int64 in, float32 of the same shape out, on the same device."""
    return token_ids.to(torch.int32).view(torch.float32)


@dataclass(frozen=True)
class FloatTokens:
    """Tokens of action vectors, which are carried out within these bounds."""

    low: np.ndarray  # [D]
    high: np.ndarray  # [D]

    def decode(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the vectors of tokens, D of them for each: [num_vectors, D] float64, within bounds."""
        values = values_of(token_ids).astype(np.float64).reshape(-1, len(self.low))
        return np.clip(values, self.low, self.high)

    def is_bin(self, token_id: int) -> bool:
        """Tell whether a token stands for a number: each does."""
        return True
