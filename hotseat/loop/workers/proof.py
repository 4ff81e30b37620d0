"""What both sides of a push compute to prove that they hold the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Canary:
    """Answers that the policy sampled, of whose tokens trainer and engines compute log-probs after every push."""

    sequences: tuple[tuple[int, ...], ...]  # prompt and answer
    num_prompt: tuple[int, ...]  # tokens of each that are the prompt's
    temperature: float

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.sequences)) - sum(self.num_prompt)

    def sampled(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """The scores of sampled tokens alone, sequence by sequence, from those of all tokens."""
        return [score for row, start in zip(scores, self.num_prompt, strict=True) for score in row[start:]]


@dataclass(frozen=True)
class Proof:
    """Proof of what one side holds after a push: digests, and log-probs of the canary's sampled tokens.

    log_probs: None where there is no canary yet, or where the engine needs its cache to score and does not have it.
    """

    digests: dict[str, int]
    log_probs: list[float] | None
    undigested: frozenset[str] = frozenset()  # weights that no digest reaches: the canary guards them
