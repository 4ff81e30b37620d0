"""Rewards of episodes.

    RewardFunction   a user's `reward_func(queries, prompts, labels)`, in processes of its own
    RewardTally      counts the failed rewards of a step, and checks that they are not too many
    Score            the reward of one sample; `hotseat.types.Failed` if there is none

A reward that failed is never a zero: its sample is dropped and counted.
"""

from hotseat.rewards.answers import Score
from hotseat.rewards.function import RewardFunction
from hotseat.rewards.tally import RewardTally

__all__ = ["RewardFunction", "RewardTally", "Score"]
