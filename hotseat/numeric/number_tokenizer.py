"""The tokenizer of policies that act in numbers: a text is numbers between spaces, a token is one of them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizer

from hotseat.numeric.float_tokens import NUM_IDS, ids_of, values_of

NOT_A_NUMBER = int(ids_of(np.array([np.nan]))[0])


class NumberTokenizer(PreTrainedTokenizer):
    """Writes numbers out, and reads them."""

    model_input_names: ClassVar[list[str]] = ["input_ids"]
    reads_numbers = True

    @property
    def vocab_size(self) -> int:
        return NUM_IDS

    @property
    def eos_token_id(self) -> int:
        """Return the id of no number: an episode's end is not sampled."""
        return NOT_A_NUMBER

    def __len__(self) -> int:
        return NUM_IDS

    def get_vocab(self) -> dict[str, int]:
        return {}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return int(ids_of(np.array([float(token)]))[0])

    def _convert_id_to_token(self, index: int) -> str:
        return f"{float(values_of([index])[0]):.9g}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(f"{token} " for token in tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()
