"""Makes settings of what is computed from a rollout: losses, advantages, micro-batches, and transports of weights."""

from __future__ import annotations

from hotseat.checks.tokenizers import reward_scale
from hotseat.config import Config
from hotseat.config.batches import is_auto, token_budget, tokens_per_micro_batch
from hotseat.config.presence import has_inference
from hotseat.config.resolved import aggregation, correction_kind, kl_estimator, max_sampled_tokens, ratio_step
from hotseat.config.schema import RolloutConfig, TrainConfig
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.experience import AdvantageSettings
from hotseat.loop.workers.losses import PolicyObjective, ValueObjective
from hotseat.loop.workers.model_workers import PolicySettings
from hotseat.loop.workers.value_models import CriticSettings, RewardSettings
from hotseat.placement import Plan
from hotseat.registry.corrections import correction_entry
from hotseat.user_functions import absolute
from hotseat.weights.transports import TransportPlan, choose_transports


def policy_settings(
    config: Config, optimizer_steps: int, kl_coefficient: float, version: int | None = None
) -> PolicySettings:
    """Return how the actor learns from a rollout. version: of the weights that learn, to measure the lag of tokens."""
    version = version if config.overlap.staleness > 0 else None
    algorithm = config.algorithm
    kl_in_loss, kl_in_reward = (kl_coefficient, 0.0) if algorithm.kl.as_loss else (0.0, kl_coefficient)
    return PolicySettings(
        objective=_policy_objective(config, kl_in_loss, max_lag=0 if version is None else config.overlap.staleness),
        advantages=_advantage_settings(config, kl_in_reward),
        aggregation=aggregation(config),
        mask_truncated=algorithm.mask_truncated,
        normalises_corrections=algorithm.correction.normalise,
        max_epochs=config.train.max_epochs,
        # With one optimizer step per rollout the ratio is exactly one, and the old log-probs are the current ones.
        needs_old_log_probs=(
            optimizer_steps > 1
            or kl_in_reward > 0
            or is_filtered(config)
            or has_inference(config)
            or algorithm.correction.normalise
            or algorithm.distill_coef > 0
        ),
        temperature=config.rollout.temperature,
        score=score_batches(config),
        train=train_batches(config),
        # A sample whose advantage is zero still says something about the balance of experts.
        learns_from_every_sample=algorithm.aux_loss_coef > 0,
        version=version,
    )


def _policy_objective(config: Config, kl_coefficient: float, max_lag: int) -> PolicyObjective:
    algorithm, correction = config.algorithm, config.algorithm.correction
    weighing = correction_entry(correction_kind(config))
    return PolicyObjective(
        policy_loss=absolute(algorithm.policy_loss),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        correction=None if weighing.function is None else weighing.name,
        correction_low=correction.low,
        correction_high=correction.high,
        rejection=correction.reject,
        rejection_low=correction.reject_low,
        rejection_high=correction.reject_high,
        kl_estimator=kl_estimator(config),
        kl_coefficient=kl_coefficient,
        entropy_coefficient=algorithm.entropy_coef,
        ratio_to="rollout" if weighing.replaces_ratio else "old",
        max_lag=max_lag,
    )


def _advantage_settings(config: Config, kl_in_reward: float) -> AdvantageSettings:
    algorithm, reward = config.algorithm, config.reward
    return AdvantageSettings(
        estimator=absolute(algorithm.estimator),
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
        divide_by_std=algorithm.std_norm,
        over_batch=algorithm.batch_norm,
        reward_clip=reward.clip,
        kl_in_reward=kl_in_reward,
        kl_estimator=kl_estimator(config),
        overlong_buffer=reward.overlong.buffer_length,
        overlong_factor=reward.overlong.penalty_factor,
        truncation_penalty=reward.truncation_penalty,
        max_sampled=max_sampled_tokens(config),
        distill_coefficient=algorithm.distill_coef,
        time_step=algorithm.time_step,
        ratio_step=ratio_step(config),
        turn_credit=algorithm.turn_credit,
    )


def is_filtered(config: Config) -> bool:
    """Tell whether engines sample from a part of the distribution: their log-probs are then not the policy's."""
    return config.rollout.top_p < 1 or config.rollout.top_k > 0


def critic_settings(config: Config) -> CriticSettings:
    return CriticSettings(
        ValueObjective(config.critic.value_clip),
        config.train.max_epochs,
        score_batches(config),
        train_batches(config),
        config.algorithm.time_step,
    )


def reward_settings(config: Config) -> RewardSettings:
    return RewardSettings(score_batches(config), reward_scale(config))


def score_batches(config: Config) -> BatchSettings:
    return _batches(config, config.rollout)


def train_batches(config: Config) -> BatchSettings:
    return _batches(config, config.train)


def _batches(config: Config, section: TrainConfig | RolloutConfig) -> BatchSettings:
    max_tokens = tokens_per_micro_batch(config, token_budget(section))
    size = None if section.micro_batch_size == "auto" else section.micro_batch_size
    return BatchSettings(
        size,
        max_tokens,
        is_padded=not config.train.packing,
        is_chosen=is_auto(section),
        num_devices=config.train.sequence_parallel_size,
    )


def weight_transports(config: Config, plan: Plan, is_cuda: bool, role: str = "rollout") -> TransportPlan:
    """Return how weights travel to each engine, or to each process of another role that receives them."""
    actor = [process.devices for process in plan.role("actor").processes]
    receivers = [process.devices for process in plan.role(role).processes]
    if config.cluster.runtime == "local" and is_cuda:
        # In one process all roles have the same device, whatever the plan says.
        receivers = [actor[0]] * len(receivers)
    return choose_transports(actor, receivers, is_cuda, config.rollout.weight_transport)
