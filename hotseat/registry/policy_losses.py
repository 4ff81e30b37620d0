"""Policy losses: an entry for each, with what others need to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotseat.registry.lookup import Table
from hotseat.user_functions import is_user_function

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True)
class PolicyLossEntry:
    """Facts about a policy loss.

    function: "module:function" that takes log-probs, old ones, advantages and the layout (with `takes_mask` its mask),
    and by name what the facts say. It returns a loss per token, or a `PolicyLoss`.
    """

    name: str  # of `algorithm.policy_loss`
    summary: str  # for the docs
    formula: str
    source: str
    function: str
    takes_mask: bool = False
    has_clip: bool = True  # takes `eps_low` and `eps_high`
    has_gate: bool = False  # takes `temperature_pos` and `temperature_neg`
    has_dual_clip: bool = False  # takes `dual_clip`
    has_steps: bool = False  # takes `starts`: the first of the tokens that share a ratio
    has_episode_ratio: bool = False  # one per episode; takes `ratio_base_log_probs`, the engine's, to correct by it
    aggregation: Aggregation | None = None  # of its paper; None: it has none of its own
    has_lower_bound: bool = True  # in its paper; else that has clip_low 1
    learns_without_advantage: bool = False  # a token whose advantage is 0 may have a gradient


DEFAULT_POLICY_LOSS = "ppo"

POLICY_LOSSES = Table[PolicyLossEntry](
    "policy loss",
    PolicyLossEntry(
        "ppo",
        "Clipped ratio of each token, or of the tokens of a step; with the dual clip if it is set.",
        "−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)·A)",
        "Schulman et al. 2017; clip-higher: DAPO, Yu et al. 2025; dual clip: Ye et al. 2020",
        "hotseat.algorithms.policy_loss:ppo_loss",
        takes_mask=True,
        has_dual_clip=True,
        has_steps=True,
    ),
    PolicyLossEntry(
        "gspo",
        "Clipped ratio of each episode, the geometric mean of its tokens'.",
        "the same with ρ = exp(mean over the episode of log π − log π_old)",
        "GSPO and GSPO-token, Zheng et al. 2025",
        "hotseat.algorithms.policy_loss:gspo_loss",
        has_dual_clip=True,
        has_episode_ratio=True,
        aggregation="sequence_mean",
    ),
    PolicyLossEntry(
        "cispo",
        "REINFORCE on each token, weighted by its bounded ratio: every token keeps a gradient.",
        "−sg(clip(ρ, 1 − ε_low, 1 + ε_high))·A·log π",
        "CISPO, MiniMax-M1, 2025",
        "hotseat.algorithms.policy_loss:cispo_loss",
        takes_mask=True,
        aggregation="token_mean",
        has_lower_bound=False,
    ),
    PolicyLossEntry(
        "sapo",
        "A gate in the place of the clip: the further a token's ratio is from 1, the less it learns.",
        "−(4/τ)·σ(τ·(ρ − 1))·A, with a τ for A > 0 and another one for the rest",
        "SAPO, Gao et al. 2025",
        "hotseat.algorithms.policy_loss:sapo_loss",
        takes_mask=True,
        has_clip=False,
        has_gate=True,
        aggregation="sequence_mean",
    ),
    PolicyLossEntry(
        "gmpo",
        "Geometric mean of an episode's ratios, each of which is clipped before.",
        "−A·exp(mean over the episode of log ρ, at most log(1 + ε_high) if A > 0, at least log(1 − ε_low) if not)",
        "GMPO, Zhao et al. 2025",
        "hotseat.algorithms.policy_loss:gmpo_loss",
        has_episode_ratio=True,
        aggregation="sequence_mean",
    ),
)

# What is known of `FILE.py:FUNCTION`.
USER_POLICY_LOSS = PolicyLossEntry(
    "FILE.py:FUNCTION", "Custom.", "", "", "", aggregation="token_mean", learns_without_advantage=True
)


def policy_loss_entry(name: str) -> PolicyLossEntry:
    """Return the entry of a policy loss, built-in or a user's."""
    return USER_POLICY_LOSS if is_user_function(name) else POLICY_LOSSES.entry(name)
