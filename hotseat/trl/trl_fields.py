"""The fields of TRL's configs: their defaults, the config keys that they set, and why others have none.

Names and defaults are those of `VERSION`. What all of them have from transformers' `TrainingArguments` stands once, in
`SHARED`, with the defaults that TRL gives it. Nothing is imported here but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

VERSION = "1.16"


@dataclass(frozen=True)
class TrlField:
    """One field: it sets config keys, has no effect here, or is refused where it is not at its default."""

    name: str
    default: Any  # TRL's
    sets: tuple[str, ...] = ()  # config keys
    by: str | None = None  # function of derive.py that reads the field; None: the value is copied, if it sets a key
    convert: Callable[[Any], Any] | None = None  # applied to a value that is copied
    note: str = ""  # conversion, or why it sets no key
    is_refused: bool = False  # values besides the default are refused, because of the note
    silent: tuple[Any, ...] = ()  # further values of which nothing is said, such as those that TRL puts in itself
    is_secret: bool = False  # its value is in no message


def _copied(
    name: str, default: Any, *sets: str, note: str = "", convert: Callable[[Any], Any] | None = None
) -> TrlField:
    return TrlField(name, default, sets, convert=convert, note=note)


def _derived(name: str, default: Any, by: str, *sets: str, note: str) -> TrlField:
    return TrlField(name, default, sets, by, note=note)


def _idle(name: str, default: Any, because: str, silent: tuple[Any, ...] = ()) -> TrlField:
    return TrlField(name, default, note=because, silent=silent)


def _refused(name: str, default: Any, because: str, silent: tuple[Any, ...] = ()) -> TrlField:
    return TrlField(name, default, note=because, is_refused=True, silent=silent)


_NO_LOADER = "rows are tokenised before training, so no loader runs beside it"
_NO_DDP = "gradients are reduced by the training backend; the result is the same"
_NO_HUB = "nothing is uploaded"
_MEMORY = "memory alone; the planner chooses what fits"
_EVALUATIONS = "evaluations of this run have the precision and the batches of its scoring"
_LOGGING = "logs alone; the metrics of every step are in metrics.jsonl"
_OWN_PADDING = "sequences are packed without padding"
_TOKENIZED = "rows are tokenised once, by the driver"
_OWN_TOKENIZER = "a tokenizer is used as its checkpoint defines it; change it there"
_NO_DROPOUT = "the model's own dropout is always off; adapters have that of `train.lora.dropout`"
_REFERENCE_STAYS = "the reference stays what it was at the start"
_CHAT_TEMPLATE = "of a file that ends with .jinja or .j2, and sets `apply_chat_template`; refused otherwise"
_ONLY_VESPO = "of the loss `vespo`, which is refused"
_ONLY_ADAPTIVE = "of `use_adaptive_entropy`, which is refused"
_ONLY_SERVER = 'of `vllm_mode="server"`, which is refused'
_ONLY_SYNC = "of `sync_ref_model`, which is refused"
_SAMPLES_RECORDED = "samples are recorded in any case (`log.samples_every`, `log.samples_per_step`)"

SHARED: tuple[TrlField, ...] = (
    _derived(
        *("output_dir", None, "output", "run_dir", "name"),
        note="`run_dir` is the folder above, `name` the last part; the trained model is in `model` inside",
    ),
    _derived(
        *("per_device_train_batch_size", 8, "batches", "train.batch_size"),
        note="× `gradient_accumulation_steps` × processes. How much one forward takes is chosen to fit"
        " (`train.micro_batch_size: auto`), which changes speed alone",
    ),
    _derived(
        *("num_train_epochs", 3.0, "passes", "train.num_episodes", "train.max_epochs"),
        note="`num_episodes` for GRPO, `max_epochs` for the others; whole numbers",
    ),
    _derived(
        *("max_steps", -1, "passes"),
        note="refused above 0: a run ends with its data; the error names the `data.max_samples` that stands for it",
    ),
    _copied("learning_rate", 5e-5, "actor.optimizer.learning_rate"),
    _derived(
        *("lr_scheduler_type", "linear", "schedule", "actor.optimizer.schedule"),
        note="`linear` and `cosine` end at 0, so `min_learning_rate_ratio` is 0; `constant` has no warm-up,"
        " `constant_with_warmup` has one; `cosine_with_min_lr`; others are refused",
    ),
    _derived(
        *("lr_scheduler_kwargs", None, "schedule", "actor.optimizer.min_learning_rate_ratio"),
        note="`min_lr_rate` or `min_lr` of `cosine_with_min_lr`; others are refused",
    ),
    _derived(
        *("warmup_steps", 0, "schedule", "actor.optimizer.warmup_ratio"),
        note="below 1 it is a ratio, as here; a number of steps is refused",
    ),
    _derived(
        *("optim", "adamw_torch_fused", "optimizer", "actor.optimizer.kind"),
        note="`adamw_torch` and `adamw_torch_fused` are `adamw`; others are refused",
    ),
    _refused("optim_args", None, "AdamW has no further arguments here"),
    _copied("weight_decay", 0.0, "actor.optimizer.weight_decay", note="of matrices, in both"),
    _derived("adam_beta1", 0.9, "optimizer", "actor.optimizer.betas", note="the first of two"),
    _derived("adam_beta2", 0.999, "optimizer", "actor.optimizer.betas", note="the second of two"),
    _copied("adam_epsilon", 1e-8, "actor.optimizer.eps"),
    _refused("optim_target_modules", None, "of GaLore and APOLLO, which do not exist here"),
    _derived(
        *("gradient_accumulation_steps", 1, "batches", "train.batch_size"),
        note="see `per_device_train_batch_size`",
    ),
    _refused("average_tokens_across_devices", True, "a loss never depends on how its batch is cut over devices"),
    _copied("max_grad_norm", 1.0, "actor.optimizer.max_grad_norm"),
    _refused("label_smoothing_factor", 0.0, "SFT's loss is the plain log-likelihood"),
    _derived(
        *("bf16", None, "precision", "train.dtype"),
        note="unset is true without `fp16`; the layers compute in bf16, where TRL's autocast keeps some in fp32",
    ),
    _derived(
        *("fp16", False, "precision", "train.dtype", "train.backend"),
        note="with `train.backend: deepspeed`, which scales the loss",
    ),
    _idle("bf16_full_eval", False, _EVALUATIONS),
    _idle("fp16_full_eval", False, _EVALUATIONS),
    _idle("tf32", None, "torch's own setting holds"),
    _copied("gradient_checkpointing", True, "train.gradient_checkpointing"),
    _idle("gradient_checkpointing_kwargs", None, "memory and speed alone; see `train.checkpointed_layers`"),
    _derived(
        *("torch_compile", False, "compilation", "train.compile"),
        note="true is kept; false leaves the choice, which changes speed alone",
    ),
    _idle("torch_compile_backend", None, "layers are compiled by inductor", silent=("inductor",)),
    _idle("torch_compile_mode", None, "speed alone"),
    _copied("use_liger_kernel", False, "train.liger_kernel"),
    _refused("liger_kernel_config", None, "the kernels are those of norms and gates, all or none"),
    _idle("use_cache", False, "updates have no KV cache"),
    _refused("neftune_noise_alpha", None, "no noise is added to embeddings"),
    _idle("torch_empty_cache_steps", None, _MEMORY),
    _idle("auto_find_batch_size", False, "`train.micro_batch_size: auto` chooses what fits, and keeps the batch size"),
    _derived("logging_strategy", "steps", "logs", note=_LOGGING),
    _derived(
        *("logging_steps", 10, "logs", "log.every"),
        note="a printed line; metrics.jsonl has every step. Below 1 the line is printed in every step",
    ),
    _idle("logging_first_step", False, _LOGGING),
    _idle("log_on_each_node", True, _LOGGING),
    _idle("logging_nan_inf_filter", True, "numbers are recorded as they are"),
    _idle("include_num_input_tokens_seen", "no", _LOGGING),
    _idle("log_level", "passive", _LOGGING),
    _idle("log_level_replica", "warning", _LOGGING),
    _idle("disable_tqdm", None, _LOGGING, silent=(True, False)),
    _derived(
        *("report_to", "none", "trackers", "log.wandb.enabled", "log.mlflow.enabled", "log.trackio.enabled"),
        note="`wandb`, `mlflow` and `trackio`; TensorBoard's files are always written; others are refused",
    ),
    _derived(
        *("run_name", None, "trackers", "log.wandb.run_name", "log.mlflow.run_name", "log.trackio.run_name"),
        note="of the trackers that are on",
    ),
    _derived("project", "huggingface", "trackers", "log.trackio.project", note="if Trackio is on"),
    _derived("trackio_space_id", None, "trackers", "log.trackio.space", note="if Trackio is on"),
    _refused("trackio_bucket_id", None, "metrics stay on this machine or go to `log.trackio.space`"),
    _refused("trackio_static_space_id", None, "metrics stay on this machine or go to `log.trackio.space`"),
    _derived(
        *("eval_strategy", "no", "evaluation", "eval.every"),
        note="`steps`; `eval.path` has to name the data. `epoch` is refused",
    ),
    _derived(
        *("eval_steps", None, "evaluation", "eval.every"),
        note="in optimizer steps; here in steps, which are rollouts for GRPO. Unset is `logging_steps`",
    ),
    _idle("eval_delay", 0, "the first evaluation is before the first step"),
    _idle("per_device_eval_batch_size", 8, _EVALUATIONS),
    _idle("prediction_loss_only", False, _EVALUATIONS),
    _idle("eval_on_start", False, "a run with evaluations always begins with one"),
    _idle("eval_do_concat_batches", True, _EVALUATIONS),
    _idle("eval_use_gather_object", False, _EVALUATIONS),
    _idle("eval_accumulation_steps", None, _EVALUATIONS),
    _idle("include_for_metrics", [], _EVALUATIONS),
    _idle("batch_eval_metrics", False, _EVALUATIONS),
    _derived(
        *("save_only_model", False, "saving", "checkpoint.save_state"),
        note="negated",
    ),
    _derived(
        *("save_strategy", "steps", "saving", "checkpoint.every_minutes"),
        note="`no` is `every_minutes: 0`; `epoch` and `best` are refused",
    ),
    _derived(
        *("save_steps", 500, "saving", "checkpoint.every"),
        note="in optimizer steps; here in steps, which are rollouts for GRPO",
    ),
    _idle("save_on_each_node", False, "checkpoints are written once"),
    _derived(
        *("save_total_limit", None, "saving", "checkpoint.keep_last"),
        note="unset keeps all in TRL, and the newest here",
    ),
    _idle("enable_jit_checkpoint", False, "SIGTERM always ends a run with a checkpoint"),
    _refused("push_to_hub", False, "give checkpoint.push_to_hub=USER/NAME as an override"),
    replace(_idle("hub_token", None, _NO_HUB), is_secret=True),
    _idle("hub_private_repo", None, _NO_HUB),
    _idle("hub_model_id", None, _NO_HUB),
    _idle("hub_strategy", "every_save", _NO_HUB),
    _idle("hub_always_push", False, _NO_HUB),
    _idle("hub_revision", None, _NO_HUB),
    _refused(
        *("load_best_model_at_end", False),
        "the exported model is that of the last step; the best checkpoint is kept beside it (`checkpoint.best_metric`)",
    ),
    _refused(
        *("metric_for_best_model", None),
        "metrics have other names here: name one in `checkpoint.best_metric`",
    ),
    _idle("greater_is_better", None, "known for every metric that checkpoints are chosen by", silent=(True, False)),
    _idle("ignore_data_skip", False, "a resumed run continues at its place in the data"),
    _idle("restore_callback_states_from_checkpoint", False, "there are no callbacks"),
    _copied("full_determinism", False, "train.full_determinism"),
    _copied("seed", 42, "seed", note="other random numbers come from it than in TRL"),
    _derived("data_seed", None, "output", note="refused unless it is `seed`: the order of the data comes from that"),
    _idle("use_cpu", False, "the devices are those of `cluster.component_placement`; unset, the machine's own"),
    _derived(
        *("accelerator_config", None, "output"),
        note="refused with `split_batches`, which makes a batch size that of all processes; otherwise loaders alone",
    ),
    _refused(
        *("parallelism_config", None),
        "set `train.sequence_parallel_size` or `train.deepspeed.tensor_parallel_size`",
    ),
    _idle("dataloader_drop_last", False, "the rest of a pass joins the next one, and that of the last is not used"),
    _idle("dataloader_num_workers", 0, _NO_LOADER),
    _idle("dataloader_pin_memory", True, _NO_LOADER, silent=(False,)),
    _idle("dataloader_persistent_workers", False, _NO_LOADER),
    _idle("dataloader_prefetch_factor", None, _NO_LOADER),
    _idle("dataloader_multiprocessing_context", None, _NO_LOADER),
    _idle("dataloader_in_order", True, _NO_LOADER),
    _idle("remove_unused_columns", True, "columns are read by their names in `data`"),
    _idle("label_names", None, "columns are read by their names in `data`"),
    _refused("train_sampling_strategy", "random", "rows are drawn in random order in every pass"),
    _idle("length_column_name", "length", "lengths are counted"),
    _idle("ddp_find_unused_parameters", None, _NO_DDP),
    _idle("ddp_bucket_cap_mb", None, _NO_DDP),
    _idle("ddp_broadcast_buffers", None, _NO_DDP),
    _idle("ddp_static_graph", None, _NO_DDP),
    _idle("ddp_backend", None, _NO_DDP),
    _idle("ddp_timeout", 1800, "`cluster.call_timeout_s` bounds calls"),
    _idle("fsdp", None, "FSDP2 is the default backend, and shards weights, gradients and optimizer"),
    _idle("fsdp_config", None, "FSDP2 needs none; parts are offloaded as `actor.enable_offload` says"),
    _refused(
        *("deepspeed", None),
        "set `train.backend: deepspeed` and `train.deepspeed.zero_stage`; batches, optimizer and precision are those of"
        " the other fields",
    ),
    _idle("debug", "", _LOGGING, silent=([],)),
    _idle("skip_memory_metrics", True, "memory is always measured"),
    _idle("do_train", False, "read by scripts alone", silent=(True,)),
    _idle("do_eval", False, "read by scripts alone", silent=(True,)),
    _idle("do_predict", False, "read by scripts alone"),
    _refused(
        *("resume_from_checkpoint", None),
        "TRL's checkpoints hold another state: start from their weights by `model`, or resume a run of Hotseat",
    ),
    _idle("local_rank", -1, "processes are started by the cluster", silent=(0,)),
)

# Of several configs.
_MODEL_INIT = _derived(
    *("model_init_kwargs", None, "precision", "train.fp32_master", "trust_remote_code"),
    note="`dtype`: weights in fp32, TRL's default, are `fp32_master: true`, those in bf16 `false`; `trust_remote_code`;"
    " `attn_implementation`, `device_map` and `use_cache` change speed alone; others are refused",
)
_TRUST = _derived("trust_remote_code", False, "precision", "trust_remote_code", note="as it is")
_AUX_LOSS = _derived(
    *("router_aux_loss_coef", None, "experts", "algorithm.aux_loss_coef"),
    note="unset is the model's own coefficient in TRL, and 0 here",
)
_DROPOUT_ON, _DROPOUT_OFF = (_idle("disable_dropout", default, _NO_DROPOUT) for default in (False, True))
_PADDING = _idle("pad_to_multiple_of", "auto", _OWN_PADDING, silent=(None, 128))
_PADDING_FREE = _idle("padding_free", False, _OWN_PADDING)
_SYNC_REFERENCE = (
    _refused("sync_ref_model", False, _REFERENCE_STAYS),
    _idle("ref_model_mixup_alpha", 0.6, _ONLY_SYNC),
    _idle("ref_model_sync_steps", 512, _ONLY_SYNC),
)
_OFFLOADED_ACTIVATIONS = _idle("activation_offloading", False, _MEMORY)
_PAD_TOKEN = _idle("pad_token", None, _OWN_PADDING)
_EOS_TOKEN = _refused("eos_token", None, _OWN_TOKENIZER)
_NUM_PROC = _idle("dataset_num_proc", None, _TOKENIZED)
_TEMPLATE = _derived("chat_template_path", None, "template", "data.chat_template", note=_CHAT_TEMPLATE)
_TRUNCATION = _refused("truncation_mode", "keep_start", "a long sequence loses its end")

GRPO: tuple[TrlField, ...] = (
    *(_MODEL_INIT, _TRUST, _AUX_LOSS, _DROPOUT_ON),
    _idle("cast_lm_head_to_fp32", False, "logits are always computed in fp32"),
    _derived("num_generations", 8, "batches", "rollout.samples_per_prompt", note="as it is"),
    _derived(
        *("num_generations_eval", None, "evaluation", "eval.samples_per_prompt"),
        note="unset is `num_generations`; with `eval_strategy`",
    ),
    _derived(
        *("max_completion_length", 512, "prompts", "rollout.max_new_tokens", "data.max_length"),
        note="`data.max_length` is 1024 more, the longest prompt, unless `vllm_max_model_length` says it; TRL has no"
        " limit on prompts, so `data.max_lost_fraction: 0` refuses data with longer ones. None is refused",
    ),
    _idle("ds3_gather_for_generation", True, "engines have weights of their own"),
    _copied("shuffle_dataset", True, "data.shuffle", convert=bool),
    _PADDING,
    _derived(
        *("generation_batch_size", None, "batches", "rollout.batch_size"),
        note="completions, so `rollout.batch_size` is it / `num_generations`",
    ),
    _derived(
        *("steps_per_generation", None, "batches", "rollout.batch_size"),
        note="unset is `gradient_accumulation_steps`; see above for what a rollout then is",
    ),
    _copied("temperature", 1.0, "rollout.temperature"),
    _copied("top_p", 1.0, "rollout.top_p"),
    _copied(
        "top_k", 0, "rollout.top_k", convert=lambda value: max(value or 0, 0), note="-1 and None are 0, which is all"
    ),
    _refused("min_p", None, "engines sample by temperature, top-p and top-k"),
    _refused("generation_kwargs", None, "engines sample by temperature, top-p and top-k", silent=({},)),
    _refused("chat_template_kwargs", None, "put them into a template, `data.chat_template`", silent=({},)),
    _refused("repetition_penalty", 1.0, "engines sample by temperature, top-p and top-k"),
    _idle("cache_implementation", None, "engines have caches of their own"),
    _derived("use_vllm", False, "engine", "rollout.engine", note="`vllm` or `transformers`"),
    _derived(
        *("vllm_mode", "colocate", "engine"),
        note="`server` is refused: engines are started by the run; `cluster.component_placement` gives them devices of"
        " their own",
    ),
    _refused("vllm_model_impl", "vllm", "weights are pushed to vLLM's own models"),
    _derived(
        *("vllm_enable_sleep_mode", False, "engine", "rollout.enable_offload"),
        note="true is kept; false leaves offloading to the planner",
    ),
    _refused("vllm_structured_outputs_regex", None, "answers are sampled freely"),
    _idle("vllm_server_base_url", None, _ONLY_SERVER),
    _idle("vllm_server_host", "0.0.0.0", _ONLY_SERVER),
    _idle("vllm_server_port", 8000, _ONLY_SERVER),
    _idle("vllm_server_timeout", 240.0, _ONLY_SERVER),
    _idle("vllm_group_port", 51216, _ONLY_SERVER),
    _derived("vllm_gpu_memory_utilization", 0.3, "engine", "rollout.memory_share", note="with `use_vllm`"),
    _derived("vllm_max_model_length", None, "prompts", "data.max_length", note="with `use_vllm`"),
    _derived("vllm_tensor_parallel_size", 1, "engine", "rollout.tensor_parallel_size", note="with `use_vllm`"),
    _derived(
        *("beta", 0.0, "kl", "algorithm.kl.coef"),
        note="in the loss and by k3: `algorithm.kl.as_loss: true`, `estimator: k3`; 0 loads no reference, in both",
    ),
    _derived("num_iterations", 1, "batches", "train.max_epochs", note="as it is"),
    _derived(
        "epsilon", 0.2, "loss", "algorithm.clip_low", "algorithm.clip_high", note="of `cispo` and `sapo` it is not used"
    ),
    _derived(
        *("delta", None, "loss", "algorithm.dual_clip"),
        note="the same for bad answers; refused up to 1 + `epsilon_high`, where it would clip good ones, too",
    ),
    _derived(
        *("epsilon_high", None, "loss", "algorithm.clip_high"),
        note="unset is `epsilon`; of `cispo` it is 1 + `clip_high`, which must be above 0",
    ),
    _derived("sapo_temperature_neg", 1.05, "loss", "algorithm.gate_temperature_neg", note="of the loss `sapo`"),
    _derived("sapo_temperature_pos", 1.0, "loss", "algorithm.gate_temperature_pos", note="of the loss `sapo`"),
    _idle("vespo_k_pos", 2.0, _ONLY_VESPO),
    _idle("vespo_lambda_pos", 3.0, _ONLY_VESPO),
    _idle("vespo_k_neg", 3.0, _ONLY_VESPO),
    _idle("vespo_lambda_neg", 2.0, _ONLY_VESPO),
    _derived(
        *("importance_sampling_level", "token", "loss", "algorithm.policy_loss"),
        note="`token` is `ppo`, `sequence` is `gspo`; with `cispo` and `sapo` only `token`",
    ),
    _refused("reward_weights", None, "`reward.functions` have the weights, beside the functions"),
    _derived(
        *("multi_objective_aggregation", "sum_then_normalize", "advantages", "algorithm.estimator"),
        note="`normalize_then_sum` is `gdpo`, whatever `scale_rewards` is; give two or more `reward.functions`, which"
        " have the weights",
    ),
    _derived(
        *("scale_rewards", "group", "advantages", "algorithm.estimator"),
        note="`group` is `group_norm`, `none` is `dr_grpo`; `batch` is refused",
    ),
    _derived(
        *("loss_type", "dapo", "loss", "algorithm.aggregation", "algorithm.policy_loss"),
        note="`dapo` is `token_mean`, `grpo` is `sequence_mean`, `dr_grpo` is `constant`, `cispo` is its policy loss"
        " under `token_mean`, `sapo` its under `sequence_mean`; `bnpo` is `token_mean` where a batch is not cut, else"
        " refused; others are refused",
    ),
    _copied("mask_truncated_completions", False, "algorithm.mask_truncated"),
    *_SYNC_REFERENCE,
    _refused("top_entropy_quantile", 1.0, "every sampled token is learned from"),
    _derived(
        *("entropy_coef", 0.0, "loss", "algorithm.entropy_coef"),
        note="under `token_mean`, where both are the mean over tokens; refused otherwise. 0 does not compute it here",
    ),
    _refused("use_adaptive_entropy", False, "the coefficient is fixed"),
    _idle("entropy_coef_min", 0.0, _ONLY_ADAPTIVE),
    _idle("entropy_coef_max", 1.0, _ONLY_ADAPTIVE),
    _idle("entropy_coef_delta", 0.005, _ONLY_ADAPTIVE),
    _idle("entropy_target", 0.2, _ONLY_ADAPTIVE),
    _refused("max_tool_calling_iterations", None, "tools belong to an agent, with `agent.max_steps`"),
    _derived(
        *("vllm_importance_sampling_correction", True, "engine", "algorithm.correction.kind"),
        note="with `use_vllm`; without, there is none in either",
    ),
    _derived(
        *("vllm_importance_sampling_mode", "sequence_mask", "engine", "algorithm.correction.kind"),
        note="`token_truncate` is `tis`, `token_mask` is `icepop`, `sequence_truncate` is `seq-tis`, `sequence_mask` is"
        " `seq-icepop`",
    ),
    _derived(
        *("vllm_importance_sampling_clip_max", 3.0, "engine", "algorithm.correction.high"),
        note="None is refused",
    ),
    _derived(
        *("vllm_importance_sampling_clip_min", None, "engine", "algorithm.correction.low"),
        note="None is 0",
    ),
    _refused("off_policy_mask_threshold", None, "see `algorithm.correction.reject` for what is near"),
    _derived(
        *("use_bias_correction_kl", True, "kl"),
        note="with `beta` above 0 it has to be false: here the KL is not multiplied by the ratio",
    ),
    _idle("log_completions", False, _SAMPLES_RECORDED),
    _idle("log_multimodal", True, _SAMPLES_RECORDED),
    _idle("num_completions_to_print", None, _SAMPLES_RECORDED),
    _idle("log_unique_prompts", False, _SAMPLES_RECORDED),
    _idle("log_completions_hub_repo", None, _NO_HUB),
    _idle("use_transformers_continuous_batching", False, "the transformers engine always batches continuously"),
    _idle("transformers_continuous_batching_config", None, "the transformers engine sizes its batch by `num_slots`"),
    _idle("use_transformers_paged", False, "the transformers engine always batches continuously"),
    _idle("vllm_importance_sampling_cap", None, "TRL itself makes it `vllm_importance_sampling_clip_max`"),
)

SFT: tuple[TrlField, ...] = (
    *(_MODEL_INIT, _TRUST, _AUX_LOSS, _TEMPLATE),
    _derived(
        *("dataset_text_field", "text", "examples", "data.input_key"),
        note="of rows of text, all of which is learned; see above for other rows",
    ),
    _refused("dataset_kwargs", None, "rows are always prepared here", silent=({},)),
    *(_NUM_PROC, _EOS_TOKEN),
    _derived(
        *("max_length", 1024, "examples", "data.max_length"),
        note="longer rows lose their end, in both (`data.max_lost_fraction: 1`); None is refused",
    ),
    _TRUNCATION,
    _idle("shuffle_dataset", False, "rows are drawn in random order in every pass, as by TRL's sampler"),
    _refused(
        *("packing", False),
        "batches count rows here, and blocks of packed rows in TRL; rows are computed without padding in any case",
    ),
    _idle("packing_strategy", "bfd", "of `packing`, which is refused"),
    *(_PADDING_FREE, _PADDING),
    _refused("eval_packing", None, "batches count rows", silent=(False,)),
    _derived(
        *("completion_only_loss", None, "examples", "data.input_key", "data.output_key", "data.pretrain_mode"),
        note="true is `input_key: prompt`, `output_key: completion`; false the same with `pretrain_mode: true`; unset"
        " is decided by the columns in TRL, and stands for rows of text here",
    ),
    _derived(
        *("assistant_only_loss", False, "examples", "data.multiturn", "data.apply_chat_template"),
        note="`input_key: messages` with both true",
    ),
    _derived("loss_type", "nll", "examples", note="`nll` and `chunked_nll` are the loss here; `dft` is refused"),
    *(_OFFLOADED_ACTIVATIONS, _PAD_TOKEN),
)

DPO: tuple[TrlField, ...] = (
    *(_MODEL_INIT, _TRUST, _AUX_LOSS, _DROPOUT_OFF, _NUM_PROC),
    _derived(
        *("max_length", 1024, "pairs", "data.max_length"),
        note="longer answers lose their end, in both (`data.max_lost_fraction: 1`); None is refused",
    ),
    *(_TRUNCATION, _PADDING_FREE, _PADDING),
    _copied("precompute_ref_log_probs", False, "algorithm.dpo.precompute"),
    _idle("precompute_ref_batch_size", None, _MEMORY),
    _derived(
        *("loss_type", ["sigmoid"], "preference", "algorithm.dpo.loss", "algorithm.dpo.length_normalised"),
        note="`sigmoid` is `dpo`, `ipo` is `ipo` with `length_normalised: true`; others and combinations are refused",
    ),
    _derived("loss_weights", None, "preference", note="refused but for `[1.0]`"),
    _refused("ld_alpha", None, "all tokens of an answer weigh the same"),
    _refused("f_divergence_type", "reverse_kl", "rewards are log-ratios"),
    _idle("f_alpha_divergence_coef", 0.5, "of `f_divergence_type`, which is refused"),
    _idle(
        *("label_smoothing", 0.0),
        "it is of the losses `robust`, `exo_pair` and `aot`, which are refused, and no effect on `sigmoid` in TRL:"
        " `algorithm.dpo.label_smoothing` is cDPO",
    ),
    _copied("beta", 0.1, "algorithm.dpo.beta"),
    _refused("use_weighting", False, "every pair weighs the same"),
    _idle("discopop_tau", 0.05, "of the loss `discopop`, which is refused"),
    _OFFLOADED_ACTIVATIONS,
    *_SYNC_REFERENCE,
    _PAD_TOKEN,
)

REWARD: tuple[TrlField, ...] = (
    *(_MODEL_INIT, _TRUST, _TEMPLATE, _DROPOUT_OFF, _NUM_PROC, _EOS_TOKEN),
    _derived(
        *("max_length", 1024, "pairs", "data.max_length"),
        note="longer pairs are left out in TRL; here they lose the end of an answer, and more than 5% of them stop the"
        " run before it starts (`data.max_lost_fraction`). None is refused",
    ),
    _PADDING,
    _refused("center_rewards_coefficient", None, "the loss is the pairwise one alone"),
    *(_OFFLOADED_ACTIVATIONS, _PAD_TOKEN),
)


@dataclass(frozen=True)
class TrlConfig:
    """One of TRL's configs: our task, its own fields, and defaults that it has instead of those in `SHARED`."""

    task: str
    own: tuple[TrlField, ...]
    defaults: Mapping[str, Any]

    @property
    def fields(self) -> tuple[TrlField, ...]:
        return (*SHARED, *self.own)

    def default_of(self, field: TrlField) -> Any:
        return self.defaults.get(field.name, field.default)


CONFIGS: Mapping[str, TrlConfig] = {
    "GRPOConfig": TrlConfig("rl", GRPO, {"learning_rate": 1e-6, "remove_unused_columns": False}),
    "SFTConfig": TrlConfig("sft", SFT, {"learning_rate": 2e-5}),
    "DPOConfig": TrlConfig("dpo", DPO, {"learning_rate": 1e-6}),
    "RewardConfig": TrlConfig("rm", REWARD, {"learning_rate": 1e-4}),
}
