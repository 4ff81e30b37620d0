"""What an episode is worth.

    RewardFunction   a user's `reward_func(queries, prompts, labels)`, in processes of its own
    RewardTally      how many rewards of a step failed, and whether that is too many
    Score            what came out for one sample; `hotseat.types.Failed` where nothing did

A reward that failed is never a zero: its sample is dropped and counted.
"""

from hotseat.rewards.answers import Score
from hotseat.rewards.function import RewardFunction
from hotseat.rewards.tally import RewardTally

__all__ = ["RewardFunction", "RewardTally", "Score"]
