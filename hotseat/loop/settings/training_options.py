"""Makes options of training backends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hotseat.config import Config
from hotseat.config.batches import num_checkpointed, warmup_steps
from hotseat.config.image_paths import filler_image
from hotseat.config.precision import dtype_of
from hotseat.config.presence import compares_with_reference, has_images, is_base_reference
from hotseat.config.resolved import critic_model, source_of
from hotseat.config.schema import OptimizerConfig
from hotseat.loop.workers.reference import ReferenceSettings
from hotseat.registry.backends import backend_entry
from hotseat.train.backend import AdamW, LoraOptions, Muon, Precision, TrainOptions, ZeroOptions
from hotseat.train.schedule import Schedule

REFERENCE_FOLDER = "reference_log_probs"  # beside the runs, which share it


def train_options(config: Config, schedule_length: int, *, is_trained: bool = True) -> TrainOptions:
    """Return the backend options of the actor, or of a model that is not trained and has no optimizer."""
    train = config.train
    return TrainOptions(
        precision=_precision(config, is_trained),
        optimizer=_adamw(config.actor.optimizer) if is_trained else None,
        muon=_muon(config.actor.optimizer) if is_trained else None,
        schedule=_schedule(config.actor.optimizer, schedule_length) if is_trained else Schedule(),
        max_grad_norm=config.actor.optimizer.max_grad_norm or None,
        aux_loss_coefficient=config.algorithm.aux_loss_coef if is_trained else 0.0,
        lora=lora_options(config) if is_trained else None,
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
    optimizer = config.critic.optimizer
    return replace(
        train_options(config, schedule_length),
        head="value",
        value_head_prefix=config.critic.value_head_prefix,
        optimizer=_adamw(optimizer),
        muon=_muon(optimizer),
        schedule=_schedule(optimizer, schedule_length),
        max_grad_norm=optimizer.max_grad_norm or None,
        aux_loss_coefficient=critic_aux_loss(config),
        average_decay=None,
    )


def critic_aux_loss(config: Config) -> float:
    """Return the coefficient of the critic's balancing loss: the actor's if the critic has experts, else 0."""
    if not config.algorithm.aux_loss_coef:
        return 0.0
    from hotseat.train.experts import has_experts

    model_config = source_of(config, critic_model(config)).config()
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
        model=source_of(config, config.reference.model or config.actor.model),
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


def _adamw(optimizer: OptimizerConfig) -> AdamW:
    return AdamW(optimizer.betas, optimizer.eps, optimizer.weight_decay)


def _muon(optimizer: OptimizerConfig) -> Muon | None:
    return Muon(optimizer.muon.learning_rate, optimizer.muon.momentum) if optimizer.kind == "muon" else None


def _schedule(optimizer: OptimizerConfig, num_steps: int) -> Schedule:
    return Schedule(
        kind=optimizer.schedule,
        peak=optimizer.learning_rate,
        num_warmup_steps=warmup_steps(num_steps, optimizer.warmup_ratio),
        num_steps=num_steps,
        min_ratio=optimizer.min_learning_rate_ratio,
    )


def _precision(config: Config, is_trained: bool) -> Precision:
    dtype = dtype_of(config)
    if dtype != "bf16":
        return dtype
    # Weights that are not trained need no fp32 copy: nothing is added to them.
    return "bf16_master" if config.train.fp32_master and is_trained else "bf16"
