"""Check that both sides of a push hold the same weights: digests, and log-probs of the canary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hotseat.weights.bucket import Bucket
from hotseat.weights.transfer import Receiver


@dataclass(frozen=True)
class Canary:
    """Answers sampled by the policy; trainer and engines compute log-probs of their tokens after every push."""

    sequences: tuple[tuple[int, ...], ...]  # prompt and answer
    num_prompt: tuple[int, ...]  # prompt tokens of each sequence
    temperature: float
    images: tuple[tuple[str, ...], ...] = ()  # of each sequence; empty: none has any

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.sequences)) - sum(self.num_prompt)

    def sampled(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """Return the scores of sampled tokens alone, sequence by sequence, from those of all tokens."""
        return [score for row, start in zip(scores, self.num_prompt, strict=True) for score in row[start:]]


@dataclass(frozen=True)
class WeightCheck:
    """State of one side of a push: digests, and log-probs of the canary's sampled tokens.

    log_probs: None where there is no canary yet, or where the engine needs its cache to score and it is offloaded.
    """

    digests: dict[str, int]
    log_probs: list[float] | None
    undigested: frozenset[str] = frozenset()  # weights without a digest, which only the canary guards


class TakesWeights(ABC):
    """Worker that gets the actor's weights: an engine, or a rank of the inference role."""

    _receiver: Receiver

    def begin_load(self, version: int) -> None:
        """Get ready for the buckets of a version."""
        self._receiver.begin(version)

    def take_bucket(self, bucket: Bucket) -> None:
        """Load the weights of one bucket."""
        self._receiver.take(bucket)

    @abstractmethod
    def finish_load(self, version: int, canary: Canary | None) -> WeightCheck:
        """Return the proof of what was loaded."""
