"""Actions and states as tokens: numbers in bins, which are the last ids of the vocabulary.

Bin b is token `vocab_size - 1 - b` (the scheme of RT-2 and OpenVLA). A number within bounds is in one of `bins` bins of
equal width, and stands for the middle of its bin; actions that are numbered have a bin each. Any other token counts as
the nearest bin, as in OpenVLA: that is the last one, or the first for ids beyond the vocabulary, which models may have.

The last ids of many vision-language models are placeholders of images. A bin must not be one of them: bins are then
the ids before the first of these, and `vocab_size` is its id.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hotseat.envs.simulator import ActionSpec
from hotseat.errors import UserError


@dataclass(frozen=True)
class NumberTokens:
    """Tokens of vectors within bounds."""

    low: np.ndarray  # [D]
    high: np.ndarray  # [D]
    bins: int
    vocab_size: int
    is_numbered: bool = False

    @classmethod
    def of_actions(
        cls, spec: ActionSpec, bins: int, vocab_size: int, placeholders: Collection[int] = ()
    ) -> NumberTokens:
        """Make the tokens of vectors of this form. placeholders: tokens that stand for images."""
        bins = spec.num_values or bins
        while among := [token_id for token_id in placeholders if vocab_size - bins <= token_id < vocab_size]:
            vocab_size = min(among)
        if bins >= vocab_size:
            raise UserError(f"actions have {bins} bins, but the vocabulary has {vocab_size} tokens: set env.bins lower")
        return cls(np.array(spec.low), np.array(spec.high), bins, vocab_size, spec.num_values is not None)

    def encode(self, values: np.ndarray) -> list[int]:
        """Return the tokens of vectors: [..., D] to D tokens for each, in order."""
        if self.is_numbered:
            index = np.rint(values).astype(np.int64)
        else:
            width = np.where(self.high > self.low, self.high - self.low, 1.0) / self.bins
            index = np.floor((np.asarray(values, dtype=np.float64) - self.low) / width).astype(np.int64)
        index = np.clip(index, 0, self.bins - 1)
        tokens: list[int] = (self.vocab_size - 1 - index).reshape(-1).tolist()
        return tokens

    def decode(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the vectors of tokens, D of them for each: [num_vectors, D] float64."""
        last = self.vocab_size - 1
        bins = [min(max(last - token, 0), self.bins - 1) for token in token_ids]  # few, so without numpy
        index = np.array(bins, dtype=np.int64).reshape(-1, len(self.low))
        if self.is_numbered:
            return index.astype(np.float64)
        return self.low + (index + 0.5) * (self.high - self.low) / self.bins

    def is_bin(self, token_id: int) -> bool:
        """Tell whether a token stands for a number."""
        return self.vocab_size - self.bins <= token_id < self.vocab_size
