"""A component of one's own: it drops groups whose answers are all alike, and takes a part of the reward from copies.

    components:
      variety: {path: examples/components/variety.py:Variety, kwargs: {penalty: 0.5}}
    cluster:
      component_placement: {actor: 0-3, rollout: 0-3, variety: 0-1}    # on the actor's devices unless placed
    flow:                                                              # as without a flow
      - {name: rollout, run: [rollout]}
      - {name: compare, run: [variety]}
      - {name: prepare, run: [actor]}
      - {name: update, train: [actor]}
      - {name: sync, push: [rollout]}

metrics.jsonl has `components/variety/groups`, `components/variety/dropped` and `components/variety/copies`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotseat import GroupChange, PromptGroup


class Variety:
    """Compares the answers to a prompt. penalty: of an answer that an earlier sample of the group has given."""

    def __init__(self, penalty: float = 0.5):
        self._penalty = penalty

    def run(self, groups: Sequence[PromptGroup]) -> list[GroupChange | None]:
        """Return a decision about each group; None would leave it as it is."""
        return [self._decide(group) for group in groups]

    def _decide(self, group: PromptGroup) -> GroupChange:
        answers = [sample.episode.query for sample in group.samples]
        is_copy = [answer in answers[:at] for at, answer in enumerate(answers)]
        rewards = [
            sample.reward - self._penalty * copied for sample, copied in zip(group.samples, is_copy, strict=True)
        ]
        is_alike = len(set(answers)) == 1
        return GroupChange(rewards, "all answers are alike" if is_alike else None, {"copies": float(sum(is_copy))})
