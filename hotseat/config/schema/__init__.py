"""The config tree: every option of Hotseat with its type, range, default and meaning.

Defaults are defined only here. `None` means "not set": the option is derived, absent, or decided as needed; the
field's description says which. Beside its type, or beside that of a section around it, an option has what it takes
to have an effect: `InTasks`, of which the innermost count and without which it has one in all tasks, and conditions of
`conditions.py` (`when.LORA`), which must all hold. `MayChange` is beside what may change when a run resumes,
`Acts` beside what leaves samples as they are.
`presence.py` derives the roles of a run from the tree; what contradicts what is in `conflicts.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel

from hotseat.config import conditions as when
from hotseat.config.annotations import ALL, RL, RL_OR_DPO, Acts, InTasks, MayChange, TaskName
from hotseat.config.schema.algorithm_options import AlgorithmConfig
from hotseat.config.schema.cluster_options import ClusterConfig, OverlapConfig, PhaseConfig
from hotseat.config.schema.data_options import DataConfig, EvaluationConfig
from hotseat.config.schema.model_options import ActorConfig, CriticConfig, InferenceConfig, ReferenceConfig
from hotseat.config.schema.record_options import CheckpointConfig, LogConfig, RunConfig
from hotseat.config.schema.reward_options import RewardConfig
from hotseat.config.schema.rollout_options import AgentConfig, ComponentConfig, EnvConfig, RolloutConfig
from hotseat.config.schema.section import NotNegative, Section
from hotseat.config.schema.train_options import TrainConfig
from hotseat.registry.tasks import DEFAULT_TASK, TaskEntry, task_entry


class Config(Section):
    """A whole run."""

    task: TaskName = DEFAULT_TASK
    """What to train, and how."""
    name: Annotated[str | None, MayChange.LOGGING] = None
    """Name of the run; unset is the task and the first number that is free, such as `rl-1`."""
    run_dir: Annotated[str, MayChange.LOGGING] = "runs"
    """Directory under which the run's own directory is made."""
    seed: NotNegative = 42
    """Seed of everything random."""
    trust_remote_code: bool = False
    """Let model repositories run code of their own."""
    use_modelscope: bool = False
    """Take hub names from ModelScope."""
    cluster: Annotated[ClusterConfig, MayChange.PLACEMENT] = ClusterConfig()
    """Machines and placement."""
    flow: Annotated[list[PhaseConfig] | None, MayChange.PLACEMENT] = None
    """Phases of a step; unset is the task's usual flow."""
    overlap: Annotated[OverlapConfig, RL] = OverlapConfig()
    """How far phases on separate devices may run ahead."""
    actor: ActorConfig = ActorConfig()
    """The policy."""
    critic: Annotated[CriticConfig, RL, when.CRITIC, Acts.AFTER_SAMPLING] = CriticConfig()
    """The value model, of estimators with a critic."""
    reference: Annotated[ReferenceConfig, RL_OR_DPO, when.REFERENCE, when.COMPARED, when.OTHER_REFERENCE] = (
        ReferenceConfig()
    )
    """The reference policy (KL above 0, dpo), or the teacher (distill or distill_coef above 0)."""
    inference: Annotated[InferenceConfig, RL, when.INFERENCE] = InferenceConfig()
    """Old log-probs, computed on devices of their own."""
    reward: Annotated[RewardConfig, RL] = RewardConfig()
    """Where rewards come from."""
    rollout: Annotated[RolloutConfig, RL] = RolloutConfig()
    """Sampling."""
    env: Annotated[EnvConfig, RL, when.ENV] = EnvConfig()
    """Simulators."""
    components: Annotated[dict[str, ComponentConfig], RL] = {}
    """Custom classes, by name, which score or filter the groups of a step before it is learned."""
    agent: Annotated[AgentConfig, RL] = AgentConfig()
    """How prompts become episodes."""
    data: DataConfig = DataConfig()
    """Prompts, examples or pairs."""
    algorithm: Annotated[AlgorithmConfig, RL, Acts.AFTER_SAMPLING] = AlgorithmConfig()
    """Advantages, losses and KL."""
    train: Annotated[TrainConfig, Acts.AFTER_SAMPLING] = TrainConfig()
    """How models are trained."""
    eval: Annotated[EvaluationConfig, MayChange.EVALUATION] = EvaluationConfig()
    """Evaluation."""
    run: Annotated[RunConfig, MayChange.LIMITS] = RunConfig()
    """What happens when the run dies."""
    checkpoint: Annotated[CheckpointConfig, MayChange.CHECKPOINTS] = CheckpointConfig()
    """Checkpoints and exported models."""
    log: Annotated[LogConfig, MayChange.LOGGING] = LogConfig()
    """Metrics and samples to record."""

    def with_options(self, options: Mapping[str, Any]) -> Config:
        """Return the config with other values at dotted keys of two words, which are not checked."""
        config = self
        for key, value in options.items():
            section, name = key.split(".")
            config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
        return config

    @property
    def task_entry(self) -> TaskEntry:
        return task_entry(self.task)

    @property
    def has_rollouts(self) -> bool:
        return self.task_entry.has_rollouts


@functools.cache
def annotations_of(key: str) -> tuple[tuple[str, Any], ...]:
    """Return (section of the field, annotation) of the option at a dotted key and of the sections around it, first."""
    section: Any = Config
    annotations: list[tuple[str, Any]] = []
    around = ""
    for name in key.split("."):
        field = getattr(section, "model_fields", {}).get(name)
        if field is None:  # inside a list or a mapping, or no key at all
            break
        annotations += [(around, each) for each in field.metadata]
        around, section = f"{around}.{name}".removeprefix("."), field.annotation
    return tuple(annotations)


def tasks_of(key: str) -> tuple[str, ...]:
    """Return the tasks in which the option at a dotted key has an effect."""
    return next((each.names for _, each in reversed(annotations_of(key)) if isinstance(each, InTasks)), ALL.names)


def conditions_of(key: str) -> list[tuple[str, when.Condition | when.Beside]]:
    """Return (section, condition) of all that must hold for the option at a dotted key to have an effect."""
    kinds = (when.Condition, when.Beside)
    return [(section, each) for section, each in annotations_of(key) if isinstance(each, kinds)]


def acts_after_sampling(key: str) -> bool:
    """Tell whether the option at a dotted key leaves samples as they are."""
    acts = [each for _, each in annotations_of(key) if isinstance(each, Acts)]
    return acts[-1:] == [Acts.AFTER_SAMPLING]


def changeable_keys(subject: MayChange) -> tuple[str, ...]:
    """Return the dotted keys of the options and sections that may change when a run resumes, of one subject."""

    def keys_in(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if subject in field.metadata:
                yield prefix + name
            elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from keys_in(field.annotation, f"{prefix}{name}.")

    return tuple(keys_in(Config, ""))
