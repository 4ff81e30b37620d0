"""Makes settings of what learns: training backends, losses, advantages, micro-batches, transports of weights."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotseat.algorithms.distillation import Divergence
from hotseat.checks.tokenizers import reward_scale
from hotseat.config import Config, resolved
from hotseat.config.batches import is_auto, num_checkpointed, token_budget, tokens_per_micro_batch, warmup_steps
from hotseat.config.image_paths import filler_image
from hotseat.config.precision import dtype_of
from hotseat.config.presence import (
    compares_with_reference,
    has_images,
    has_inference,
    has_teacher_alone,
    is_base_reference,
)
from hotseat.config.schema.model_options import OptimizerConfig
from hotseat.config.schema.rollout_options import RolloutConfig
from hotseat.config.schema.train_options import TrainConfig
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.experience import AdvantageSettings
from hotseat.loop.workers.losses import PolicyObjective, ValueObjective
from hotseat.loop.workers.model_workers import PolicySettings
from hotseat.loop.workers.reference import ReferenceSettings
from hotseat.loop.workers.value_models import CriticSettings, RewardSettings
from hotseat.model_source import ModelSource
from hotseat.placement import Plan
from hotseat.registry.backends import backend_entry
from hotseat.registry.correction_kinds import correction_entry
from hotseat.registry.estimators import estimator_entry
from hotseat.train.backend import AdamW, LoraOptions, Muon, Precision, TrainOptions, ZeroOptions
from hotseat.train.schedule import Schedule
from hotseat.user_functions import absolute
from hotseat.weights.transports import TransportPlan, choose_transports

REFERENCE_FOLDER = "reference_log_probs"  # beside the runs, which share it


def train_options(config: Config, schedule_length: int, *, is_trained: bool = True) -> TrainOptions:
    """Return the backend options of the actor, or of a model that is not trained and has no optimizer."""
    train = config.train
    return TrainOptions(
        precision=_precision(config, is_trained),
        **(_optimizer_options(config.actor.optimizer, schedule_length) if is_trained else {"optimizer": None}),
        aux_loss_coefficient=config.algorithm.aux_loss_coef if is_trained else 0.0,
        replays_routing=config.rollout.routing_replay and is_trained,
        lora=lora_options(config) if is_trained else None,
        has_nf4=config.train.load_in_4bit and is_trained,
        average_decay=train.ema.beta if train.ema.enabled and is_trained else None,
        gradient_checkpointing=train.gradient_checkpointing,
        checkpointed_layers=num_checkpointed(config),
        compile=train.compile,
        liger_kernel=train.liger_kernel,
        freeze_visual_encoder=train.freeze_visual_encoder and is_trained,
        filler_image=str(filler_image(config)) if has_images(config) else None,
        layout="auto" if train.packing else "padded",
        attention=train.attention,
        is_deterministic=train.full_determinism,
        sequence_parallel_size=train.sequence_parallel_size,
        max_non_finite=train.max_skipped_steps,
        timeout_s=config.cluster.call_timeout_s,
        backend=train.backend,
        zero=_zero(config, is_trained),
    )


def critic_options(config: Config, schedule_length: int) -> TrainOptions:
    return replace(
        train_options(config, schedule_length),
        head="value",
        value_head_prefix=config.critic.value_head_prefix,
        **_optimizer_options(config.critic.optimizer, schedule_length),
        aux_loss_coefficient=critic_aux_loss(config),
        replays_routing=False,  # it is another model
        average_decay=None,
    )


def critic_aux_loss(config: Config) -> float:
    """Return the coefficient of the critic's balancing loss: the actor's if the critic has experts, else 0."""
    if not config.algorithm.aux_loss_coef:
        return 0.0
    from hotseat.train.experts import has_experts

    model_config = resolved.source_of(config, resolved.critic_model(config)).config()
    return config.algorithm.aux_loss_coef if has_experts(model_config) else 0.0


def reward_options(config: Config) -> TrainOptions:
    return replace(
        train_options(config, 0, is_trained=False),
        head="value",
        value_head_prefix=config.reward.value_head_prefix,
    )


def reference_settings(config: Config, is_offloaded: bool) -> ReferenceSettings | None:
    """Return the settings of a rank's reference in preference optimisation; None if its loss has none."""
    if not compares_with_reference(config):
        return None
    return ReferenceSettings(
        model=resolved.source_of(config, config.reference.model or config.actor.model),
        options=None if is_base_reference(config) else train_options(config, 0, is_trained=False),
        dtype=dtype_of(config),
        is_offloaded=is_offloaded and not config.algorithm.dpo.precompute,
        folder=str(Path(config.run_dir) / REFERENCE_FOLDER) if config.algorithm.dpo.precompute else None,
    )


def lora_options(config: Config) -> LoraOptions | None:
    lora = config.train.lora
    if lora.rank == 0:
        return None
    targets = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules)
    return LoraOptions(lora.rank, lora.alpha, lora.dropout, targets, config.seed)


def _zero(config: Config, is_trained: bool) -> ZeroOptions | None:
    zero = config.train.deepspeed
    if not backend_entry(config.train.backend).has_zero_options:
        return None
    return ZeroOptions(
        stage=zero.zero_stage,
        adam_offload=zero.adam_offload and is_trained,  # a model that is only scored has no Adam
        zpg=zero.zpg,
        overlap_comm=zero.overlap_comm,
        grad_accum_dtype=zero.grad_accum_dtype,
        deepcompile=zero.deepcompile,
        tensor_parallel_size=zero.tensor_parallel_size,
    )


def _optimizer_options(optimizer: OptimizerConfig, num_steps: int) -> dict[str, Any]:
    schedule = Schedule(
        kind=optimizer.schedule,
        peak=optimizer.learning_rate,
        num_warmup_steps=warmup_steps(num_steps, optimizer.warmup_ratio),
        num_steps=num_steps,
        min_ratio=optimizer.min_learning_rate_ratio,
    )
    return {
        "optimizer": AdamW(optimizer.betas, optimizer.eps, optimizer.weight_decay),
        "muon": Muon(optimizer.muon.learning_rate, optimizer.muon.momentum) if optimizer.kind == "muon" else None,
        "schedule": schedule,
        "max_grad_norm": optimizer.max_grad_norm or None,
    }


def _precision(config: Config, is_trained: bool) -> Precision:
    dtype = dtype_of(config)
    if dtype != "bf16":
        return dtype
    # Weights that are not trained need no fp32 copy: nothing is added to them.
    return "bf16_master" if config.train.fp32_master and is_trained else "bf16"


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
        aggregation=resolved.aggregation(config),
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
        score=batch_settings(config, config.rollout),
        train=batch_settings(config, config.train),
        # A sample whose advantage is zero still says something about the balance of experts.
        learns_from_every_sample=algorithm.aux_loss_coef > 0,
        version=version,
    )


def _policy_objective(config: Config, kl_coefficient: float, max_lag: int) -> PolicyObjective:
    algorithm, correction = config.algorithm, config.algorithm.correction
    weighing = correction_entry(resolved.correction_kind(config))
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
        kl_estimator=resolved.kl_estimator(config),
        kl_coefficient=kl_coefficient,
        entropy_coefficient=algorithm.entropy_coef,
        ratio_to="rollout" if weighing.replaces_ratio else "old",
        max_lag=max_lag,
        gate_temperatures=(algorithm.gate_temperature_pos, algorithm.gate_temperature_neg),
        divergence=divergence_of(config),
        divergence_coefficient=algorithm.distill.coef,
    )


def divergence_of(config: Config) -> Divergence | None:
    """Return how the policy is compared with its teacher's distributions; None if it is not."""
    distill, reference = config.algorithm.distill, config.reference
    if distill.coef == 0:
        return None
    models = (config.actor.model, *([reference.model] if reference.model else reference.teachers.values()))
    temperature = config.rollout.temperature if distill.temperature is None else distill.temperature
    size = min(_vocab_size(resolved.source_of(config, model)) for model in models)
    return Divergence(distill.divergence, temperature, distill.beta, distill.top_k, distill.tail, size)


@functools.cache
def _vocab_size(model: ModelSource) -> int:
    size: int = model.config().get_text_config().vocab_size
    return size


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
        kl_estimator=resolved.kl_estimator(config),
        overlong_buffer=reward.overlong.buffer_length,
        overlong_factor=reward.overlong.penalty_factor,
        truncation_penalty=reward.truncation_penalty,
        max_sampled=resolved.max_sampled_tokens(config),
        distill_coefficient=algorithm.distill_coef,
        time_step=algorithm.time_step,
        ratio_step=resolved.ratio_step(config),
        turn_credit=algorithm.turn_credit,
        reward_parts=tuple(resolved.reward_parts(config).items()),
        needs_parts=estimator_entry(algorithm.estimator).compares_parts,
        has_rewards=not has_teacher_alone(config),
    )


def is_filtered(config: Config) -> bool:
    """Tell whether engines sample from a part of the distribution: their log-probs are then not the policy's."""
    return config.rollout.top_p < 1 or config.rollout.top_k > 0


def critic_settings(config: Config) -> CriticSettings:
    return CriticSettings(
        ValueObjective(config.critic.value_clip),
        config.train.max_epochs,
        batch_settings(config, config.rollout),
        batch_settings(config, config.train),
        config.algorithm.time_step,
    )


def reward_settings(config: Config) -> RewardSettings:
    return RewardSettings(batch_settings(config, config.rollout), reward_scale(config))


def batch_settings(config: Config, section: TrainConfig | RolloutConfig) -> BatchSettings:
    """Return the size of micro-batches in training, or in scoring, which is the size that `rollout` has."""
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
    if config.cluster.is_in_process and is_cuda:
        # In one process all roles have the same device, whatever the plan says.
        receivers = [actor[0]] * len(receivers)
    return choose_transports(actor, receivers, is_cuda, config.rollout.weight_transport)
