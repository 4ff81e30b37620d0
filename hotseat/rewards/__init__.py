"""Rewards of episodes.

    Scorer           the contract of what scores groups
    RewardFunction   a user's `reward_func(queries, prompts, labels)`, in processes of its own
    Graders          built-in graders (`Grader`), whose weighted verdicts are the reward
    Sandbox          runs generated code, within `SandboxSettings`
    RewardService    servers that score by HTTP; in `hotseat.rewards.posting`, because it imports aiohttp
    Judge            asks a model for verdicts by HTTP; in `hotseat.rewards.judge`, for the same reason
    RewardTally      counts the failed rewards of a step, and checks that they are not too many
    Score            the reward of one sample; `hotseat.types.Failed` if there is none

A reward that failed is never a zero: its sample is dropped and counted.
"""

from hotseat.rewards.answers import Score
from hotseat.rewards.function import RewardFunction
from hotseat.rewards.graders import Grader, Graders
from hotseat.rewards.sandbox import Sandbox, SandboxSettings
from hotseat.rewards.scorer import Scorer
from hotseat.rewards.tally import RewardTally

__all__ = ["Grader", "Graders", "RewardFunction", "RewardTally", "Sandbox", "SandboxSettings", "Score", "Scorer"]
