"""Rewards of a run in which nothing scores answers, since the policy learns from a teacher alone."""

from __future__ import annotations

from concurrent.futures import Future

from hotseat.failed import Failed
from hotseat.rewards.answers import Score
from hotseat.rewards.scorer import SampleGroup, Scorer


class NoRewards(Scorer):
    """Gives every sample the reward 0."""

    def score(self, group: SampleGroup) -> Future[list[Score | Failed]]:
        scored: Future[list[Score | Failed]] = Future()
        scored.set_result([Score(0.0, 0.0) for _ in group.ids])
        return scored

    def close(self) -> None:
        """There is nothing to end."""
