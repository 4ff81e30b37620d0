"""Messages between driver and rollout hosts about groups: small facts, never tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotseat.loop.workers.turn_times import TurnTimes
from hotseat.types import Prompt

GroupKey = tuple[int, int]  # pass over the data, prompt
EVALUATION = -1  # the pass over the data that evaluation samples belong to


@dataclass(frozen=True)
class Job:
    """A prompt to be answered `num_samples` times."""

    prompt: Prompt
    epoch: int
    num_samples: int

    @property
    def key(self) -> GroupKey:
        return self.epoch, self.prompt.index


@dataclass(frozen=True)
class GivenUp:
    """A group that was sampled beyond those of a step, and was not complete when enough others were.

    lengths: tokens that the policy sampled in each of its answers that had ended.
    """

    epoch: int
    prompt: int
    num_samples: int
    lengths: tuple[int, ...] = ()

    @property
    def key(self) -> GroupKey:
        return self.epoch, self.prompt


@dataclass(frozen=True)
class Fetched:
    """Report of a host on the groups that it works on."""

    facts: list[GroupFacts]  # of those that have finished since the last report
    num_unscored: int  # groups that wait for a reward model, which takes them by `to_score`
    num_sent_again: int  # requests since the host was connected, because their engine died


@dataclass(frozen=True)
class GroupFacts:
    """Summary of a group for the driver: an entry per sample that has a reward, in sample order."""

    epoch: int
    prompt: int
    source: str
    samples: tuple[int, ...]  # their positions in the group
    rewards: tuple[float, ...]
    scores: tuple[float, ...]
    num_sampled: tuple[int, ...]  # tokens that the policy sampled
    num_tokens: tuple[int, ...]  # all tokens, with those of context and environment
    truncated: tuple[bool, ...]
    failures: tuple[tuple[int, str], ...]  # positions of the other samples, and why they have no reward
    extra: tuple[dict[str, float], ...] = ()
    versions: tuple[tuple[int, int], ...] = ()  # oldest and newest of the weights that sampled each
    dropped_because: str | None = None  # by a custom component
    episode_s: tuple[float, ...] = field(default=(), compare=False)  # seconds of each episode, also of failed ones
    turn_times: TurnTimes = field(default=TurnTimes(), compare=False)  # of all samples, as far as they are known
    scoring_s: float = field(default=0.0, compare=False)  # seconds from the last answer to the rewards

    @property
    def key(self) -> GroupKey:
        return self.epoch, self.prompt
