"""The flags of OpenRLHF's four commands. Nothing is imported here but the standard library and `flag.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotseat.openrlhf.flag import (
    MANY,
    UNBOUNDED,
    Flag,
    all_or_some,
    decimal,
    flag,
    from_zero,
    integer,
    integer_or_auto,
    ipo_or_dpo,
    negated,
    switch,
    symmetric,
    text,
    unless_minus_one,
    unless_unbounded,
    whole,
)

NO_RING = "ranks that share sequences exchange all heads at once (Ulysses), not in a ring; the result is the same"
FLASH_ALWAYS = "attention is torch's own in any case, with its flash kernels on GPUs in 16 bits"
NEVER_REENTRANT = "recomputation is never reentrant; the gradients are the same"
EXPERTS = "transformers chooses how experts are computed; the result is the same"
UNIVERSAL = "every checkpoint loads under another stage or number of ranks"
OWN_TOKENIZER = "a tokenizer is loaded as its checkpoint defines it"
NO_LOADER = "rows are tokenised before training, so no loader runs beside it"
TASKS_PER_ENGINE = "OPENRLHF_ASYNC_NUM_TASKS says how many episodes an engine takes"

# --- flags of all four commands ---------------------------------------------------------------------------------------


# {model}: what the newer spelling calls the trained model, actor in RL, model elsewhere.
_SHARED: tuple[Flag, ...] = (
    # ours
    flag("--backend", None, "train.backend", default="deepspeed", aliases=("--dist_backend",)),
    flag("--engine", None, "rollout.engine", default="vllm", by="engine"),
    flag("--inventory", None, "cluster.inventory"),
    flag("--allow_change", None, "checkpoint.allow_changes", num_values=(1, MANY)),
    decimal("--max_lost_fraction", None, 1.0, "data.max_lost_fraction"),
    flag("--run_dir", None, "run_dir"),
    # model
    text("--pretrain", "--{model}.model_name_or_path", None, "actor.model"),
    switch("--use_ms", None, "use_modelscope"),
    switch("--gradient_checkpointing", "--{model}.gradient_checkpointing_enable", "train.gradient_checkpointing"),
    switch(
        "--gradient_checkpointing_use_reentrant",
        "--{model}.gradient_checkpointing_reentrant",
        because=NEVER_REENTRANT,
    ),
    switch("--bf16", None, "train.dtype", by="dtype"),
    text("--param_dtype", "--ds.param_dtype", None, "train.dtype", by="dtype", newer_default="bf16"),
    switch("--flash_attn", None, by="attention", because=FLASH_ALWAYS),
    text("--attn_implementation", "--ds.attn_implementation", None, "train.attention", by="attention"),
    text("--experts_implementation", "--ds.experts_implementation", None, because=EXPERTS),
    switch("--use_liger_kernel", "--ds.use_liger_kernel", "train.liger_kernel"),
    switch("--torch_compile", None, because="layers are compiled on a GPU wherever there is a compiler"),
    switch("--packing_samples", "--ds.packing_samples", "train.packing", by="micro_batches"),
    integer("--ring_attn_size", "--ds.ring_attn_size", 1, "train.sequence_parallel_size"),
    integer("--ring_head_stride", "--ds.ring_attn_head_stride", 1, because=NO_RING),
    switch("--load_in_4bit", "--ds.load_in_4bit", "train.load_in_4bit"),
    integer("--lora_rank", "--ds.lora.rank", 0, "train.lora.rank"),
    integer("--lora_alpha", "--ds.lora.alpha", 16, "train.lora.alpha"),
    decimal("--lora_dropout", "--ds.lora.dropout", 0.0, "train.lora.dropout"),
    flag(
        "--target_modules",
        "--ds.lora.target_modules",
        "train.lora.target_modules",
        default=["all-linear"],
        num_values=(1, MANY),
        convert=all_or_some,
    ),
    decimal("--aux_loss_coef", "--{model}.aux_loss_coef", 0.0, "algorithm.aux_loss_coef"),
    # DeepSpeed
    integer("--local_rank", None, -1, read_by="hotseat/openrlhf/run_command.py:is_launched", aliases=("--local-rank",)),
    integer("--zero_stage", "--ds.zero_stage", 2, "train.deepspeed.zero_stage"),
    switch("--adam_offload", "--ds.adam_offload", "train.deepspeed.adam_offload"),
    integer("--zpg", "--ds.zpg", 1, "train.deepspeed.zpg"),
    switch("--overlap_comm", "--ds.overlap_comm", "train.deepspeed.overlap_comm"),
    text("--grad_accum_dtype", "--ds.grad_accum_dtype", None, "train.deepspeed.grad_accum_dtype"),
    switch("--deepcompile", "--ds.deepcompile", "train.deepspeed.deepcompile"),
    integer("--ds_tensor_parallel_size", "--ds.tensor_parallel_size", 1, "train.deepspeed.tensor_parallel_size"),
    switch("--use_ds_universal_ckpt", "--ds.use_universal_ckpt", because=UNIVERSAL),
    # batches
    integer("--train_batch_size", "--train.batch_size", 128, "train.batch_size"),
    integer_or_auto("--micro_train_batch_size", "--train.micro_batch_size", 8, "train.micro_batch_size"),
    integer("--max_epochs", "--train.max_epochs", 1, "train.max_epochs"),
    integer("--seed", "--train.seed", 42, "seed"),
    switch("--full_determinism", "--train.full_determinism_enable", "train.full_determinism"),
    # data
    integer("--max_samples", "--data.max_samples", UNBOUNDED, "data.max_samples", convert=unless_unbounded),
    text("--input_template", "--data.input_template", None, "data.input_template", by="template"),
    switch("--apply_chat_template", "--data.apply_chat_template", "data.apply_chat_template"),
    switch("--disable_fast_tokenizer", "--data.disable_fast_tokenizer", because=OWN_TOKENIZER),
    integer("--dataloader_num_workers", "--data.dataloader_num_workers", 0, because=NO_LOADER),
    # evaluation, checkpoints, logs
    text("--eval_dataset", "--eval.dataset", None, "eval.path"),
    text("--eval_split", "--eval.split", "train", "eval.split"),
    integer("--eval_steps", "--eval.steps", -1, "eval.every", convert=unless_minus_one),
    text("--save_path", "--ckpt.output_dir", "./ckpt", "checkpoint.export_path"),
    text("--ckpt_path", "--ckpt.path", None, "checkpoint.path"),
    integer(
        "--save_steps", "--ckpt.save_steps", -1, ("checkpoint.every", "checkpoint.every_minutes"), by="checkpoints"
    ),
    switch("--save_hf_ckpt", "--ckpt.save_hf", "checkpoint.export_each"),
    switch("--disable_ds_ckpt", "--ckpt.disable_ds", "checkpoint.save_state", convert=negated),
    integer("--max_ckpt_num", "--ckpt.max_num", 3, "checkpoint.keep_last"),
    decimal("--max_ckpt_mem", "--ckpt.max_mem", UNBOUNDED, "checkpoint.max_gib", convert=unless_unbounded),
    switch("--load_checkpoint", "--ckpt.load_enable", "checkpoint.resume"),
    integer("--logging_steps", "--logger.logging_steps", 1, "log.every"),
    text("--use_tensorboard", "--logger.tensorboard_dir", None, "log.tensorboard_path"),
    text("--use_wandb", "--logger.wandb.key", None, "log.wandb.enabled", by="wandb", is_secret=True),
    text("--wandb_org", "--logger.wandb.org", None, "log.wandb.org"),
    text("--wandb_group", "--logger.wandb.group", None, "log.wandb.group"),
    text("--wandb_project", "--logger.wandb.project", None, "log.wandb.project"),
    # OpenRLHF's default is made of the time of day; unset, the run's own name is taken.
    text("--wandb_run_name", "--logger.wandb.run_name", None, "log.wandb.run_name"),
)

NO_PRETRAINING = "there is no loss on pretraining text (OpenRLHF reads it nowhere either)"
SCHEDULES: Mapping[str, tuple[str, bool, bool]] = {
    # name in transformers: our schedule, whether it ends at a least learning rate, whether it warms up
    "cosine_with_min_lr": ("cosine", True, True),
    "cosine": ("cosine", False, True),
    "linear": ("linear", False, True),
    "constant_with_warmup": ("constant", False, True),
    "constant": ("constant", False, False),
}
_COURSE = ("schedule", "warmup_ratio", "min_learning_rate_ratio")


def _optimizer(prefix: str, role: str, muon_only: bool = False) -> tuple[Flag, ...]:
    """Flags of one model's optimizer that have no other spelling. Unset, they leave it to the flags of all models."""
    at = f"{role}.optimizer"
    fixed = "Muon always takes five Newton-Schulz steps with Nesterov momentum, as DeepSpeed's does"
    muon = (
        text(f"--{prefix}optim", None, "adam", f"{at}.kind", choices={"adam": "adamw", "muon": "muon"}),
        decimal(f"--{prefix}muon.lr", None, 0.02, f"{at}.muon.learning_rate"),
        decimal(f"--{prefix}muon.momentum", None, 0.95, f"{at}.muon.momentum"),
        integer(f"--{prefix}muon.ns_steps", None, 5, because=fixed),
        switch(f"--{prefix}muon.nesterov", None, because=fixed),
        switch(f"--{prefix}muon.no_nesterov", None, because=fixed),
        decimal(f"--{prefix}adam.eps", None, 1e-8, f"{at}.eps"),
    )
    if muon_only:
        return muon
    return (
        *muon,
        decimal(f"--{prefix}adam.betas", None, None, f"{at}.betas", num_values=(2, 2)),
        decimal(f"--{prefix}adam.weight_decay", None, None, f"{at}.weight_decay"),
        decimal(f"--{prefix}max_norm", None, None, f"{at}.max_grad_norm"),
        text(f"--{prefix}lr_scheduler", None, None, [f"{at}.{name}" for name in _COURSE], by="schedule"),
        decimal(f"--{prefix}lr_warmup_ratio", None, None, f"{at}.warmup_ratio", by="schedule"),
        decimal(f"--{prefix}min_lr_ratio", None, None, f"{at}.min_learning_rate_ratio", by="schedule"),
    )


def _optimizers(*roles: str, dotted: bool) -> tuple[Flag, ...]:
    """Flags for the optimizers of all trained models together."""

    def at(name: str) -> tuple[str, ...]:
        return tuple(f"{role}.optimizer.{name}" for role in roles)

    course = [key for name in _COURSE for key in at(name)]
    return (
        decimal("--adam_betas", "--adam.betas" if dotted else None, [0.9, 0.95], at("betas"), num_values=(2, 2)),
        decimal("--l2", "--adam.weight_decay" if dotted else None, 0.0, at("weight_decay")),
        decimal("--max_norm", None, 1.0, at("max_grad_norm")),
        text("--lr_scheduler", None, "cosine_with_min_lr", course, by="schedule"),
        decimal("--lr_warmup_ratio", None, 0.03, at("warmup_ratio"), by="schedule"),
        decimal("--min_lr_ratio", None, 0.1, at("min_learning_rate_ratio"), by="schedule"),
    )


# --- reinforcement learning -------------------------------------------------------------------------------------------

_PLACEMENT = "cluster.component_placement"
_OVERLAP = ("overlap.queue", "overlap.staleness")
_PARTIAL = ("overlap.staleness", "overlap.order", "overlap.in_flight")
_BUDGETS = ("train.max_tokens_per_device", "rollout.max_tokens_per_device", "train.packing")
_CLIP = ("algorithm.clip_low", "algorithm.clip_high")
_BOUNDS = ("algorithm.correction.low", "algorithm.correction.high")
_CORRECTION = ("algorithm.correction.kind", *_BOUNDS)
_FILTERED = ("algorithm.filtering.low", "algorithm.filtering.high")


def _size(role: str, dotted: str) -> tuple[Flag, ...]:
    return (
        integer(f"--{role}_num_nodes", f"--{dotted}.num_nodes", 1, _PLACEMENT, by="placement"),
        integer(f"--{role}_num_gpus_per_node", f"--{dotted}.num_gpus_per_node", 8, _PLACEMENT, by="placement"),
    )


_RL: tuple[Flag, ...] = (
    # placement
    *_size("actor", "actor"),
    *_size("critic", "critic"),
    *_size("ref", "ref"),
    *_size("reward", "reward"),
    switch("--colocate_actor_ref", "--train.colocate_actor_ref", _PLACEMENT, by="placement"),
    switch("--colocate_critic_reward", "--train.colocate_critic_reward", _PLACEMENT, by="placement"),
    switch("--colocate_all_models", "--train.colocate_all", _PLACEMENT, by="placement"),
    switch("--ref_reward_offload", None, ("reference.enable_offload", "reward.enable_offload"), by="offload"),
    switch("--ref.offload", None, "reference.enable_offload", by="offload"),
    switch("--reward.offload", None, "reward.enable_offload", by="offload"),
    switch(
        "--deepspeed_enable_sleep", "--ds.enable_sleep", ("actor.enable_offload", "critic.enable_offload"), by="offload"
    ),
    switch("--actor_init_on_gpu", None, because="weights are loaded straight to where they are trained"),
    # engines
    integer("--vllm_num_engines", "--vllm.num_engines", None, (_PLACEMENT, "rollout.num_engines"), by="placement"),
    integer(
        "--vllm_tensor_parallel_size",
        "--vllm.tensor_parallel_size",
        1,
        (_PLACEMENT, "rollout.tensor_parallel_size"),
        by="placement",
    ),
    text("--vllm_sync_backend", "--vllm.sync_backend", None, "rollout.weight_transport"),
    switch("--vllm_sync_with_ray", "--vllm.sync_with_ray", because="weights do not travel through Ray's collectives"),
    switch("--enable_prefix_caching", "--vllm.enable_prefix_caching", "rollout.prefix_caching"),
    switch("--enforce_eager", "--vllm.enforce_eager", "rollout.enforce_eager"),
    switch("--vllm_enable_sleep", "--vllm.enable_sleep", "rollout.enable_offload", by="offload"),
    decimal("--vllm_gpu_memory_utilization", "--vllm.gpu_memory_utilization", 0.95, "rollout.memory_share"),
    integer("--rollout_tasks_per_gpu", None, 32, because=TASKS_PER_ENGINE),
    # overlap and agents
    switch("--async_train", "--train.async_enable", _OVERLAP, by="overlap"),
    integer("--async_queue_size", "--train.async_queue_size", 1, _OVERLAP, by="overlap"),
    switch("--partial_rollout", "--train.partial_rollout_enable", _PARTIAL, by="overlap"),
    text("--agent_func_path", "--train.agent_func_path", None, "agent.path"),
    integer("--max_steps", None, None, "agent.max_steps"),
    decimal("--agent_timeout", None, 1200.0, "agent.timeout_s"),
    decimal("--agent_turn_timeout", None, None, "agent.turn_timeout_s"),
    decimal("--agent_tool_timeout", None, None, "agent.tool_timeout_s"),
    # batches and lengths
    integer("--rollout_batch_size", "--rollout.batch_size", 1024, "rollout.batch_size"),
    integer_or_auto(
        "--micro_rollout_batch_size", "--rollout.micro_batch_size", 8, "rollout.micro_batch_size", newer_default=1
    ),
    integer("--n_samples_per_prompt", "--rollout.n_samples_per_prompt", 1, "rollout.samples_per_prompt"),
    integer("--vllm_generate_batch_size", "--rollout.vllm_generate_batch_size", None, _OVERLAP, by="overlap"),
    integer("--num_episodes", "--train.num_episodes", 1, "train.num_episodes"),
    switch("--use_dynamic_batch", "--train.dynamic_batch_enable", _BUDGETS, by="micro_batches"),
    integer(
        "--train_max_tokens_per_gpu",
        "--train.max_tokens_per_gpu",
        16192,
        "train.max_tokens_per_device",
        by="micro_batches",
    ),
    integer(
        "--rollout_max_tokens_per_gpu",
        "--rollout.max_tokens_per_gpu",
        None,
        "rollout.max_tokens_per_device",
        by="micro_batches",
    ),
    integer(
        "--prompt_max_len", None, 1024, ("data.prompt_max_length", "data.max_length"), by="lengths", newer_default=None
    ),
    integer(
        "--generate_max_len",
        "--rollout.max_new_tokens",
        1024,
        ("rollout.max_new_tokens", "data.max_length"),
        by="lengths",
        newer_default=None,
    ),
    integer("--max_len", "--data.max_len", None, "data.max_length", by="lengths", newer_default=2048),
    decimal("--temperature", "--rollout.temperature", 1.0, "rollout.temperature"),
    decimal("--top_p", "--rollout.top_p", 1.0, "rollout.top_p"),
    # models
    text("--critic_pretrain", "--critic.model_name_or_path", None, "critic.model", by="critic"),
    text("--reward_pretrain", "--reward.model_name_or_path", None, "reward.model", by="reward"),
    text("--remote_rm_url", "--reward.remote_url", None, ("reward.function", "reward.url"), by="reward"),
    text(
        "--value_head_prefix",
        "--ds.value_head_prefix",
        "score",
        ("critic.value_head_prefix", "reward.value_head_prefix"),
    ),
    switch("--freeze_visual_encoder", "--actor.freeze_visual_encoder", "train.freeze_visual_encoder", by="images"),
    # optimizers
    decimal("--actor_learning_rate", "--actor.adam.lr", 1e-6, "actor.optimizer.learning_rate"),
    decimal("--critic_learning_rate", "--critic.adam.lr", 9e-6, "critic.optimizer.learning_rate"),
    *_optimizers("actor", "critic", dotted=False),
    *_optimizer("actor.", "actor"),
    *_optimizer("critic.", "critic"),
    integer("--freezing_actor_steps", "--critic.freezing_steps", -1, "critic.warmup_steps", convert=from_zero),
    decimal("--value_clip", "--critic.value_clip", 0.5, "critic.value_clip"),
    switch("--save_value_network", "--critic.save_value_network", "checkpoint.export_critic"),
    switch("--enable_ema", "--train.enable_ema", "train.ema.enabled"),
    decimal("--ema_beta", "--train.ema_beta", 0.992, "train.ema.beta"),
    # maths
    text("--advantage_estimator", "--algo.advantage.estimator", "gae", "algorithm.estimator", by="estimator"),
    decimal("--gamma", "--algo.advantage.gamma", 1.0, "algorithm.gamma"),
    decimal("--lambd", "--algo.advantage.lambd", 1.0, "algorithm.gae_lambda"),
    switch("--no_advantage_std_norm", "--algo.advantage.no_std_norm", "algorithm.std_norm", by="estimator"),
    text("--policy_loss_type", "--actor.policy_loss_type", "ppo", "algorithm.policy_loss"),
    decimal("--eps_clip", "--actor.eps_clip", 0.2, _CLIP, by="clip"),
    decimal("--eps_clip_low_high", "--actor.eps_clip_low_high", None, _CLIP, by="clip", num_values=(2, 2)),
    decimal("--clip_eps_low", None, None, "algorithm.clip_low", by="clip"),
    decimal("--clip_eps_high", None, None, "algorithm.clip_high", by="clip"),
    decimal("--dual_clip", "--actor.dual_clip", None, "algorithm.dual_clip"),
    decimal("--entropy_loss_coef", "--actor.entropy_coef", None, "algorithm.entropy_coef"),
    decimal("--ptx_coef", None, 0.05, because=NO_PRETRAINING),
    decimal("--init_kl_coef", "--algo.kl.init_coef", 0.01, "algorithm.kl.coef"),
    decimal("--kl_target", "--algo.kl.target", None, "algorithm.kl.target"),
    integer("--kl_horizon", "--algo.kl.horizon", 10000, "algorithm.kl.horizon"),
    text("--kl_estimator", "--algo.kl.estimator", "k1", "algorithm.kl.estimator", by="kl"),
    switch("--use_kl_loss", "--algo.kl.use_loss", "algorithm.kl.as_loss"),
    switch("--enable_vllm_is_correction", "--algo.advantage.is_correction_enable", _CORRECTION, by="correction"),
    text(
        "--vllm_is_correction_type",
        "--algo.advantage.is_correction_type",
        None,
        "algorithm.correction.kind",
        by="correction",
    ),
    decimal(
        "--vllm_is_truncated_threshold",
        "--algo.advantage.is_correction_threshold",
        None,
        _BOUNDS,
        by="correction",
        num_values=(1, 2),
    ),
    switch("--dynamic_filtering", "--algo.dynamic_filtering_enable", "algorithm.filtering.enabled"),
    decimal(
        "--dynamic_filtering_reward_range",
        "--algo.dynamic_filtering_range",
        [0.0, 1.0],
        _FILTERED,
        by="filtering",
        num_values=(2, 2),
    ),
    # rewards
    switch("--normalize_reward", "--reward.normalize_enable", "reward.normalize"),
    decimal(
        "--reward_clip_range", "--reward.clip_range", [-10.0, 10.0], "reward.clip", num_values=(1, 2), convert=symmetric
    ),
    decimal(
        "--overlong_buffer_len", "--reward.overlong_buffer_len", None, "reward.overlong.buffer_length", convert=whole
    ),
    decimal("--reward_trial_timeout", None, 10.0, "reward.trial_timeout_s"),
    decimal("--overlong_penalty_factor", "--reward.overlong_penalty_factor", 1.0, "reward.overlong.penalty_factor"),
    decimal("--stop_properly_penalty_coef", "--reward.stop_properly_penalty_coef", None, "reward.truncation_penalty"),
    # data
    text("--prompt_data", "--data.prompt_dataset", None, "data.path"),
    text("--prompt_data_probs", "--data.prompt_probs", None, "data.probs"),
    text("--prompt_split", "--data.prompt_split", "train", "data.split"),
    text("--input_key", "--data.input_key", "input", "data.input_key"),
    text("--label_key", "--data.label_key", None, "data.label_key"),
    text("--image_key", "--data.image_key", None, "data.image_key", by="images"),
    integer("--max_images_per_prompt", "--data.max_images_per_prompt", 0, "data.max_images_per_prompt", by="images"),
    decimal("--eval_temperature", "--eval.temperature", 0.6, "eval.temperature"),
    integer("--eval_n_samples_per_prompt", "--eval.n_samples_per_prompt", 4, "eval.samples_per_prompt"),
    text("--best_metric_key", "--ckpt.best_metric_key", None, "checkpoint.best_metric"),
    switch("--perf", None, because="times are always recorded"),
)


# --- supervised -------------------------------------------------------------------------------------------------------

_SUPERVISED: tuple[Flag, ...] = (
    decimal("--learning_rate", "--adam.lr", None, "actor.optimizer.learning_rate"),
    *_optimizers("actor", dotted=True),
    *_optimizer("", "actor", muon_only=True),
    integer("--max_len", "--data.max_len", 512, "data.max_length"),
    text("--dataset", "--data.dataset", None, "data.path"),
    text("--dataset_probs", "--data.dataset_probs", None, "data.probs"),
    text("--dataset_split", "--data.dataset_split", "train", "data.split", aliases=("--train_split",)),
    text("--tokenizer_chat_template", "--data.tokenizer_chat_template", None, "data.chat_template"),
)
_PAIRS: tuple[Flag, ...] = (
    text("--prompt_key", "--data.prompt_key", None, "data.prompt_key"),
    text("--chosen_key", "--data.chosen_key", "chosen", "data.chosen_key"),
    text("--rejected_key", "--data.rejected_key", "rejected", "data.rejected_key"),
)
_SFT: tuple[Flag, ...] = (
    text("--input_key", "--data.input_key", "input", "data.input_key"),
    text("--output_key", "--data.output_key", None, "data.output_key"),
    switch("--multiturn", "--data.multiturn", "data.multiturn"),
    switch(
        "--pretrain_mode", "--model.pretrain_mode_enable", "data.pretrain_mode", aliases=("--pretrain_mode_enable",)
    ),
)
_RM: tuple[Flag, ...] = (
    text("--loss", "--model.loss_type", "sigmoid", "algorithm.reward_modelling.loss", aliases=("--loss_type",)),
    switch(
        "--margin_loss",
        "--model.margin_loss_enable",
        "algorithm.reward_modelling.margin",
        aliases=("--margin_loss_enable",),
    ),
    switch(
        "--compute_fp32_loss",
        "--model.compute_fp32_loss_enable",
        aliases=("--compute_fp32_loss_enable",),
        because="the loss is always computed in fp32",
    ),
    text("--value_head_prefix", "--ds.value_head_prefix", "score", "algorithm.reward_modelling.value_head_prefix"),
)
_DPO: tuple[Flag, ...] = (
    decimal("--beta", "--model.beta", 0.1, "algorithm.dpo.beta"),
    switch("--ipo", "--model.ipo_enable", "algorithm.dpo.loss", convert=ipo_or_dpo, aliases=("--ipo_enable",)),
    decimal("--label_smoothing", "--model.label_smoothing", 0.0, "algorithm.dpo.label_smoothing"),
    decimal("--nll_loss_coef", "--model.nll_loss_coef", 0.0, "algorithm.dpo.nll_coef"),
    text("--ref_pretrain", "--ref.model_name_or_path", None, "reference.model"),
    switch("--ref_offload", "--ref.offload", "reference.enable_offload", by="offload"),
)


# --- the four commands ------------------------------------------------------------------------------------------------

TASKS: Mapping[str, str] = {"train_ppo_ray": "rl", "train_sft": "sft", "train_rm": "rm", "train_dpo": "dpo"}


def _command(
    own: tuple[Flag, ...], model: str, defaults: Mapping[str, Any], newer: Mapping[str, Any] | None = None
) -> tuple[Flag, ...]:
    """The flags of a command, some with a default that only it has."""
    newer = newer or {}
    return tuple(
        replace(
            each,
            dotted=each.dotted and each.dotted.format(model=model),
            default=defaults.get(each.name, each.default),
            newer_default=newer.get(each.name, each.newer_default),
        )
        for each in (*_SHARED, *own)
    )


COMMANDS: Mapping[str, tuple[Flag, ...]] = {
    "train_ppo_ray": _command(
        _RL,
        "actor",
        {
            "--micro_train_batch_size": 4,
            "--ckpt_path": "./ckpt/checkpoints_ppo_ray",
            "--wandb_project": "openrlhf_train_ppo",
        },
        newer={"--micro_train_batch_size": 1},
    ),
    "train_sft": _command(
        (*_SUPERVISED, *_SFT),
        "model",
        {
            "--learning_rate": 5e-6,
            "--max_epochs": 2,
            "--max_len": 2048,
            "--max_samples": 1_000_000,
            "--input_template": "User: {}\nAssistant: ",
            "--ckpt_path": "./ckpt/checkpoints_sft",
            "--wandb_project": "openrlhf_train_sft",
        },
    ),
    "train_rm": _command(
        (*_SUPERVISED, *_PAIRS, *_RM),
        "model",
        {
            "--learning_rate": 9e-6,
            "--micro_train_batch_size": 1,
            "--max_samples": 1_000_000,
            "--ckpt_path": "./ckpt/checkpoints_rm",
            "--wandb_project": "openrlhf_train_rm",
        },
    ),
    "train_dpo": _command(
        (*_SUPERVISED, *_PAIRS, *_DPO),
        "model",
        {
            "--learning_rate": 1e-5,
            "--max_samples": 1_000_000,
            "--eval_split": "test",
            "--ckpt_path": "./ckpt/checkpoints_dpo",
            "--wandb_project": "openrlhf_train_dpo",
        },
    ),
}


def spellings(command: str) -> dict[str, Flag]:
    """Return the flags of a command by each of their spellings."""
    return {spelling: each for each in COMMANDS[command] for spelling in each.spellings}
