"""Token budgets in use during a run: tried out before the first step, and lowered where memory runs out."""

from __future__ import annotations

from collections.abc import Callable

from hotseat.config import Config
from hotseat.config.batches import token_budget
from hotseat.planning.budgets import Use, least_tokens, lowered_note, lowered_until, with_budget


class TokenBudgets:
    """Config of a run with the token budgets in use. warn: records a warning."""

    def __init__(self, config: Config, warn: Callable[[str], object]):
        self.config = config
        self._warn = warn

    def lower(self, use: Use, tokens: int, why: str) -> bool:
        """Use at most `tokens` tokens per micro-batch from now on; return whether that is fewer than before."""
        before = token_budget(getattr(self.config, use))
        if before is None or tokens >= before:
            return False
        self.config = with_budget(self.config, use, tokens)
        self._warn(lowered_note(why, use, tokens, before))
        return True

    def try_out(self, use: Use, fits: Callable[[int], bool], why: str) -> None:
        """Halve a budget until a micro-batch of that size fits on the devices. `fits` gets its number of tokens."""
        size, least = self.config.train.sequence_parallel_size, least_tokens(self.config)
        tokens = token_budget(getattr(self.config, use)) or least
        self.lower(use, lowered_until(lambda tokens: fits(tokens * size), tokens, least), why)
