"""Advantage estimators: an entry for each, with what others need to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotseat.registry.lookup import Table
from hotseat.registry.policy_losses import Aggregation
from hotseat.user_functions import is_user_function


@dataclass(frozen=True)
class EstimatorEntry:
    """Facts about an advantage estimator.

    compare: "module:function" that compares rewards with those of the group, as `group_mean_centred` does, or with the
    normalisations of groups as `group_normalised` does; None: rewards are not compared. returns: "module:function" that
    makes returns of the rewards on tokens, as `discounted_returns` does, or with a critic as `gae` does.
    """

    name: str  # of `algorithm.estimator`
    summary: str  # for the docs
    formula: str
    source: str
    compare: str | None = None
    compares_episodes: bool = False  # by their totals alone: `compare` is called by `call_estimator`
    takes_parts: bool = False  # `compare` gets the rewards apart, by `parts` and `part_weights`, if it asks for them
    compares_parts: bool = False  # it compares these, and not their totals
    returns: str = "hotseat.algorithms.advantages:discounted_returns"
    needs_critic: bool = False
    discounts: bool = False  # other estimators have γ = 1, as in OpenRLHF
    # Divides by the deviation of the step's tokens, of the group, or of the group and then of the step's episodes.
    normalisation: Literal["batch", "group", "episodes"] | None = None
    aggregation: Aggregation | None = None  # of its paper, where the policy loss is not one of episodes

    @property
    def needs_group(self) -> bool:
        return self.compare is not None

    @property
    def credits_own_turns(self) -> bool:
        """Return whether turns can be credited with their own rewards alone: compared one by one, undiscounted."""
        return self.needs_group and not self.compares_episodes and not self.discounts

    @property
    def places_turn_rewards(self) -> bool:
        """Return whether rewards of turns are placed where they were earned, and nothing is compared."""
        return not self.needs_group and not self.compares_episodes


DEFAULT_ESTIMATOR = "group_norm"

ESTIMATORS = Table[EstimatorEntry](
    "advantage estimator",
    EstimatorEntry(
        "gae",
        "PPO with a critic.",
        "Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ·V_{t+1} − V_t",
        "GAE, Schulman et al. 2015",
        returns="hotseat.algorithms.advantages:gae",
        needs_critic=True,
        discounts=True,
        normalisation="batch",
    ),
    EstimatorEntry(
        "reinforce",
        "Returns of each token, without a baseline.",
        "G_t = Σ_k γ^k r_{t+k}",
        "REINFORCE++, Hu et al. 2025",
        discounts=True,
        normalisation="batch",
    ),
    EstimatorEntry(
        "rloo",
        "Reward less the mean of the other answers.",
        "r − mean of the others",
        "RLOO, Ahmadian et al. 2024",
        compare="hotseat.algorithms.baselines:leave_one_out",
    ),
    EstimatorEntry(
        "reinforce_baseline",
        "Reward less the mean of the group, normalised over the step.",
        "r − mean(group)",
        "REINFORCE++-baseline, Hu et al. 2025",
        compare="hotseat.algorithms.baselines:group_mean_centred",
        normalisation="batch",
    ),
    EstimatorEntry(
        "group_norm",
        "Reward less the mean of the group, by its deviation.",
        "(r − mean) / (std + eps)",
        "GRPO, Shao et al. 2024",
        compare="hotseat.algorithms.baselines:group_normalised",
        normalisation="group",
    ),
    EstimatorEntry(
        "dr_grpo",
        "Reward less the mean of the group.",
        "r − mean",
        "Dr. GRPO, Liu et al. 2025",
        compare="hotseat.algorithms.baselines:group_mean_centred",
        aggregation="constant",
    ),
    EstimatorEntry(
        "gdpo",
        "Each of several rewards less its mean of the group, by its deviation; then their sum, over the episodes.",
        "A = Σ_k w_k (r_k − mean_k) / (std_k + eps), then (A − mean(A)) / std(A) of the step's episodes",
        "GDPO, Liu et al. 2026",
        compare="hotseat.algorithms.baselines:parts_normalised",
        compares_episodes=True,
        takes_parts=True,
        compares_parts=True,
        normalisation="episodes",
    ),
)

# What is known of `FILE.py:FUNCTION`.
USER_ESTIMATOR = EstimatorEntry("FILE.py:FUNCTION", "Custom.", "", "", compares_episodes=True, takes_parts=True)


def estimator_entry(name: str) -> EstimatorEntry:
    """Return the entry of an estimator, built-in or a user's."""
    return USER_ESTIMATOR if is_user_function(name) else ESTIMATORS.entry(name)
