"""The maths of post-training: values in, values out.

Tensors are flat, one value per token, with a `TokenLayout` beside them (see `hotseat.types`). A token that the policy
did not sample is never read, so its value cannot reach a loss, an advantage or a gradient. float64 stays float64.
`docs/algorithms.md` lists the formulas, the framework whose variant each of them is, and the tests.
"""

from hotseat.algorithms.advantages import (
    Advantages,
    Moments,
    TurnCredit,
    compute_advantages,
    discounted_returns,
    gae,
    group_mean_centred,
    group_normalised,
    leave_one_out,
    moments,
    normalise_by,
    normalise_globally,
    place_rewards,
    turn_ends,
)
from hotseat.algorithms.aggregation import (
    Aggregation,
    StepTotals,
    loss_weights,
    mask_truncated,
    step_totals,
    weighted_sum,
)
from hotseat.algorithms.corrections import (
    CorrectionWeights,
    Rejection,
    WeightTotals,
    correction_weights,
    rejection_weights,
    weight_totals,
)
from hotseat.algorithms.filtering import reason_to_drop
from hotseat.algorithms.kl import AdaptiveKl, FixedKl, KlEstimator, distillation_advantages, estimate_kl
from hotseat.algorithms.policy_loss import PolicyLoss, cispo_loss, entropy_bonus, gspo_loss, ppo_loss
from hotseat.algorithms.shaping import clip_rewards, normalise_rewards, overlong_penalty, penalise_truncation
from hotseat.algorithms.supervised_loss import (
    PairwiseKind,
    PreferenceLoss,
    answer_nll,
    dpo_loss,
    episode_log_probs,
    ipo_loss,
    orpo_loss,
    pairwise_loss,
    sft_loss,
    simpo_loss,
)
from hotseat.algorithms.time_steps import step_starts
from hotseat.algorithms.value_loss import ValueLoss, value_loss

__all__ = [
    "AdaptiveKl",
    "Advantages",
    "Aggregation",
    "CorrectionWeights",
    "FixedKl",
    "KlEstimator",
    "Moments",
    "PairwiseKind",
    "PolicyLoss",
    "PreferenceLoss",
    "Rejection",
    "StepTotals",
    "TurnCredit",
    "ValueLoss",
    "WeightTotals",
    "answer_nll",
    "cispo_loss",
    "clip_rewards",
    "compute_advantages",
    "correction_weights",
    "discounted_returns",
    "distillation_advantages",
    "dpo_loss",
    "entropy_bonus",
    "episode_log_probs",
    "estimate_kl",
    "gae",
    "group_mean_centred",
    "group_normalised",
    "gspo_loss",
    "ipo_loss",
    "leave_one_out",
    "loss_weights",
    "mask_truncated",
    "moments",
    "normalise_by",
    "normalise_globally",
    "normalise_rewards",
    "orpo_loss",
    "overlong_penalty",
    "pairwise_loss",
    "penalise_truncation",
    "place_rewards",
    "ppo_loss",
    "reason_to_drop",
    "rejection_weights",
    "sft_loss",
    "simpo_loss",
    "step_starts",
    "step_totals",
    "turn_ends",
    "value_loss",
    "weight_totals",
    "weighted_sum",
]
