"""Advantages, losses and KL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hotseat.config import conditions as when
from hotseat.config.annotations import (
    ALL,
    DPO,
    RM,
    Acts,
    CorrectionName,
    DivergenceName,
    EstimatorName,
    MayChange,
    PolicyLossName,
    PreferenceLossName,
)
from hotseat.config.schema.section import AboveOne, AboveZero, Amount, Fraction, FunctionPath, Positive, Section, Share
from hotseat.registry.divergences import DEFAULT_DIVERGENCE
from hotseat.registry.estimators import DEFAULT_ESTIMATOR
from hotseat.registry.policy_losses import DEFAULT_POLICY_LOSS
from hotseat.registry.preference_losses import DEFAULT_PREFERENCE_LOSS


class KlConfig(Section):
    coef: Annotated[Amount, MayChange.KL] = 0.0
    """Weight of the KL to the reference; 0 runs without a reference."""
    target: Annotated[AboveZero | None, when.KL, MayChange.KL] = None
    """Adapt the weight towards this KL; unset keeps it fixed."""
    horizon: Annotated[Positive, when.KL, when.ADAPTIVE_KL, MayChange.KL] = 10000
    """Samples over which the weight adapts; must be above a fifth of the samples of a step."""
    estimator: Annotated[Literal["k1", "k2", "k3"] | None, when.KL] = None
    """Estimator of the KL from one sample; unset is `k1` in the reward and `k2` as a loss."""
    as_loss: Annotated[bool, when.KL] = False
    """Put the KL into the loss instead of the reward."""
    allow_k1_loss: Annotated[bool, when.KL, when.K1_LOSS] = False
    """Allow `k1` as a loss, whose gradient is zero on average: for comparisons with OpenRLHF."""


class CorrectionConfig(Section):
    kind: CorrectionName | None = None
    """Correction of the gap between engine and trainer; unset is none; if stale or FP8, tis or rollout-ratio."""
    low: Annotated[Amount, when.CORRECTION, when.CORRECTION_BOUNDS] = 0.5
    """Lower bound of the ratio."""
    high: Annotated[Amount, when.CORRECTION, when.CORRECTION_BOUNDS] = 5.0
    """Upper bound of the ratio."""
    normalise: Annotated[bool, when.CORRECTION, when.CORRECTION_WEIGHTS] = False
    """Divide the weights by their mean over the step."""
    reject: Literal["k1", "k2", "k3"] | None = None
    """Drop answers by the mean of this divergence between engine and trainer over their tokens; unset drops none."""
    reject_low: Annotated[Amount | None, when.K1_REJECTION] = None
    """Lower bound of the geometric mean of the ratio, for k1; unset is 1 / `reject_high`."""
    reject_high: Annotated[AboveZero | None, when.REJECTION] = None
    """Upper bound: of the geometric mean of the ratio for k1, of the mean divergence for k2 and k3."""


class DistillConfig(Section):
    coef: Amount = 0.0
    """Weight in the loss of the divergence from the teacher's distribution of every token; 0 is none."""
    divergence: Annotated[DivergenceName, when.DISTILLED] = DEFAULT_DIVERGENCE
    """Divergence between policy and teacher."""
    beta: Annotated[float, Field(gt=0, lt=1), when.DISTILLED, when.BETA] = 0.5
    """Weight of the teacher in the mixture that both are compared with."""
    top_k: Annotated[Positive | None, when.DISTILLED] = 64
    """The teacher's most likely tokens that are compared; null is the whole vocabulary, from its hidden states."""
    tail: Annotated[Literal["other", "renormalise"], when.DISTILLED, when.TOP_K] = "other"
    """All other tokens: one more class, or left out of both distributions, which are then renormalised."""
    temperature: Annotated[AboveZero | None, when.DISTILLED] = None
    """Temperature of both distributions; unset is that of the rollout."""
    sampled: Annotated[Fraction, when.DISTILLED] = 1.0
    """Share of prompts whose answers the policy samples (GKD's lambda); the others have those of `answer_key`."""
    answer_key: Annotated[str | None, when.DISTILLED, when.NOT_ALL_SAMPLED] = None
    """Column with given answers, for prompts whose answers are not sampled."""
    teacher_input_key: Annotated[str | None, when.DISTILLED] = None
    """Column with the prompt that the teacher reads instead of the policy's, such as one with the solution."""


class FilteringConfig(Section):
    enabled: bool = False
    """Replace prompts whose mean score is outside the range."""
    low: Annotated[float, when.ENABLED] = 0.0
    """Keep a prompt if its mean score is above this."""
    high: Annotated[float, when.ENABLED] = 1.0
    """Keep a prompt if its mean score is below this."""


class DpoConfig(Section):
    loss: PreferenceLossName = DEFAULT_PREFERENCE_LOSS
    """Loss of a pair."""
    beta: AboveZero = 0.1
    """Scale of the implicit rewards; for ORPO the weight of the odds ratio, for SimPO usually 2."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), when.LABEL_SMOOTHING] = 0.0
    """Share of flipped preferences to expect (cDPO)."""
    length_normalised: Annotated[bool, when.LENGTH_NORMALISED] = False
    """IPO of log-probs per token, as in TRL; if false, of sums over each answer, as in OpenRLHF."""
    gamma: Annotated[Amount, when.TARGET_MARGIN] = 0.5
    """SimPO's target margin between the rewards of the two answers."""
    nll_coef: Annotated[Amount, when.NLL] = 0.0
    """Weight of the negative log-likelihood per token of the chosen answer; ORPO always has it."""
    precompute: Annotated[bool, when.COMPARED] = False
    """Compute the reference's log-probs once before training, and keep them on disk; if false, anew in every step."""


class RewardModellingConfig(Section):
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Pairwise loss."""
    margin: bool = False
    """Use the data's margin column."""
    value_head_prefix: str = "score"
    """Name of the reward head's parameters in the checkpoint that is written."""


class AlgorithmConfig(Section):
    estimator: Annotated[EstimatorName | FunctionPath, Acts.WHILE_SAMPLING] = DEFAULT_ESTIMATOR
    """Advantage estimator, or a custom one, `my.py:function`."""
    time_step: Literal["token", "action", "chunk"] = "token"
    """Step of time of gae and of the ratio: a token, an action of a simulator, or a chunk of actions (or turn)."""
    ratio_step: Literal["token", "action", "chunk"] | None = None
    """Tokens that share a ratio, where the policy loss allows it, no more than `time_step`; unset is `time_step`."""
    turn_credit: Annotated[Literal["to_go", "own", "sum"], when.AGENT] = "to_go"
    """What a turn is credited with where agents reward turns: its reward and later ones, its own alone, or the sum."""
    gamma: Annotated[Fraction, when.DISCOUNT] = 1.0
    """Discount per step of time, for estimators that discount."""
    gae_lambda: Annotated[Fraction, when.GAE] = 1.0
    """GAE's lambda."""
    std_norm: Annotated[bool, when.DEVIATION] = True
    """Divide advantages by their deviation, where the estimator does."""
    batch_norm: bool | None = None
    """Normalise advantages over all tokens of a step; unset: where the estimator does."""
    policy_loss: PolicyLossName | FunctionPath = DEFAULT_POLICY_LOSS
    """Policy loss, or a custom one, `my.py:function`."""
    clip_low: Annotated[Share, when.CLIP] = 0.2
    """The ratio is clipped at 1 minus this."""
    clip_high: Annotated[AboveZero, when.CLIP] = 0.2
    """The ratio is clipped at 1 plus this."""
    gate_temperature_pos: Annotated[AboveZero, when.GATE] = 1.0
    """Temperature of the gate for tokens whose advantage is above 0: the higher, the narrower is the gate."""
    gate_temperature_neg: Annotated[AboveZero, when.GATE] = 1.05
    """Temperature of the gate for the other tokens."""
    dual_clip: Annotated[AboveOne | None, when.DUAL_CLIP] = None
    """Bound on the loss of negative advantages; unset is none."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """Mean of token losses: over a step's tokens, per episode, or by a constant; unset is that of the loss's paper."""
    mask_truncated: bool = False
    """Leave answers that did not end by themselves out of the policy's loss; they still count in baselines."""
    entropy_coef: Amount | None = None
    """Weight of the entropy bonus; 0 only logs it, unset does not compute it."""
    aux_loss_coef: Annotated[Amount, ALL] = 0.0
    """Weight of the balancing loss of a mixture of experts: a mean over micro-batches, weighted by their tokens."""
    distill_coef: Amount = 0.0
    """Weight of on-policy distillation in the advantages, from `reference.model` or `reference.teachers`; 0 is none."""
    distill: Annotated[DistillConfig, Acts.WHILE_SAMPLING] = DistillConfig()
    """Distillation from the teacher's whole distribution, from `reference.model` or `reference.teachers`."""
    kl: KlConfig = KlConfig()
    """KL to the reference policy."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    filtering: Annotated[FilteringConfig, Acts.WHILE_SAMPLING] = FilteringConfig()
    """DAPO's dynamic filtering."""
    dpo: Annotated[DpoConfig, DPO] = DpoConfig()
    """Preference optimisation (task dpo)."""
    reward_modelling: Annotated[RewardModellingConfig, RM] = RewardModellingConfig()
    """Reward-model training (task rm)."""
