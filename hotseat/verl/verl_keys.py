"""The keys of verl's `main_ppo`: their kinds, their defaults, and what becomes of each here.

Keys and defaults are those of verl 0.9.1 with FSDP, and older names that still work there. A key sets config fields, or
has no effect, or is refused with any value but its default. Nothing is imported here but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "float", "bool", "text", "list", "any"]
Effect = Literal["mapped", "without effect", "refused"]
OWN = "hotseat."  # the prefix of keys of our own config

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MODEL, _CRITIC = "actor_rollout_ref.model", "critic"
_PLACEMENT = "cluster.component_placement"
_WHERE = "checkpoint.path"


@dataclass(frozen=True)
class Key:
    """One key. It sets config fields, or has no effect (and says why), or is refused (and says what would fit).

    default: verl's; `${a.b}` in it stands for the value of another key. fits: values besides the default that are
    not refused. same_as: a key whose value this one must have, too. is_section: it stands for all keys below it.
    """

    name: str
    kind: Kind = "any"
    default: Any = None
    sets: tuple[str, ...] = ()  # config fields
    by: str | None = None  # name of the function in derive.py that computes the fields; None: the value is copied
    convert: Callable[[Any], Any] | None = None  # applied to a value that is copied
    because: str | None = None
    refused: str | None = None
    fits: tuple[Any, ...] = ()
    same_as: str | None = None
    is_section: bool = False
    is_optional: bool = False  # null is a value, though not the default
    aliases: tuple[str, ...] = ()  # older names

    @property
    def effect(self) -> Effect:
        return "mapped" if self.sets else "without effect" if self.because else "refused"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


# --- why keys have no effect, and what fits instead of those that are refused -----------------------------------------

_CUT = "a batch is cut the same way for all models, by the actor's keys; how it is cut changes speed alone"
_SHARED = "actor, critic and reference share it: the actor's key sets it"
_SHARDED = "weights are sharded over all ranks and gathered layer by layer; the result is the same"
_LOGITS = "log-probs and entropies are computed in chunks in any case"
_PADDING = "packed sequences are not padded to a length"
_PROFILING = "times and memory of every step are recorded in any case (docs/run-directory.md)"
_ONE_SEED = "data.seed is the seed of the whole run"
_LOADING = "weights are loaded straight to where they are used"
_NO_LOADER = "rows are read and tokenised before training, so no loader runs beside it"
_TOKENS = "engines get tokens and return tokens"
_RAY = "processes get what they need from the placement; Ray takes its own settings from its environment variables"
_NOT_QUANTISED = "weights are not quantised in training: give false"
_DIVIDED = "batches are divided over ranks by their tokens where micro-batches are cut by tokens"

_FSDP_ONLY = "FSDP and DeepSpeed train here: give model_engine=dp and the keys of FSDP"
_AGENTS = (
    "tools and environments are agent files here: give hotseat.agent.path=FILE.py (docs/agents.md), with"
    " default_agent_loop=single_turn_agent"
)
_OWN_MODEL = "give hotseat.reward.model=CHECKPOINT (docs/reward-models.md)"
_OVERLAP = "sampling and training take turns; to sample ahead, give hotseat.overlap.staleness=1 (docs/async.md)"
_DISTILLED = "give hotseat.algorithm.distill.coef and hotseat.reference.model (docs/algorithms.md)"
_REPLAY = "`hotseat replay` learns from recorded rollouts: give false"
_WHOLE = "a checkpoint is loaded whole"
_IN_CHECKPOINT = "put it into the folder of the model"


def _mapped(name: str, kind: Kind, default: Any, sets: str | Iterable[str], **more: Any) -> Key:
    return Key(name, kind, default, (sets,) if isinstance(sets, str) else tuple(sets), **more)


def _idle(name: str, default: Any, because: str, **more: Any) -> Key:
    return Key(name, "any", default, because=because, **more)


def _refused(name: str, default: Any, instead: str, **more: Any) -> Key:
    return Key(name, "any", default, refused=instead, **more)


def _same(name: str, other: str, instead: str, **more: Any) -> Key:
    return Key(name, "any", f"${{{other}}}", refused=instead, same_as=other, **more)


def _off(section: str, switch: str, default: Any, instead: str, **more: Any) -> tuple[Key, Key]:
    """Return the keys of a section whose switch has to stay as it is, and which then has no effect."""
    state = "null" if default is None else str(default).lower()
    return (
        _refused(f"{section}.{switch}", default, instead, **more),
        _section(section, f"{section}.{switch} is {state}"),
    )


def _section(name: str, because: str, **more: Any) -> Key:
    return Key(name, "any", None, because=because, is_section=True, **more)


def _refused_section(name: str, instead: str) -> Key:
    return Key(name, "any", None, refused=instead, is_section=True)


# --- conversion of values ---------------------------------------------------------------------------------------------


def above_zero(value: float | None) -> float | None:
    """Convert verl's -1 and 0, which stand for all or never, to None."""
    return value if value is not None and value > 0 else None


def from_zero(value: int | None) -> int:
    """Convert verl's -1, which stands for all, to 0."""
    return max(value or 0, 0)


def critic_only(value: int) -> int:
    """Convert the first step in which verl's actor learns to the number of steps before it."""
    return max(value - 1, 0)


# --- sections that several models have --------------------------------------------------------------------------------


def _optimizer(at: str, role: str, rate: float) -> tuple[Key, ...]:
    to = f"{role}.optimizer"
    course = (f"{to}.schedule", f"{to}.warmup_ratio", f"{to}.min_learning_rate_ratio")
    by = f"{role} optimizer"
    adamw = "AdamW of torch.optim trains here; hotseat.actor.optimizer.kind=muon is the other optimizer"
    return (
        _mapped(f"{at}.lr", "float", rate, f"{to}.learning_rate"),
        _mapped(f"{at}.betas", "list", [0.9, 0.999], f"{to}.betas"),
        _mapped(f"{at}.weight_decay", "float", 0.01, f"{to}.weight_decay"),
        _mapped(f"{at}.clip_grad", "float", 1.0, f"{to}.max_grad_norm", by=by),
        _mapped(f"{at}.grad_clip", "float", None, f"{to}.max_grad_norm", by=by),
        _mapped(f"{at}.lr_scheduler_type", "text", "constant", course, by=by),
        _mapped(f"{at}.warmup_style", "text", None, course, by=by),
        _mapped(f"{at}.lr_warmup_steps_ratio", "float", 0.0, course[1], by=by),
        _mapped(f"{at}.min_lr_ratio", "float", 0.0, course[2], by=by, is_optional=True),
        _refused(
            f"{at}.lr_warmup_steps",
            -1,
            f"the number of steps is known only when the data is read: give {at}.lr_warmup_steps_ratio",
            fits=(0, None),
        ),
        _refused(f"{at}.total_training_steps", -1, "give trainer.total_epochs and data.train_max_samples"),
        _refused(f"{at}.num_cycles", 0.5, "cosine schedules have half a cycle: give 0.5"),
        _refused(f"{at}.optimizer", "AdamW", adamw),
        _refused(f"{at}.optimizer_impl", "torch.optim", adamw),
        _refused(f"{at}.override_optimizer_config", None, adamw, fits=({},)),
        _idle(f"{at}.zero_indexed_step", True, "the first step has the first learning rate of the schedule"),
    )


def _fsdp(at: str, role: str, older: str | None = None) -> tuple[Key, ...]:
    """Return the keys of a model's FSDP section. older: its former name."""
    is_actor = role == "actor"
    offload = f"{role}.enable_offload"

    def name(leaf: str) -> dict[str, Any]:
        return {"name": f"{at}.{leaf}", "aliases": (f"{older}.{leaf}",) if older else ()}

    def idle(leaf: str, default: Any, because: str) -> Key:
        return Key(**name(leaf), default=default, because=because)

    def shared(leaf: str, kind: Kind, default: Any, sets: str, by: str) -> Key:
        """Return a key of the actor's, or one of another model's that has to say the same."""
        if is_actor:
            return Key(**name(leaf), kind=kind, default=default, sets=(sets,), by=by)
        of_actor = f"{_ACTOR}.fsdp_config.{leaf}"
        return Key(**name(leaf), default=f"${{{of_actor}}}", same_as=of_actor, refused=_SHARED)

    return (
        Key(**name("param_offload"), kind="bool", default=False, sets=(offload,), by="offload"),
        Key(**name("optimizer_offload"), kind="bool", default=False, sets=(offload,), by="offload"),
        Key(**name("offload_policy"), kind="bool", default=False, sets=(offload,), by="offload"),
        shared("dtype", "text", "bfloat16", "train.dtype", "dtype"),
        shared("model_dtype", "text", "fp32", "train.fp32_master", "dtype"),
        shared("ulysses_sequence_parallel_size", "int", 1, "train.sequence_parallel_size", "sequence parallelism"),
        shared("full_determinism", "bool", False, "train.full_determinism", "determinism"),
        idle("use_torch_compile", True, f"{_ACTOR}.use_torch_compile says it"),
        idle("wrap_policy.min_num_params", 0, "each layer is sharded by itself"),
        idle("wrap_policy.transformer_layer_cls_to_wrap", None, "each layer is sharded by itself"),
        idle("reshard_after_forward", True, _SHARDED),
        idle("fsdp_size", -1, _SHARDED),
        idle("forward_prefetch", False, _SHARDED),
        idle("use_orig_params", False, _SHARDED),
        idle("use_no_sync_for_gradient_accumulation", True, _SHARDED),
        idle("seed", 42, _ONE_SEED),
        idle("entropy_from_logits_with_chunking", False, _LOGITS),
        idle("entropy_from_logits_chunk_size", 2048, _LOGITS),
        idle("entropy_checkpointing", False, _LOGITS),
        idle("pad_to_length", False, _PADDING),
        idle("pad_to_length_bucket", 1024, _PADDING),
        idle("forward_only", role == "reference", "a model that does not learn has no gradients"),
        Key(**name("strategy"), default="fsdp", fits=("fsdp2",), refused=_FSDP_ONLY),
        Key(**name("qat.enable"), default=False, refused=_NOT_QUANTISED),
        Key(**name("qat"), because=f"{at}.qat.enable is false", is_section=True),
        Key(**name("turbo_config"), because="it is of the strategy fsdp_turbo", is_section=True),
    )


def _logits(at: str) -> tuple[Key, ...]:
    return (
        _idle(f"{at}.entropy_from_logits_with_chunking", False, _LOGITS),
        _idle(f"{at}.entropy_from_logits_chunk_size", 2048, _LOGITS),
        _idle(f"{at}.entropy_checkpointing", False, _LOGITS),
        _idle(f"{at}.pad_to_length", False, _PADDING),
    )


def _routers(at: str) -> tuple[Key, ...]:
    return _off(f"{at}.router_replay", "mode", "disabled", "experts are not replayed: give disabled")


def _other_backends(at: str) -> tuple[Key, ...]:
    return tuple(_refused_section(f"{at}.{name}", _FSDP_ONLY) for name in ("megatron", "veomni", "torchtitan"))


def _saved(at: str) -> tuple[Key, ...]:
    return (
        _mapped(
            f"{at}.checkpoint.save_contents",
            "list",
            ["model", "optimizer", "extra"],
            ("checkpoint.export_each", "checkpoint.save_state"),
            by="checkpoints",
        )
        if at == _ACTOR
        else _idle(f"{at}.checkpoint.save_contents", None, f"{_ACTOR}.checkpoint.save_contents says it"),
        _refused(f"{at}.checkpoint.load_contents", f"${{{at}.checkpoint.save_contents}}", _WHOLE)
        if at == _ACTOR
        else _idle(f"{at}.checkpoint.load_contents", None, _WHOLE),
        _idle(f"{at}.checkpoint.async_save", False, "checkpoints are written in the background where there is room"),
        _idle(f"{at}.checkpoint.strict", True, "every weight is checked when a model is exported"),
    )


def _model(at: str) -> tuple[Key, ...]:
    """Return the keys of a model's section: the actor's, or the critic's, which must agree with it."""
    is_actor = at == _MODEL

    def shared(leaf: str, kind: Kind, default: Any, sets: str, **more: Any) -> Key:
        if is_actor:
            return _mapped(f"{at}.{leaf}", kind, default, sets, **more)
        return _same(f"{at}.{leaf}", f"{_MODEL}.{leaf}", _SHARED)

    return (
        _mapped(f"{at}.path", "text", None, "actor.model" if is_actor else "critic.model", by="models"),
        shared("enable_gradient_checkpointing", "bool", True, "train.gradient_checkpointing"),
        shared("use_remove_padding", "bool", True, "train.packing"),
        shared("use_liger", "bool", False, "train.liger_kernel"),
        shared("trust_remote_code", "bool", False, "trust_remote_code", by="remote code"),
        shared("lora_rank", "int", 0, "train.lora.rank"),
        shared("lora_alpha", "int", 16, "train.lora.alpha"),
        shared("target_modules", "any", "all-linear", "train.lora.target_modules"),
        shared("override_config.attn_implementation", "text", None, "train.attention", by="attention"),
        _refused(f"{at}.lora.dropout", 0.0, f"give {at}.lora_rank and hotseat.train.lora.dropout"),
        _refused(f"{at}.lora.rank", 0, f"it is of Megatron's adapters: give {at}.lora_rank"),
        _section(f"{at}.lora", "these are Megatron's adapters, whose rank is 0"),
        _refused(
            f"{at}.lora_adapter_path", None, "training starts with new adapters: merge those into the model first"
        ),
        _refused(f"{at}.exclude_modules", None, f"list the modules to train in {at}.target_modules"),
        _refused(f"{at}.hf_config_path", None, _IN_CHECKPOINT),
        _refused(f"{at}.tokenizer_path", None, _IN_CHECKPOINT),
        _mapped(f"{at}.custom_chat_template", "text", None, "data.chat_template")
        if is_actor
        else _idle(f"{at}.custom_chat_template", None, "the actor's key says how messages are rendered"),
        _refused(f"{at}.external_lib", None, "a model is what its folder and transformers say"),
        _refused_section(f"{at}.override_config", "change config.json in the folder of the model"),
        _idle(f"{at}.use_shm", False, _LOADING),
        _idle(
            f"{at}.enable_activation_offload", False, "activations are recomputed, not offloaded; it is memory alone"
        ),
        _idle(f"{at}.truncate_padding", False, "packed sequences have no padding"),
        _idle(f"{at}.use_fused_kernels", False, _LOGITS),
        _section(f"{at}.fused_kernel_options", _LOGITS),
        _section(f"{at}.tiled_mlp", "layers are not computed in tiles; it is memory alone"),
        *_off(f"{at}.mtp", "enable", False, "several tokens are not predicted at once: give false"),
    )


# --- actor, reference and critic --------------------------------------------------------------------------------------

_CLIP = ("algorithm.clip_low", "algorithm.clip_high")
_LOSS = ("algorithm.policy_loss", "algorithm.aggregation")
_BATCH, _TRAIN_MICRO = "train.batch_size", ("train.micro_batch_size", "train.max_tokens_per_device")
_SCORE_MICRO = ("rollout.micro_batch_size", "rollout.max_tokens_per_device")
_PER_GPU = "it counts the whole batch: give the key that ends in _per_gpu"

_OF_ACTOR: tuple[Key, ...] = (
    *_optimizer(f"{_ACTOR}.optim", "actor", 1e-6),
    *_fsdp(f"{_ACTOR}.fsdp_config", "actor"),
    _mapped(f"{_ACTOR}.strategy", "text", "fsdp", "train.backend", by="backend"),
    _mapped(f"{_ACTOR}.ppo_mini_batch_size", "int", 256, _BATCH, by="batches"),
    _mapped(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "int", None, _TRAIN_MICRO, by="micro-batches"),
    _mapped(f"{_ACTOR}.use_dynamic_bsz", "bool", False, _TRAIN_MICRO, by="micro-batches"),
    _mapped(f"{_ACTOR}.ppo_max_token_len_per_gpu", "int", 16384, _TRAIN_MICRO[1], by="micro-batches"),
    _refused(f"{_ACTOR}.ppo_micro_batch_size", None, _PER_GPU),
    _mapped(f"{_ACTOR}.ppo_epochs", "int", 1, "train.max_epochs"),
    _mapped(f"{_ACTOR}.clip_ratio_low", "float", 0.2, _CLIP[0], by="clip", is_optional=True),
    _mapped(f"{_ACTOR}.clip_ratio_high", "float", 0.2, _CLIP[1], by="clip", is_optional=True),
    _mapped(f"{_ACTOR}.clip_ratio", "float", 0.2, _CLIP, by="clip"),
    _mapped(f"{_ACTOR}.clip_ratio_c", "float", 3.0, "algorithm.dual_clip", by="loss"),
    _mapped(f"{_ACTOR}.policy_loss.loss_mode", "text", "vanilla", _LOSS[0], by="loss"),
    _mapped(f"{_ACTOR}.loss_agg_mode", "text", "token-mean", _LOSS[1], by="loss"),
    _mapped(f"{_ACTOR}.loss_scale_factor", "int", None, _LOSS[1], by="loss"),
    _section(f"{_ACTOR}.policy_loss", "the loss is vanilla, gspo or cispo, which have none of them"),
    _idle(f"{_ACTOR}.tau_pos", 1.0, "the loss is not sapo"),
    _idle(f"{_ACTOR}.tau_neg", 1.05, "the loss is not sapo"),
    _mapped(f"{_ACTOR}.entropy_coeff", "float", 0, "algorithm.entropy_coef", by="entropy"),
    _mapped(f"{_ACTOR}.calculate_entropy", "bool", False, "algorithm.entropy_coef", by="entropy"),
    _mapped(f"{_ACTOR}.use_kl_loss", "bool", False, "algorithm.kl.as_loss", by="kl"),
    _mapped(f"{_ACTOR}.kl_loss_coef", "float", 0.001, "algorithm.kl.coef", by="kl"),
    _mapped(f"{_ACTOR}.kl_loss_type", "text", "low_var_kl", "algorithm.kl.estimator", by="kl"),
    _mapped(f"{_ACTOR}.grad_clip", "float", 1.0, "actor.optimizer.max_grad_norm", by="actor optimizer"),
    _mapped(
        f"{_ACTOR}.ulysses_sequence_parallel_size", "int", 1, "train.sequence_parallel_size", by="sequence parallelism"
    ),
    _mapped(f"{_ACTOR}.use_torch_compile", "bool", True, "train.compile", by="compile"),
    _mapped(f"{_ACTOR}.freeze_vision_tower", "bool", False, "train.freeze_visual_encoder"),
    _refused(f"{_ACTOR}.shuffle", False, "mini-batches are taken in the order of the batch: give false"),
    _refused(f"{_ACTOR}.calculate_sum_pi_squared", False, "no estimator here needs it: give false"),
    _idle(f"{_ACTOR}.sum_pi_squared_checkpointing", False, f"{_ACTOR}.calculate_sum_pi_squared is false"),
    _refused(f"{_ACTOR}.use_rollout_log_probs", False, "the trainer's own old log-probs are used: give false"),
    _idle(f"{_ACTOR}.use_remove_padding", f"${{{_MODEL}.use_remove_padding}}", f"{_MODEL}.use_remove_padding says it"),
    _same(f"{_ACTOR}.rollout_n", f"{_ROLLOUT}.n", "give that one"),
    _idle(f"{_ACTOR}.use_prefix_grouper", False, "a prompt's samples are packed with their prompts; it is speed alone"),
    _idle(f"{_ACTOR}.use_fused_kernels", False, _LOGITS),
    _idle(f"{_ACTOR}.data_loader_seed", 42, _ONE_SEED),
    *_logits(_ACTOR),
    *_saved(_ACTOR),
    *_routers(_ACTOR),
    *_other_backends(_ACTOR),
    _section(f"{_ACTOR}.profiler", _PROFILING),
    *_off(f"{_ACTOR}.qat", "enable", False, _NOT_QUANTISED),
)

_OF_REFERENCE: tuple[Key, ...] = (
    *_fsdp(f"{_REF}.fsdp_config", "reference"),
    _same(f"{_REF}.strategy", f"{_ACTOR}.strategy", _SHARED),
    _same(f"{_REF}.ulysses_sequence_parallel_size", f"{_ACTOR}.ulysses_sequence_parallel_size", _SHARED),
    _refused(f"{_REF}.model.path", f"${{{_MODEL}.path}}", "give hotseat.reference.model=CHECKPOINT"),
    _same(f"{_REF}.rollout_n", f"{_ROLLOUT}.n", "give that one"),
    _refused(f"{_REF}.log_prob_micro_batch_size", None, _PER_GPU),
    _idle(f"{_REF}.log_prob_micro_batch_size_per_gpu", None, f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu says it"),
    _idle(f"{_REF}.log_prob_use_dynamic_bsz", False, f"{_ROLLOUT}.log_prob_use_dynamic_bsz says it"),
    _idle(f"{_REF}.log_prob_max_token_len_per_gpu", 16384, f"{_ROLLOUT}.log_prob_max_token_len_per_gpu says it"),
    _idle(f"{_REF}.use_torch_compile", True, f"{_ACTOR}.use_torch_compile says it"),
    *_logits(_REF),
    *_routers(_REF),
    *_other_backends(_REF),
    _section(f"{_REF}.profiler", _PROFILING),
)

_OF_CRITIC: tuple[Key, ...] = (
    *_optimizer(f"{_CRITIC}.optim", "critic", 1e-5),
    *_fsdp(f"{_CRITIC}.fsdp", "critic", f"{_CRITIC}.model.fsdp_config"),
    *_model(f"{_CRITIC}.model"),
    _mapped(f"{_CRITIC}.cliprange_value", "float", 0.5, "critic.value_clip"),
    _mapped(f"{_CRITIC}.grad_clip", "float", 1.0, "critic.optimizer.max_grad_norm", by="critic optimizer"),
    _same(f"{_CRITIC}.strategy", f"{_ACTOR}.strategy", _SHARED),
    _same(
        f"{_CRITIC}.ppo_mini_batch_size",
        f"{_ACTOR}.ppo_mini_batch_size",
        "actor and critic learn from the same batches: give both the same",
    ),
    _same(
        f"{_CRITIC}.ppo_epochs",
        f"{_ACTOR}.ppo_epochs",
        "actor and critic learn from a batch as often: give both the same",
    ),
    _same(
        f"{_CRITIC}.loss_agg_mode",
        f"{_ACTOR}.loss_agg_mode",
        "the losses of actor and critic have the same weights: give both the same",
    ),
    _same(f"{_CRITIC}.loss_scale_factor", f"{_ACTOR}.loss_scale_factor", _SHARED),
    _same(f"{_CRITIC}.ulysses_sequence_parallel_size", f"{_ACTOR}.ulysses_sequence_parallel_size", _SHARED),
    _same(f"{_CRITIC}.rollout_n", f"{_ROLLOUT}.n", "give that one"),
    _mapped(f"{_CRITIC}.enable", "bool", None, "algorithm.estimator", by="critic"),
    _refused(f"{_CRITIC}.ppo_micro_batch_size", None, _PER_GPU),
    _refused(f"{_CRITIC}.forward_micro_batch_size", None, _PER_GPU),
    _refused(f"{_CRITIC}.shuffle", False, "mini-batches are taken in the order of the batch: give false"),
    _idle(f"{_CRITIC}.ppo_micro_batch_size_per_gpu", None, _CUT),
    _idle(f"{_CRITIC}.forward_micro_batch_size_per_gpu", None, _CUT),
    _idle(f"{_CRITIC}.use_dynamic_bsz", False, _CUT),
    _idle(f"{_CRITIC}.ppo_max_token_len_per_gpu", 32768, _CUT),
    _idle(f"{_CRITIC}.forward_max_token_len_per_gpu", 32768, _CUT),
    _idle(f"{_CRITIC}.data_loader_seed", 42, _ONE_SEED),
    *_saved(_CRITIC),
    *_other_backends(_CRITIC),
    _section(f"{_CRITIC}.profiler", _PROFILING),
)


# --- rollout ----------------------------------------------------------------------------------------------------------

_ENGINE_ARGUMENTS = "rollout.engine_args"
VLLM_ARGUMENTS = (  # keys that vLLM's engine has under the same names
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
    "scheduling_policy",
)
_LENGTH = "a sequence has as many tokens as prompt and answer may have: give data.max_{}_length"

_OF_ROLLOUT: tuple[Key, ...] = (
    _mapped(f"{_ROLLOUT}.name", "text", None, "rollout.engine", by="engine"),
    _mapped(f"{_ROLLOUT}.n", "int", 1, "rollout.samples_per_prompt"),
    _mapped(f"{_ROLLOUT}.temperature", "float", 1.0, "rollout.temperature"),
    _mapped(f"{_ROLLOUT}.top_p", "float", 1, "rollout.top_p"),
    _mapped(f"{_ROLLOUT}.top_k", "int", -1, "rollout.top_k", convert=from_zero),
    _mapped(f"{_ROLLOUT}.tensor_model_parallel_size", "int", 2, "rollout.tensor_parallel_size", by="engine"),
    _mapped(f"{_ROLLOUT}.gpu_memory_utilization", "float", 0.5, "rollout.memory_share"),
    _mapped(f"{_ROLLOUT}.enforce_eager", "bool", False, "rollout.enforce_eager"),
    _mapped(f"{_ROLLOUT}.enable_prefix_caching", "bool", True, "rollout.prefix_caching"),
    _mapped(f"{_ROLLOUT}.free_cache_engine", "bool", True, "rollout.enable_offload", by="offload"),
    _mapped(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "int", None, _SCORE_MICRO, by="micro-batches"),
    _mapped(
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
        "bool",
        f"${{{_ACTOR}.use_dynamic_bsz}}",
        _SCORE_MICRO,
        by="micro-batches",
    ),
    _mapped(
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
        "int",
        f"${{{_ACTOR}.ppo_max_token_len_per_gpu}}",
        _SCORE_MICRO[1],
        by="micro-batches",
    ),
    *(
        _mapped(f"{_ROLLOUT}.{name}", "any", default, _ENGINE_ARGUMENTS, by="engine arguments")
        for name, default in zip(VLLM_ARGUMENTS, (8192, 256, True, "fcfs"), strict=True)
    ),
    _mapped(f"{_ROLLOUT}.engine_kwargs.vllm", "any", None, _ENGINE_ARGUMENTS, by="engine arguments", is_section=True),
    _section(f"{_ROLLOUT}.engine_kwargs.sglang", "the engine is not SGLang"),
    _section(f"{_ROLLOUT}.engine_kwargs.trtllm", "the engine is not TensorRT-LLM"),
    _mapped(f"{_ROLLOUT}.limit_images", "int", None, "data.max_images_per_prompt", by="images"),
    _mapped(f"{_ROLLOUT}.full_determinism", "bool", False, "train.full_determinism", by="determinism"),
    # evaluation
    _mapped(f"{_ROLLOUT}.val_kwargs.temperature", "float", 0, "eval.temperature"),
    _mapped(f"{_ROLLOUT}.val_kwargs.n", "int", 1, "eval.samples_per_prompt"),
    _refused(
        f"{_ROLLOUT}.val_kwargs.top_p", 1.0, "evaluations sample from all tokens: give 1, or val_kwargs.temperature 0"
    ),
    _refused(
        f"{_ROLLOUT}.val_kwargs.top_k",
        -1,
        "evaluations sample from all tokens: give -1, or val_kwargs.temperature 0",
        fits=(0,),
    ),
    _idle(f"{_ROLLOUT}.val_kwargs.do_sample", False, "val_kwargs.temperature says it: 0 is greedy"),
    # lengths and types, which others say
    _same(f"{_ROLLOUT}.prompt_length", "data.max_prompt_length", _LENGTH.format("prompt")),
    _same(f"{_ROLLOUT}.response_length", "data.max_response_length", _LENGTH.format("response")),
    _idle(
        f"{_ROLLOUT}.max_model_len", None, "an engine takes sequences of data.max_prompt_length + max_response_length"
    ),
    _same(
        f"{_ROLLOUT}.dtype",
        f"{_ACTOR}.fsdp_config.dtype",
        "engines and trainer compute in the same type: give both the same",
    ),
    # what is refused
    _refused(f"{_ROLLOUT}.do_sample", True, "a policy learns from what it samples: give true"),
    _refused(f"{_ROLLOUT}.ignore_eos", False, "an answer ends with its end token: give false"),
    _refused(
        f"{_ROLLOUT}.data_parallel_size", 1, "hotseat.rollout.num_engines says how many engines there are: give 1"
    ),
    _refused(f"{_ROLLOUT}.expert_parallel_size", 1, "experts are not divided over engines: give 1"),
    _refused(f"{_ROLLOUT}.pipeline_model_parallel_size", 1, "layers are not divided over devices: give 1"),
    _refused(f"{_ROLLOUT}.nnodes", 0, _OVERLAP),
    _refused(f"{_ROLLOUT}.over_sample_rate", 0, "every request is finished: give 0"),
    _refused(f"{_ROLLOUT}.quantization", None, "give hotseat.rollout.quantization=fp8"),
    _refused(f"{_ROLLOUT}.quantization_config_file", None, "give hotseat.rollout.quantization=fp8"),
    _refused(f"{_ROLLOUT}.mtp", None, "several tokens are not predicted at once: give null"),
    _refused(f"{_ROLLOUT}.enable_rollout_routing_replay", False, "experts are not replayed: give false"),
    *_off(f"{_ROLLOUT}.disaggregation", "enabled", False, "engines do prefill and decoding: give false"),
    _refused(f"{_ROLLOUT}.multi_turn.enable", False, _AGENTS),
    _refused(f"{_ROLLOUT}.multi_turn.tool_config_path", None, _AGENTS),
    _refused(f"{_ROLLOUT}.multi_turn.function_tool_path", None, _AGENTS),
    _refused(f"{_ROLLOUT}.multi_turn.interaction_config_path", None, _AGENTS),
    _section(f"{_ROLLOUT}.multi_turn", "actor_rollout_ref.rollout.multi_turn.enable is false"),
    _refused(f"{_ROLLOUT}.agent.default_agent_loop", "single_turn_agent", _AGENTS),
    _refused(f"{_ROLLOUT}.agent.agent_loop_config_path", None, _AGENTS),
    _refused(f"{_ROLLOUT}.agent.agent_loop_manager_class", None, _AGENTS),
    _refused(f"{_ROLLOUT}.agent.custom_async_server.path", None, "the engines are vLLM and transformers: give null"),
    _idle(f"{_ROLLOUT}.agent.custom_async_server.name", None, "custom_async_server.path is null"),
    _idle(f"{_ROLLOUT}.agent.num_workers", 8, "hotseat.rollout.num_hosts says how many processes play episodes"),
    *_off(f"{_ROLLOUT}.skip", "enable", False, _REPLAY),
    *_off(f"{_ROLLOUT}.trace", "backend", None, "episodes are recorded in the run directory (docs/run-directory.md)"),
    *_off(f"{_ROLLOUT}.qat", "enable", False, _NOT_QUANTISED),
    _refused(f"{_ROLLOUT}.logprobs_mode", "processed_logprobs", "log-probs are those of the sampled distribution"),
    _refused(f"{_ROLLOUT}.log_prob_micro_batch_size", None, _PER_GPU),
    # without effect
    _idle(f"{_ROLLOUT}.mode", "async", "engines always take requests as they come", aliases=()),
    _idle(f"{_ROLLOUT}.n_gpus_per_node", "${trainer.n_gpus_per_node}", "the engines are on the actor's devices"),
    _idle(f"{_ROLLOUT}.seed", 42, _ONE_SEED),
    _idle(f"{_ROLLOUT}.cudagraph_capture_sizes", None, "vLLM chooses the sizes that it captures; it is speed alone"),
    _idle(f"{_ROLLOUT}.load_format", "dummy", "engines get the trainer's weights before they sample"),
    _idle(f"{_ROLLOUT}.layered_summon", False, "weights travel in buckets, layer by layer"),
    _idle(f"{_ROLLOUT}.disable_log_stats", True, _PROFILING),
    _idle(f"{_ROLLOUT}.multi_stage_wake_up", False, "it is for SGLang; parts come back as a phase needs them"),
    _idle(f"{_ROLLOUT}.calculate_log_probs", True, "engines always return the log-probs of what they sample"),
    _idle(f"{_ROLLOUT}.skip_tokenizer_init", True, _TOKENS),
    _idle(f"{_ROLLOUT}.use_preprocessed_multimodal_input", True, _TOKENS),
    _idle(f"{_ROLLOUT}.moe_load_balance_metrics_interval", 0, _PROFILING),
    _section(f"{_ROLLOUT}.checkpoint_engine", "weights travel by memory of the device or of the host, in buckets"),
    _section(f"{_ROLLOUT}.profiler", _PROFILING),
    _section(f"{_ROLLOUT}.prometheus", _PROFILING),
    _refused("actor_rollout_ref.hybrid_engine", True, "actor and engines share their devices: give true"),
    _idle("actor_rollout_ref.nccl_timeout", 600, "hotseat.cluster.call_timeout_s bounds every call"),
)


# --- data -------------------------------------------------------------------------------------------------------------

_LOST = "data.max_lost_fraction"

_OF_DATA: tuple[Key, ...] = (
    _mapped("data.train_files", "list", "~/data/rlhf/gsm8k/train.parquet", "data.path", by="files"),
    _mapped("data.val_files", "list", "~/data/rlhf/gsm8k/test.parquet", "eval.path", by="files", is_optional=True),
    _mapped("data.train_max_samples", "int", -1, "data.max_samples", convert=above_zero),
    _mapped("data.val_max_samples", "int", -1, "eval.max_samples", convert=above_zero),
    _mapped("data.prompt_key", "text", "prompt", "data.input_key"),
    _mapped("data.max_prompt_length", "int", 512, ("data.prompt_max_length", "data.max_length"), by="lengths"),
    _mapped("data.max_response_length", "int", 512, ("rollout.max_new_tokens", "data.max_length"), by="lengths"),
    _mapped("data.train_batch_size", "int", 1024, "rollout.batch_size"),
    _mapped("data.shuffle", "bool", True, "data.shuffle"),
    _mapped("data.seed", "int", None, "seed"),
    _mapped("data.filter_overlong_prompts", "bool", False, _LOST, by="overlong prompts"),
    _mapped("data.truncation", "text", "error", _LOST, by="overlong prompts"),
    _mapped("data.image_key", "text", "images", "data.image_key", by="images", is_optional=True),
    _mapped("data.trust_remote_code", "bool", False, "trust_remote_code", by="remote code"),
    _same("data.gen_batch_size", "data.train_batch_size", "a step samples one batch"),
    _refused("data.reward_fn_key", "data_source", "rename that column to data_source"),
    _refused("data.tokenizer", None, _IN_CHECKPOINT),
    _refused("data.custom_cls.path", None, "rows are read from files: write them as parquet or JSON lines"),
    _idle("data.custom_cls.name", None, "data.custom_cls.path is null"),
    *_off("data.sampler", "class_path", None, "give hotseat.data.sampler=FILE.py:FUNCTION (docs/algorithms.md)"),
    _refused_section(
        "data.apply_chat_template_kwargs",
        f"set them in a template: give {_MODEL}.custom_chat_template with `{{% set NAME = VALUE %}}` in front",
    ),
    _refused_section("data.mm_processor_kwargs", "change the processor's files in the folder of the model"),
    _refused("data.tool_config_path", None, _AGENTS),
    _refused("data.function_tool_path", None, _AGENTS),
    _refused("data.return_full_prompt", False, "reward functions get the row: give false"),
    _idle("data.use_shm", False, _NO_LOADER),
    _idle("data.cache_dir", None, _NO_LOADER),
    _idle("data.val_batch_size", None, "an evaluation samples all its prompts at once"),
    _idle("data.return_raw_input_ids", False, _TOKENS),
    _idle("data.return_raw_chat", True, "prompts are rendered once, before training"),
    _idle("data.return_multi_modal_inputs", True, "images are prepared once, before training"),
    _idle("data.dataloader_num_workers", 8, _NO_LOADER),
    _idle("data.filter_overlong_prompts_workers", 1, _NO_LOADER),
    _idle("data.image_patch_size", 14, "the model's processor says it"),
    _idle("data.validation_shuffle", False, "an evaluation samples all its prompts at once"),
    _idle("data.video_key", "videos", "there are no videos: a model sees images"),
    _idle("data.audio_key", "audios", "there is no audio: a model sees images"),
)


# --- rewards ----------------------------------------------------------------------------------------------------------

_FUNCTION = "reward.function"
_OVERLONG = ("reward.overlong.buffer_length", "reward.overlong.penalty_factor")


def _overlong(leaf: str) -> dict[str, Any]:
    older = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
    return {"aliases": tuple(f"{at}.{leaf}" for at in older), "by": "overlong answers"}


_BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"

_OF_REWARDS: tuple[Key, ...] = (
    _mapped(
        "reward.custom_reward_function.path",
        "text",
        None,
        _FUNCTION,
        by="reward",
        aliases=("custom_reward_function.path",),
    ),
    _mapped(
        "reward.custom_reward_function.name",
        "text",
        "compute_score",
        _FUNCTION,
        by="reward",
        is_optional=True,
        aliases=("custom_reward_function.name",),
    ),
    _mapped(
        "reward.custom_reward_function.reward_kwargs",
        "any",
        None,
        "reward.kwargs",
        by="reward",
        is_section=True,
        aliases=("custom_reward_function.reward_kwargs",),
    ),
    _mapped("reward.compute_score_kwargs", "any", None, "reward.kwargs", by="reward", is_section=True),
    _mapped(
        "reward.reward_manager.name",
        "text",
        "naive",
        _OVERLONG,
        by="overlong answers",
        is_optional=True,
        aliases=("reward_model.reward_manager",),
    ),
    _mapped(f"{_BUFFER}.enable", "bool", False, _OVERLONG[0], **_overlong("enable")),
    _mapped(f"{_BUFFER}.len", "int", 0, _OVERLONG[0], **_overlong("len")),
    _mapped(f"{_BUFFER}.penalty_factor", "float", 1.0, _OVERLONG[1], **_overlong("penalty_factor")),
    _idle(
        f"{_BUFFER}.log",
        False,
        "the penalty is part of the rewards that are recorded",
        aliases=_overlong("log")["aliases"],
    ),
    _same(
        "reward.reward_kwargs.max_resp_len",
        "data.max_response_length",
        "the penalty grows up to the longest answer: give data.max_response_length",
        aliases=("reward_model.reward_kwargs.max_resp_len",),
    ),
    _refused("reward.reward_manager.source", "register", "reward managers are naive and dapo: give register"),
    _refused("reward.reward_manager.module.path", None, "give your function as reward.custom_reward_function.path"),
    _idle("reward.reward_manager.module.name", "custom_reward_manager", "reward_manager.module.path is null"),
    *_off("reward.reward_model", "enable", False, _OWN_MODEL, aliases=("reward_model.enable",), fits=(None,)),
    _refused(
        "reward.sandbox_fusion.url",
        None,
        "give hotseat.reward.graders=[{kind: code}], which runs tests in a sandbox here (docs/graders.md)",
        aliases=("sandbox_fusion.url", "reward_model.sandbox_fusion.url"),
    ),
    _section("reward.sandbox_fusion", "reward.sandbox_fusion.url is null", aliases=("sandbox_fusion",)),
    _idle(
        "reward.num_workers",
        8,
        "each rollout host has a process of its own for rewards",
        aliases=("reward_model.num_workers",),
    ),
    _refused("reward_model.reward_loop_module_path", None, "give your function as reward.custom_reward_function.path"),
    _section("reward_model", "reward.reward_model.enable is false"),
)


# --- maths ------------------------------------------------------------------------------------------------------------

_CORRECTION = "algorithm.rollout_correction"
_KIND, _BOUNDS = "algorithm.correction.kind", ("algorithm.correction.low", "algorithm.correction.high")
_REJECT = ("algorithm.correction.reject", "algorithm.correction.reject_low", "algorithm.correction.reject_high")

_OF_ALGORITHM: tuple[Key, ...] = (
    _mapped("algorithm.adv_estimator", "text", "gae", "algorithm.estimator", by="estimator"),
    _mapped("algorithm.gamma", "float", 1.0, "algorithm.gamma"),
    _mapped("algorithm.lam", "float", 1.0, "algorithm.gae_lambda"),
    _mapped("algorithm.norm_adv_by_std_in_grpo", "bool", True, "algorithm.std_norm", by="estimator"),
    _mapped("algorithm.kl_penalty", "text", "kl", "algorithm.kl.estimator", by="kl"),
    _mapped("algorithm.kl_ctrl.kl_coef", "float", 0.001, "algorithm.kl.coef", by="kl"),
    _mapped("algorithm.use_kl_in_reward", "bool", False, "algorithm.kl.coef", by="kl"),
    _mapped("algorithm.kl_ctrl.type", "text", "fixed", "algorithm.kl.target", by="kl"),
    _mapped("algorithm.kl_ctrl.target_kl", "float", 0.1, "algorithm.kl.target", by="kl"),
    _mapped("algorithm.kl_ctrl.horizon", "int", 10000, "algorithm.kl.horizon", by="kl"),
    _mapped(f"{_CORRECTION}.rollout_is", "text", None, _KIND, by="correction"),
    _mapped(f"{_CORRECTION}.rollout_is_threshold", "any", 2.0, _BOUNDS, by="correction"),
    _mapped(f"{_CORRECTION}.rollout_is_batch_normalize", "bool", False, "algorithm.correction.normalise"),
    _mapped(f"{_CORRECTION}.rollout_rs", "text", None, _REJECT[0], by="correction"),
    _mapped(f"{_CORRECTION}.rollout_rs_threshold", "any", None, _REJECT[1:], by="correction"),
    _refused(f"{_CORRECTION}.bypass_mode", False, "the trainer's own old log-probs are used: give false"),
    _idle(f"{_CORRECTION}.loss_type", "ppo_clip", f"{_CORRECTION}.bypass_mode is false"),
    _idle(f"{_CORRECTION}.debug_rollout_actor_probs", False, f"{_CORRECTION}.bypass_mode is false"),
    *_off(
        "algorithm.filter_groups",
        "enable",
        False,
        "verl keeps prompts whose scores differ; give hotseat.algorithm.filtering.enabled=true, which keeps prompts"
        " whose mean score is between low and high",
    ),
    _refused("algorithm.use_pf_ppo", False, "samples are not drawn again by their scores: give false"),
    _section("algorithm.pf_ppo", "algorithm.use_pf_ppo is false"),
    _refused(
        "algorithm.gdpo_reward_keys", None, "advantages are those of one reward: weigh its parts in your function"
    ),
    _refused("algorithm.gdpo_reward_weights", None, "weigh the parts of the reward in your function"),
)


# --- trainer ----------------------------------------------------------------------------------------------------------

_NAMES = ("log.wandb.run_name", "log.mlflow.run_name", "log.trackio.run_name", _WHERE)
_PROJECTS = ("log.wandb.project", "log.mlflow.experiment", "log.trackio.project", _WHERE)
_TRACKERS = ("log.wandb.enabled", "log.mlflow.enabled", "log.trackio.enabled")

_OF_TRAINER: tuple[Key, ...] = (
    _mapped("trainer.nnodes", "int", 1, _PLACEMENT, by="placement"),
    _mapped("trainer.n_gpus_per_node", "int", 8, _PLACEMENT, by="placement"),
    _mapped("trainer.device", "text", "cuda", _PLACEMENT, by="placement"),
    _mapped("trainer.total_epochs", "int", 30, "train.num_episodes"),
    _mapped("trainer.critic_warmup", "int", 0, "critic.warmup_steps", convert=critic_only),
    _mapped("trainer.save_freq", "int", -1, ("checkpoint.every", "checkpoint.every_minutes"), by="checkpoints"),
    _mapped("trainer.max_actor_ckpt_to_keep", "int", None, "checkpoint.keep_last", by="checkpoints"),
    _mapped(
        "trainer.default_local_dir",
        "text",
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        _WHERE,
    ),
    _mapped("trainer.resume_mode", "text", "auto", "checkpoint.resume", by="checkpoints"),
    _mapped("trainer.test_freq", "int", -1, ("eval.every", "eval.path"), by="files"),
    _mapped("trainer.val_before_train", "bool", True, "eval.path", by="files"),
    _mapped("trainer.logger", "list", ["console", "wandb"], _TRACKERS, by="trackers"),
    _mapped("trainer.project_name", "text", "verl_examples", _PROJECTS, by="trackers"),
    _mapped("trainer.experiment_name", "text", "gsm8k", _NAMES, by="trackers"),
    _refused(
        "trainer.total_training_steps",
        None,
        "steps follow from the data: give trainer.total_epochs=1 and data.train_max_samples=STEPS x train_batch_size",
    ),
    _refused("trainer.val_only", False, "`hotseat eval` evaluates a model without training (docs/tools.md)"),
    _refused("trainer.resume_from_path", None, "give the folder of the checkpoints as trainer.default_local_dir"),
    _refused("trainer.default_hdfs_dir", None, "checkpoints go to trainer.default_local_dir: give a mounted folder"),
    _refused("trainer.checkpoint_callback_class", None, "watch the folder of the checkpoints"),
    _refused("trainer.esi_redundant_time", 0, "give trainer.save_freq, or hotseat.checkpoint.every_minutes"),
    _refused("trainer.v1.trainer_mode", "sync", _OVERLAP),
    _refused("trainer.v1.sampler.custom_sampler.path", None, "give hotseat.data.sampler=FILE.py:FUNCTION"),
    _section("trainer.v1.sampler", "trainer.v1.sampler.custom_sampler.path is null"),
    _section("trainer.v1", "trainer.v1.trainer_mode is sync"),
    _idle("trainer.use_v1", True, "there is one loop"),
    _idle("trainer.balance_batch", True, _DIVIDED),
    _idle("trainer.balance_keep_minibatch", False, _DIVIDED),
    _idle("trainer.log_val_generations", 0, "samples are recorded in the run directory (docs/run-directory.md)"),
    _idle("trainer.rollout_data_dir", None, "hotseat.log.keep_rollouts=true keeps them in the run directory"),
    _idle("trainer.validation_data_dir", None, "samples are recorded in the run directory (docs/run-directory.md)"),
    _idle("trainer.max_critic_ckpt_to_keep", None, "a checkpoint has actor and critic: max_actor_ckpt_to_keep says it"),
    _idle("trainer.del_local_ckpt_after_load", False, "checkpoints are deleted by their number alone"),
    _idle("trainer.ray_wait_register_center_timeout", 300, "hotseat.cluster.call_timeout_s bounds every start"),
)

_OF_OTHERS: tuple[Key, ...] = (
    _refused("model_engine", "dp", _FSDP_ONLY),
    *_off("distillation", "enabled", False, _DISTILLED),
    _section("transfer_queue", "samples stay where they were made until ranks fetch them"),
    _section("global_profiler", _PROFILING),
    _refused("skip.rollout.enable", False, _REPLAY),
    _refused("skip.rollout_tq.enable", False, _REPLAY),
    _refused("skip.async_rollout.enable", False, _REPLAY),
    _section("skip", "no rollout is skipped"),
    _section("ray_kwargs", _RAY),
    _section("hydra", "a run has a directory of its own (hotseat.run_dir)"),
)

KEYS: tuple[Key, ...] = (
    *_OF_ACTOR,
    *_OF_REFERENCE,
    *_OF_ROLLOUT,
    *_model(_MODEL),
    *_OF_CRITIC,
    *_OF_DATA,
    *_OF_REWARDS,
    *_OF_ALGORITHM,
    *_OF_TRAINER,
    *_OF_OTHERS,
)
BY_NAME: Mapping[str, Key] = {name: key for key in KEYS for name in key.names}


def find(name: str) -> Key | None:
    """Return the key of a name: one of that name, or the closest section around it."""
    if name in BY_NAME:
        return BY_NAME[name]
    while "." in name:
        name = name.rpartition(".")[0]
        if name in BY_NAME and BY_NAME[name].is_section:
            return BY_NAME[name]
    return None
