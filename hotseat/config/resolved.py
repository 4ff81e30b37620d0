"""Values of an RL run's algorithm options that are left unset, and notes about unusual choices.

docs/algorithms.md has the sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from hotseat.config.presence import has_agent, has_judge, has_simulator, name_of_function
from hotseat.model_source import ModelSource
from hotseat.registry.correction_kinds import NO_CORRECTION, OFF_POLICY_CORRECTION, OFF_POLICY_EPISODE_CORRECTION
from hotseat.registry.estimators import estimator_entry
from hotseat.registry.lookup import names_that
from hotseat.registry.policy_losses import POLICY_LOSSES, Aggregation, policy_loss_entry

if TYPE_CHECKING:
    from hotseat.config.schema import Config

KlEstimator = Literal["k1", "k2", "k3"]
Step = Literal["token", "action", "chunk"]
STEPS: tuple[Step, ...] = get_args(Step)  # the shortest first

FP8_KEYS = ("rollout.quantization", "rollout.kv_cache_dtype")
_RUBRIC_TOKENS = 1024  # room for the rubric in a request to a judge's engine, unless its length is set
MAX_KL_ERROR = 0.2  # one update of an adaptive coefficient moves by at most this share of samples / horizon


def source_of(config: Config, model: str | None) -> ModelSource:
    """Return what to load a model of a run from."""
    assert model is not None, "checked before anything is loaded"
    scaling = config.actor.rope_scaling if model == config.actor.model else None
    return ModelSource(model, config.trust_remote_code, tuple(sorted((scaling or {}).items())))


def sends_adapters_alone(config: Config) -> bool:
    """Return whether engines get adapters apart from the weights below them: nothing can be merged into 4 bits."""
    return config.train.load_in_4bit or config.rollout.lora_sync == "adapter"


def critic_model(config: Config) -> str:
    """Return the critic's checkpoint: its own, else the reward model's, else the actor's."""
    model = config.critic.model or config.reward.model or config.actor.model
    assert model is not None
    return model


def own_aggregation(config: Config) -> Aggregation:
    """Return the aggregation that the policy loss and the estimator have in their papers.

    That of a loss with a ratio per episode comes first, then that of the estimator.
    """
    loss, estimator = policy_loss_entry(config.algorithm.policy_loss), estimator_entry(config.algorithm.estimator)
    if loss.has_episode_ratio and loss.aggregation is not None:
        return loss.aggregation
    return estimator.aggregation or loss.aggregation or "token_mean"


def aggregation(config: Config) -> Aggregation:
    """Return the aggregation of a run: the one that is set, or the loss's own."""
    return config.algorithm.aggregation or own_aggregation(config)


def is_batch_normalised(config: Config) -> bool:
    """Return whether advantages are normalised over all tokens of a step."""
    normalises = estimator_entry(config.algorithm.estimator).normalisation == "batch"
    return normalises if config.algorithm.batch_norm is None else config.algorithm.batch_norm


def divides_by_deviation(config: Config) -> bool:
    """Return whether advantages are divided by a deviation: that of the step, or that of their group."""
    normalisation = estimator_entry(config.algorithm.estimator).normalisation
    return is_batch_normalised(config) or normalisation in ("group", "episodes")


def reward_parts(config: Config) -> dict[str, float]:
    """Return the rewards that an estimator may compare apart, by their names in metrics, with their weights."""
    reward = config.reward
    if reward.parts is not None:
        return dict(reward.parts)
    parts = {name_of_function(each): each.weight for each in reward.functions}
    parts |= {grader.name or grader.kind: grader.weight for grader in reward.graders}
    if has_judge(config):
        parts[reward.judge.name] = reward.judge.weight
    if parts and (reward.function is not None or reward.url is not None):
        parts["function"] = 1.0
    if parts and reward.model is not None:
        parts["model"] = 1.0
    return parts


def kl_estimator(config: Config) -> KlEstimator:
    """Return the KL estimator of a run: the one that is set, or k1 in the reward and k2 as a loss."""
    kl = config.algorithm.kl
    return kl.estimator or ("k2" if kl.as_loss else "k1")


def ratio_step(config: Config) -> Step:
    """Return the tokens that share a ratio of a run: those that are set, or the step of time."""
    return config.algorithm.ratio_step or config.algorithm.time_step


def overlap_queue(config: Config) -> int:
    """Return how many batches rollout may be ahead, besides the one in progress."""
    overlap = config.overlap
    return overlap.staleness if overlap.queue is None else overlap.queue


def fp8_options(config: Config) -> list[str]:
    """List the options with which engines compute in fewer bits than the trainer, and sample from another policy."""
    values = {FP8_KEYS[0]: config.rollout.quantization, FP8_KEYS[1]: config.rollout.kv_cache_dtype}
    return [key for key, value in values.items() if value is not None]


def correction_kind(config: Config) -> str:
    """Return the off-policy correction of a run: the one that is set, or one that fits the origin of its samples."""
    if config.algorithm.correction.kind is not None:
        return config.algorithm.correction.kind
    if config.overlap.staleness == 0 and not fp8_options(config):
        return NO_CORRECTION
    has_episode_ratio = policy_loss_entry(config.algorithm.policy_loss).has_episode_ratio
    return OFF_POLICY_EPISODE_CORRECTION if has_episode_ratio else OFF_POLICY_CORRECTION


def uses_k1_loss(config: Config) -> bool:
    """Return whether the KL is a loss whose gradient has mean zero."""
    kl = config.algorithm.kl
    return kl.coef > 0 and kl.as_loss and kl.estimator == "k1"


def prompt_max_length(config: Config) -> int:
    """Return the most tokens that a prompt may have."""
    if config.data.prompt_max_length is not None:
        return config.data.prompt_max_length
    if config.rollout.max_new_tokens is not None and config.has_rollouts:
        return config.data.max_length - config.rollout.max_new_tokens
    return config.data.max_length // 2


def prompt_limit(config: Config) -> tuple[str, str]:
    """Return the origin of the limit on prompts, and what to raise to allow longer ones, both as words."""
    length, data = prompt_max_length(config), config.data
    if data.prompt_max_length is not None:
        return f"data.prompt_max_length {length}", "raise data.prompt_max_length and data.max_length"
    if config.rollout.max_new_tokens is not None and config.has_rollouts:
        sampled = config.rollout.max_new_tokens
        return (
            f"{length} (data.max_length {data.max_length} - rollout.max_new_tokens {sampled})",
            "raise data.max_length",
        )
    return f"{length} tokens (half of data.max_length {data.max_length})", "raise data.max_length"


def max_new_tokens(config: Config) -> int:
    """Return the most tokens that one turn may sample; agents bound it by what is left of `data.max_length`."""
    if has_agent(config) and config.agent.turn_length == "rest":
        return config.data.max_length - 1
    if config.rollout.max_new_tokens is not None:
        return config.rollout.max_new_tokens
    return config.data.max_length - prompt_max_length(config)


def max_sampled_tokens(config: Config) -> int:
    """Return the most tokens that one episode may sample over all of its turns.

    In one turn that is `max_new_tokens`. With an agent it is `agent.max_steps` times as many, or `data.max_length` less
    the longest prompt if that is less. Where no longest prompt is set, a prompt of one token is assumed.
    With a simulator it is `env.max_steps`.
    """
    per_turn, data = max_new_tokens(config), config.data
    if not has_agent(config):
        return per_turn
    if has_simulator(config):  # each chunk begins a sequence of its own
        return config.env.max_steps or data.max_length
    is_limited = data.prompt_max_length is not None or config.rollout.max_new_tokens is None
    room = data.max_length - (prompt_max_length(config) if is_limited else 1)
    return room if config.agent.max_steps is None else min(config.agent.max_steps * per_turn, room)


def shortest_kl_horizon(config: Config) -> float:
    """Return the horizon that an adaptive KL coefficient must be above, or one update could turn it negative.

    An update multiplies the coefficient by 1 + clip(KL / target - 1, ±0.2) · samples / horizon, which is above 0 for
    any KL if and only if the horizon is above 0.2 · samples.
    """
    return MAX_KL_ERROR * config.rollout.batch_size * config.rollout.samples_per_prompt


def resolved_notes(config: Config) -> list[str]:
    """Return the notes of a run's start about settings that differ from what the algorithm's name stands for."""
    if not config.has_rollouts:
        return []
    algorithm, notes = config.algorithm, []
    loss, estimator = policy_loss_entry(algorithm.policy_loss), estimator_entry(algorithm.estimator)
    used, own = aggregation(config), own_aggregation(config)
    if used != own:
        whose = algorithm.estimator if own == estimator.aggregation else algorithm.policy_loss
        notes.append(f"algorithm.aggregation is {used}; {whose}'s own is {own}, which is used if it is unset")
    if algorithm.aggregation is None and loss.aggregation not in (None, used):
        of_loss = f"; {loss.name}'s paper has {loss.aggregation}" if loss.source else ""
        others = " and ".join(names_that(POLICY_LOSSES, "has_episode_ratio"))
        notes.append(
            f"algorithm.aggregation is unset and {used}, which is that of algorithm.estimator {algorithm.estimator}"
            f" with any policy_loss but {others}{of_loss}: set algorithm.aggregation to choose another"
        )
    if not loss.has_lower_bound and algorithm.clip_low < 1:
        notes.append(
            f"algorithm.clip_low is {algorithm.clip_low:g}: {loss.name}'s weights are at least"
            f" {1 - algorithm.clip_low:g}; the paper's have no lower bound, which is clip_low 1"
        )
    if uses_k1_loss(config):
        notes.append(
            "warning: algorithm.kl.estimator is k1 as a loss, whose gradient is zero on average whatever the reference:"
            " it adds noise and does not keep the policy near the reference; set k2 or k3 (--kl_estimator), or put it"
            " into the reward"
        )
    if config.overlap.staleness > 0 and correction_kind(config) == NO_CORRECTION:
        notes.append(
            f"warning: overlap.staleness is {config.overlap.staleness} and algorithm.correction.kind is none: samples"
            " of older weights are learned from as if they were of the current policy; leave it unset to correct that"
        )
    elif fp8_options(config) and correction_kind(config) == NO_CORRECTION:
        notes.append(
            "warning: engines sample in FP8 and algorithm.correction.kind is none: samples are learned from as if"
            " they were of the trainer's policy; leave it unset to correct that"
        )
    is_limit_used = config.reward.overlong.buffer_length > 0 or used == "constant"
    if has_agent(config) and is_limit_used:
        notes.append(
            f"an episode may sample {max_sampled_tokens(config)} tokens over all of its turns: the limit of the"
            " overlong penalty and of the aggregation constant"
        )
    return notes


def judge_length(config: Config) -> int:
    """Return how many tokens a request to the judge's engine and its verdict may have together."""
    judge = config.reward.judge
    return judge.engine.max_length or config.data.max_length + judge.max_tokens + _RUBRIC_TOKENS
