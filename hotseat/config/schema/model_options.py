"""The models of a run and their optimizers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hotseat.config import conditions as when
from hotseat.config.annotations import RL, Acts, EngineName, MayChange
from hotseat.config.schema.section import AboveZero, Amount, Decay, Fraction, NotNegative, Section, Share


class MuonConfig(Section):
    learning_rate: Amount = 0.02
    """Peak learning rate of matrices; other weights have the optimizer's own `learning_rate`."""
    momentum: Decay = 0.95
    """Decay of the momentum."""


class OptimizerConfig(Section):
    kind: Literal["adamw", "muon"] = "adamw"
    """Which optimizer; `muon` is for the matrices inside a model, all else is left to AdamW."""
    learning_rate: Annotated[Amount, MayChange.LEARNING_RATE] = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decay of Adam's first and second moment."""
    eps: AboveZero = 1e-8
    """Adam's epsilon."""
    weight_decay: Amount = 0.0
    """Decoupled weight decay, on matrices only."""
    schedule: Annotated[Literal["cosine", "linear", "constant"], MayChange.LEARNING_RATE] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_ratio: Annotated[Fraction, MayChange.LEARNING_RATE] = 0.03
    """Share of all optimizer steps over which the learning rate rises; at least one step has the peak."""
    min_learning_rate_ratio: Annotated[Fraction, when.DECAYING_SCHEDULE, MayChange.LEARNING_RATE] = 0.1
    """Learning rate at the end, as a share of its peak (cosine and linear)."""
    max_grad_norm: Amount = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""
    muon: Annotated[MuonConfig, when.MUON] = MuonConfig()
    """Options of Muon."""


class CriticOptimizerConfig(OptimizerConfig):
    learning_rate: Annotated[Amount, MayChange.LEARNING_RATE] = 9e-6
    """Peak learning rate."""


class ActorConfig(Section):
    model: str | None = None
    """Checkpoint directory or hub name of the policy."""
    shape: dict[str, Any] | None = None
    """The model's config.json, or the part that sizes it, for planning without the model at hand."""
    rope_scaling: dict[str, Any] | None = None
    """Stretch the positions of `model`, in every role that loads it, such as `{rope_type: yarn, factor: 4}`."""
    optimizer: Annotated[OptimizerConfig, Acts.AFTER_SAMPLING] = OptimizerConfig()
    """How the policy is optimised."""
    enable_offload: Annotated[bool | None, RL, MayChange.PLACEMENT] = None
    """Offload weights, gradients and optimizer between phases: true always, false never, unset as needed."""


class CriticConfig(Section):
    model: str | None = None
    """Checkpoint of the value model; unset takes the reward model's, then the actor's."""
    shape: dict[str, Any] | None = None
    """As `actor.shape`."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """How the critic is optimised."""
    enable_offload: Annotated[bool | None, MayChange.PLACEMENT] = None
    """As `actor.enable_offload`."""
    value_clip: AboveZero | None = 0.5
    """Clip range of the value update; unset does not clip."""
    warmup_steps: NotNegative = 0
    """Rollouts at the start in which only the critic learns; the actor's learning rate begins after them."""
    value_head_prefix: str = "score"
    """Name of the value head's parameters in the checkpoint."""


class ReferenceConfig(Section):
    model: str | None = None
    """Checkpoint of the reference policy; unset takes the actor's."""
    teachers: Annotated[dict[str, str], RL, when.DISTILLATION] = {}
    """Checkpoints of several teachers by name, instead of `model`; a prompt's `datasource` names its teacher."""
    teacher_weights: Annotated[dict[str, Share], RL, when.DISTILLATION] = {}
    """Weight of every teacher for all prompts, instead of one teacher by `datasource`; they add up to 1."""
    engine: Annotated[EngineName | None, RL, when.DISTRIBUTION, MayChange.ENGINE] = None
    """Engine on which the teacher of `algorithm.distill` runs; unset: it runs behind the training backend."""
    enable_offload: Annotated[bool | None, when.REFERENCE_IN_STEPS, MayChange.PLACEMENT] = None
    """Offload its weights between phases: true always, false never, unset as needed."""


class InferenceConfig(Section):
    enable_offload: Annotated[bool | None, MayChange.PLACEMENT] = None
    """Offload the copy of the policy that computes old log-probs: as `reference.enable_offload`."""
