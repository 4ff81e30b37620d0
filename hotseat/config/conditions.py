"""The conditions under which options have an effect, each with the reason why they have none otherwise.

The schema puts them beside the type of an option or of a section, with this module as `when`:
`Annotated[Positive, when.LORA]`. Of several, all must hold. The predicates of roles and resolved values are in
`presence.py` and `resolved.py`. None of these modules imports the schema, except for type checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hotseat.config.presence import (
    compares_with_reference,
    has_agent,
    has_code_grader,
    has_critic,
    has_env,
    has_evaluation,
    has_images,
    has_judge_engine,
    has_own_process,
    has_reference,
    has_reward_file,
    has_reward_model,
    has_simulator,
    has_teacher,
    is_base_reference,
    is_on_actor,
    is_placed,
)
from hotseat.config.resolved import correction_kind, divides_by_deviation, uses_k1_loss
from hotseat.registry.backends import BACKENDS, backend_entry
from hotseat.registry.correction_kinds import CORRECTIONS, NO_CORRECTION, correction_entry
from hotseat.registry.divergences import DIVERGENCES, divergence_entry
from hotseat.registry.engines import ENGINES, engine_entry
from hotseat.registry.estimators import ESTIMATORS, estimator_entry
from hotseat.registry.lookup import names_that, names_with
from hotseat.registry.policy_losses import POLICY_LOSSES, policy_loss_entry
from hotseat.registry.preference_losses import PREFERENCE_LOSSES, preference_loss_entry

if TYPE_CHECKING:
    from hotseat.config.schema import Config


@dataclass(frozen=True)
class Condition:
    """A condition on the whole config.

    words: what must be so, to follow `if`. because: says of a config in which it is not so why options have no effect.
    """

    words: str
    holds: Callable[[Config], bool]
    because: str | Callable[[Config], str]

    def words_at(self, section: str) -> str:
        """Return what must be so for an option in a section."""
        return self.words

    def problem(self, config: Config, section: str) -> str | None:
        """Return why an option in a section has no effect, or None where it has one."""
        if self.holds(config):
            return None
        return self.because if isinstance(self.because, str) else self.because(config)


@dataclass(frozen=True)
class Beside:
    """A condition on one option: `name` of the same section, whichever section that is, or a dotted key.

    words: what the option must be. because: contains {key} and {value} of the option; a function gets the value.
    """

    name: str
    holds: Callable[[Any], bool]
    words: str
    because: str | Callable[[Any], str]

    def key_at(self, section: str) -> str:
        return self.name if "." in self.name else f"{section}.{self.name}"

    def words_at(self, section: str) -> str:
        return f"{self.key_at(section)} {self.words}"

    def problem(self, config: Config, section: str) -> str | None:
        value = attrgetter(self.key_at(section))(config)
        if self.holds(value):
            return None
        because = self.because if isinstance(self.because, str) else self.because(value)
        return because.format(key=self.key_at(section), value=_as_yaml(value))


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is(name: str, *values: Any, because: str = "{key} is {value}") -> Beside:
    words = [_as_yaml(value) for value in values]
    because = because.replace("{values}", " and ".join(words))
    return Beside(name, lambda value: value in values, f"is {' or '.join(words)}", because)


def _names(option: str, holds: Callable[[str], bool], names: list[str]) -> Beside:
    """Return the condition that an option has one of some names, of which a table knows."""
    because = f"{{key}} is {{value}}; this is for {' and '.join(names)}"
    return Beside(option, holds, f"is {' or '.join(names)}", because)


def _loss_has(fact: str) -> Beside:
    """Return the condition that a fact is true of the policy loss."""
    names = names_that(POLICY_LOSSES, fact)
    return _names("policy_loss", lambda name: bool(getattr(policy_loss_entry(name), fact)), names)


def _has_option(option: str) -> Beside:
    names = names_with(PREFERENCE_LOSSES, option)
    return _names("loss", lambda name: option in preference_loss_entry(name).options, names)


def _is_set(name: str, so: str = "") -> Beside:
    return Beside(name, lambda value: value is not None, "is set", f"{{key}} is not set{so}")


def _is_unset(name: str, because: str) -> Beside:
    return Beside(name, lambda value: value is None, "is not set", because)


def _is_above_0(name: str, so: str = "") -> Beside:
    return Beside(name, lambda value: value > 0, "is above 0", f"{{key}} is 0{so}")


def engine_has(option: str, name: str = "engine") -> Beside:
    """Return the condition that the engine named by a neighbouring option has `option`."""
    return Beside(
        name,
        lambda engine: option in engine_entry(engine).options,
        f"is {' or '.join(names_with(ENGINES, option))}",
        lambda engine: f"{{key}} is {engine_entry(engine).without(option)}",
    )


def _without_simulator(because: str) -> Condition:
    return Condition("env.path is not set", lambda c: not has_simulator(c), because)


ENABLED = _is("enabled", True)

# Models and roles
_WITH_CRITIC = " or ".join(names_that(ESTIMATORS, "needs_critic"))
_DISCOUNTING = names_that(ESTIMATORS, "discounts")
CRITIC = Condition(
    f"algorithm.estimator is {_WITH_CRITIC}",
    has_critic,
    lambda c: f"algorithm.estimator is {c.algorithm.estimator}, which has no critic; only {_WITH_CRITIC} has one",
)
REFERENCE = Condition(
    "in rl algorithm.kl.coef, algorithm.distill_coef or algorithm.distill.coef is above 0",
    lambda c: not c.has_rollouts or has_reference(c),
    "algorithm.kl.coef is 0, so there is no reference model",
)
COMPARED = Condition(
    f"in dpo algorithm.dpo.loss is {' or '.join(names_that(PREFERENCE_LOSSES, 'has_reference'))}",
    lambda c: not c.task_entry.compares_answers or compares_with_reference(c),
    lambda c: f"algorithm.dpo.loss {c.algorithm.dpo.loss} has no reference",
)
OTHER_REFERENCE = Condition(
    "in dpo train.lora.rank is 0 or reference.model is set",
    lambda c: not is_base_reference(c),
    "train.lora.rank is above 0 and reference.model is not set: the model without adapters is the reference",
)
BEFORE_TRAINING = "{key} is {value}, so the reference is needed only before training"
REFERENCE_IN_STEPS = _is("algorithm.dpo.precompute", False, because=BEFORE_TRAINING)
DISTILLATION = Condition(
    "algorithm.distill_coef or algorithm.distill.coef is above 0",
    has_teacher,
    "algorithm.distill.coef is 0 and algorithm.distill_coef is 0, so nothing is learned from teachers",
)
DISTRIBUTION = Condition(
    "algorithm.distill.coef is above 0",
    lambda c: c.algorithm.distill.coef > 0,
    "algorithm.distill.coef is 0, so nothing is learned from a teacher's distribution",
)
DISTILLED = _is_above_0("coef", ", so nothing is learned from a teacher's distribution")
BETA = _names("divergence", lambda name: divergence_entry(name).has_beta, names_that(DIVERGENCES, "has_beta"))
NOT_ALL_SAMPLED = Beside("sampled", lambda share: share < 1, "is below 1", "{key} is {value}, so no answer is given")
TOP_K = _is_set("top_k", ", so the whole vocabulary is compared")
INFERENCE = Condition(
    "cluster.component_placement places inference",
    lambda c: is_placed(c, "inference"),
    "cluster.component_placement places no inference; the actor computes log-probs",
)
MUON = _is("kind", "muon")
DECAYING_SCHEDULE = _is("schedule", "cosine", "linear")

RAY = _is("runtime", "ray", because="{key} is {value}, so there is no Ray")

# Simulators
ENV = Condition(
    "env.path is set, or cluster.component_placement places env",
    has_env,
    "env.path is not set, and cluster.component_placement places no env",
)
STEPPED = Condition("env.path is set", has_env, "env.path is not set, so no simulator is stepped")
WITHOUT_IMAGES = Condition(
    "env.images is false",
    lambda c: not (has_simulator(c) and c.env.images),
    "env.images is set, and recorded samples have films of what the policy saw",
)
HOSTS = _without_simulator("with env.path, each process of the role env is a rollout host")
PROMPTS = _without_simulator("env.path is set, and the simulator's tasks and seeds are the prompts")
SCORED = _without_simulator("env.path is set, and the simulator gives the rewards")
RECORDED_ROUTING = _without_simulator("env.path is set, and the experts that take observations are not recorded")
TEXT = _without_simulator("env.path is set, and a chunk of actions has as many tokens as env.chunk times its numbers")
TURNS = _without_simulator("env.path is set, and env.max_steps bounds its episodes")

# Rewards
REWARD_MODEL = Condition(
    "rewards come from reward.model", has_reward_model, "rewards do not come from a model (reward.model is not set)"
)
REWARD_FILE = Condition(
    "rewards come from reward.function or reward.functions",
    has_reward_file,
    "rewards do not come from reward.function or reward.functions",
)
REWARD_FILE_OR_URL = Condition(
    "rewards come from reward.function or reward.url",
    lambda c: has_reward_file(c) or c.reward.url is not None,
    "rewards come neither from reward.function nor from reward.url",
)
REWARD_FILE_OR_GRADERS = Condition(
    "rewards come from reward.function or reward.graders",
    lambda c: has_reward_file(c) or bool(c.reward.graders or c.eval.graders),
    "rewards come neither from reward.function nor from reward.graders",
)
REWARD_URL = Condition(
    "rewards come from reward.url", lambda c: c.reward.url is not None, "rewards do not come from reward.url"
)
CODE_GRADER = Condition(
    "a grader of reward.graders runs code (kind: code)",
    has_code_grader,
    "no grader of reward.graders runs code (kind: code)",
)
OWN_SANDBOX = _is_unset("command", "{key} starts Python itself")
JUDGE = _is_set("reward.judge.rubric", ", so no model judges")
JUDGE_ENGINE = Condition(
    "reward.judge.url is not set", has_judge_engine, "reward.judge.url is set, so the judge runs elsewhere"
)
JUDGE_URL = Condition(
    "reward.judge.url is set",
    lambda c: not has_judge_engine(c),
    "reward.judge.url is not set, so the judge runs on an engine of the run's own",
)
SEVERAL_VOTES = Beside("votes", lambda votes: votes > 1, "is above 1", "{key} is 1")
OVERLONG = _is_above_0("buffer_length")
FUNCTION = _is_set("function")

# Rollout and agents
OTHER_DEVICES = Condition(
    "rollout has other devices than the actor",
    lambda c: not is_on_actor(c, "rollout"),
    "rollout is on the actor's devices, where weights are handed over in memory",
)
AGENT = Condition(
    "an agent, an environment or a simulator plays",
    has_agent,
    "none of agent.path, agent.command and agent.environment is set, so an episode has one turn",
)
NO_AGENT = Condition(
    "no agent plays", lambda c: not has_agent(c), "an agent, an environment or a simulator plays, and asks by itself"
)
PROGRAM = Condition(
    "an agent or an environment plays",
    lambda c: has_agent(c) and not has_simulator(c),
    "none of agent.path, agent.command and agent.environment is set, so no program talks to the policy",
)
CHILD_PROCESS = Condition(
    "agent.command, agent.environment or agent.python is set",
    lambda c: c.agent.command is not None or has_own_process(c),
    "no program gets them: neither agent.command nor agent.environment nor agent.python is set",
)
OWN_PROCESS = Condition(
    "agent.environment.family or agent.python is set",
    has_own_process,
    "neither agent.environment.family nor agent.python is set",
)
PYTHON = Condition(
    "agent.environment or agent.path is set",
    lambda c: c.agent.environment.family is not None or c.agent.path is not None,
    "it runs an agent.environment, or the function play of agent.path: neither is set",
)
FAMILY, COMMAND = _is_set("family"), _is_set("command")
NO_STALENESS = Beside(
    "overlap.staleness",
    lambda staleness: staleness == 0,
    "is 0",
    "{key} is {value}: there overlap.order arrival takes the groups that are finished first, and loses none",
)
AHEAD = _is_above_0("staleness", ", so a rollout ends before the training on it begins")

# Data
PATH, IMAGE_KEY = _is_set("path"), _is_set("image_key")
NO_SAMPLER = _is_unset("sampler", "{key} chooses the prompts")
NO_CHAT_TEMPLATE = _is("apply_chat_template", False, because="{key} renders the prompt instead")
CHAT_TEMPLATE = Condition(
    "data.apply_chat_template is true, or an agent plays",
    lambda c: c.data.apply_chat_template or (c.has_rollouts and has_agent(c)),
    "data.apply_chat_template is false",
)
IMAGES = Condition(
    "data.image_key or env.images is set", has_images, "data.image_key is not set, and neither is env.images"
)

# Algorithms
KL = _is_above_0("coef")
ADAPTIVE_KL = _is_set("target", ", so the coefficient does not adapt")
K1_LOSS = Condition(
    "algorithm.kl.estimator is k1 and algorithm.kl.as_loss is true",
    uses_k1_loss,
    "algorithm.kl.estimator is not k1, or algorithm.kl.as_loss is false",
)
GAE = Condition(
    CRITIC.words, has_critic, lambda c: f"algorithm.estimator is {c.algorithm.estimator}, not {_WITH_CRITIC}"
)
DISCOUNT = Condition(
    f"algorithm.estimator is {' or '.join(_DISCOUNTING)}",
    lambda c: estimator_entry(c.algorithm.estimator).discounts,
    lambda c: f"algorithm.estimator {c.algorithm.estimator} does not discount; {' and '.join(_DISCOUNTING)} do",
)
PARTS = Condition(
    f"algorithm.estimator is {' or '.join(names_that(ESTIMATORS, 'compares_parts'))} or a custom one",
    lambda c: estimator_entry(c.algorithm.estimator).takes_parts,
    lambda c: (
        f"algorithm.estimator {c.algorithm.estimator} compares sums of rewards;"
        f" {' and '.join(names_that(ESTIMATORS, 'compares_parts'))} compares each of them"
    ),
)
DEVIATION = Condition(
    "advantages are divided by a deviation",
    divides_by_deviation,
    lambda c: (
        "algorithm.batch_norm is false"
        if c.algorithm.batch_norm is False
        else f"algorithm.estimator {c.algorithm.estimator} does not divide by a deviation"
    ),
)
CLIP, GATE, DUAL_CLIP = map(_loss_has, ("has_clip", "has_gate", "has_dual_clip"))
CORRECTION = Condition(
    f"algorithm.correction.kind is not {NO_CORRECTION}",
    lambda c: correction_kind(c) != NO_CORRECTION,
    f"algorithm.correction.kind is {NO_CORRECTION}",
)
CORRECTION_BOUNDS = Condition(
    f"algorithm.correction.kind is not {' or '.join(names_that(CORRECTIONS, 'replaces_ratio'))}",
    lambda c: not correction_entry(correction_kind(c)).replaces_ratio,
    lambda c: f"algorithm.correction.kind is {correction_kind(c)}, which algorithm.clip_low and clip_high bound",
)
CORRECTION_WEIGHTS = Condition(
    CORRECTION_BOUNDS.words,
    CORRECTION_BOUNDS.holds,
    lambda c: f"algorithm.correction.kind is {correction_kind(c)}, which has no weights",
)
REJECTION = _is_set("reject", ", so no answer is dropped")
K1_REJECTION = _is("reject", "k1", because="{key} is not k1; the other divergences have no lower bound")
LABEL_SMOOTHING, LENGTH_NORMALISED, TARGET_MARGIN, NLL = map(
    _has_option, ("label_smoothing", "length_normalised", "gamma", "nll_coef")
)

# Training
ZERO = Beside(
    "backend",
    lambda backend: backend_entry(backend).has_zero_options,
    f"is {' or '.join(names_that(BACKENDS, 'has_zero_options'))}",
    "{key} is {value}",
)
LORA = _is_above_0("train.lora.rank")
NO_ADAPTERS = ": there are no adapters, so all weights are trained, and none are in 4 bits"
FROZEN_WEIGHTS = _is_above_0("train.lora.rank", NO_ADAPTERS)
CHECKPOINTING = _is("gradient_checkpointing", True, because="{key} is false, so no layer recomputes")
NO_TOKEN_BUDGET = _is_unset("max_tokens_per_device", "{key} sets the size of micro-batches")
AUTO = _is("micro_batch_size", "auto", because="{key} sets the size of micro-batches")
MASTERS = Condition(
    "train.dtype is not fp32",
    lambda c: c.train.dtype != "fp32",
    "train.dtype is fp32, so the weights are their own masters",
)
HEAD = Condition(MASTERS.words, MASTERS.holds, "train.dtype is fp32, and so are all logits")

# Evaluation, checkpoints and logs
EVALUATION = Condition(
    "eval.path or eval.sets is set, or env.eval_seeds is above 0",
    has_evaluation,
    "eval.path is not set, so nothing is evaluated (eval=null clears the section)",
)
SAVES = Condition(
    "checkpoint.every or checkpoint.every_minutes is above 0",
    lambda c: c.checkpoint.is_made,
    "checkpoint.every is not set, so no checkpoint is made",
)
SAVES_OR_RESUMES = Condition("checkpoints are made or resumed from", lambda c: c.checkpoint.is_used, SAVES.because)
SNAPSHOTS = _is_set("memory_every", ", so no memory snapshot is made")
PUSHED = _is_set("push_to_hub", ", so nothing is pushed")
RESUMES = _is("resume", True, because="{key} is false, so the run starts anew")
SERVED = _is_set("port", ", so nothing is served")
RECORDED_SAMPLES = _is_above_0("samples_per_step", ", so no sample is recorded")
