"""Config keys that depend on several fields of a TRL config, or on more than a field's own value.

Each function takes the draft, sets keys, and notes what cannot be carried over and what differs. `DERIVED` names them
for the tables of fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotseat.errors import Problem
from hotseat.words import quantity

PROMPT_ROOM = 1024  # tokens for the prompt beside `max_completion_length`, where TRL has no limit
_UNBOUNDED = "None: a sequence has at most `data.max_length` tokens here, so name a number"


@dataclass
class TrlDraft:
    """A config under construction, and what is noted about the fields of TRL's."""

    task: str
    values: Mapping[str, Any]  # of all fields
    num_processes: int
    world_size: int  # for which TRL's config was made
    keys: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    origins: dict[str, str] = field(default_factory=dict)  # dotted key -> field that set it
    problems: list[Problem] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def set(self, name: str, keys: Mapping[str, Any]) -> None:
        """Set keys because of a field; "": because of none."""
        self.keys.update(keys)
        self.origins.update(dict.fromkeys(keys, name))

    def refuse(self, name: str, message: str) -> None:
        self.problems.append(Problem(name, message))

    def differ(self, name: str, message: str) -> None:
        self.differences.append(f"{name}: {message}" if name else message)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a copy of a field that holds arguments, which TRL also takes as text."""
        value = self.values[name] or {}
        if isinstance(value, str):
            self.refuse(name, f"{value!r}: give a mapping")
            return {}
        return dict(value)

    @property
    def samples_per_update(self) -> int:
        """Return the samples of an optimizer step: completions, pairs or rows."""
        values = self.values
        return int(
            values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] * self.num_processes,
        )

    @property
    def updates_per_step(self) -> int:
        """Return the optimizer steps of one of our steps, which in `rl` is a rollout."""
        if self.task != "rl":
            return 1
        return max(1, self._updates_per_rollout * int(self.values["num_iterations"]))

    @property
    def _updates_per_rollout(self) -> int:
        steps, accumulated = self.values["steps_per_generation"], self.values["gradient_accumulation_steps"]
        return max(1, (steps or accumulated) // accumulated)

    @property
    def prompts_per_rollout(self) -> int:
        return self.samples_per_update * self._updates_per_rollout // int(self.values["num_generations"])

    def in_steps(self, name: str) -> int:
        """Convert a field's number of optimizer steps to steps."""
        number = self.values[name]
        steps = max(1, round(number / self.updates_per_step))
        if steps * self.updates_per_step != number:
            self.differ(name, f"every {number} optimizer steps there, every {steps * self.updates_per_step} here")
        return steps


# --- of all configs ---------------------------------------------------------------------------------------------------


def output(draft: TrlDraft) -> None:
    values = draft.values
    path = Path(values["output_dir"] or "trainer_output")
    if path != Path("trainer_output") and path.name:
        draft.set("output_dir", {"run_dir": str(path.parent), "name": path.name})
    if values["data_seed"] not in (None, values["seed"]):
        draft.refuse("data_seed", f"{values['data_seed']}: the order of the data comes from `seed`, {values['seed']}")
    if values["accelerator_config"] and values["accelerator_config"].get("split_batches"):
        draft.refuse("accelerator_config", "split_batches: give the batch size of a process instead of that of all")


def batches(draft: TrlDraft) -> None:
    """Set the batch sizes. In `rl` TRL's count completions, and ours prompts and samples."""
    draft.set("per_device_train_batch_size", {"train.batch_size": draft.samples_per_update})
    if draft.task != "rl":
        return
    values = draft.values
    accumulated, group = values["gradient_accumulation_steps"], values["num_generations"]
    per_rollout = values["steps_per_generation"] or accumulated
    if draft.num_processes != draft.world_size and per_rollout != accumulated:
        made_for = quantity(draft.world_size, "process", "processes")
        draft.refuse(
            "steps_per_generation",
            f"{per_rollout}: the config was made for {made_for}, on which it and generation_batch_size depend, and"
            f" num_processes is {draft.num_processes}: make it with as many (WORLD_SIZE)",
        )
    if per_rollout % accumulated and accumulated % per_rollout:
        draft.refuse(
            "steps_per_generation",
            f"{per_rollout}: an optimizer step has {accumulated} of them (gradient_accumulation_steps), so some would"
            " learn from two rollouts; here a rollout has whole optimizer steps",
        )
    if per_rollout < accumulated and values["num_iterations"] > 1:
        draft.refuse(
            "num_iterations",
            f"{values['num_iterations']} with {accumulated // per_rollout} generations in an optimizer step: the passes"
            " over a generation are in one step, and would be steps of their own here",
        )
    samples = draft.samples_per_update * max(1, per_rollout // accumulated)
    if samples % group:
        draft.refuse(
            "generation_batch_size",
            f"{samples} completions in a rollout are not whole groups of num_generations, {group}",
        )
    draft.set("generation_batch_size", {"rollout.batch_size": max(1, samples // group)})
    draft.set("num_generations", {"rollout.samples_per_prompt": group})
    draft.set("num_iterations", {"train.max_epochs": values["num_iterations"]})
    if per_rollout != accumulated and values["loss_type"] in ("dapo", "cispo"):
        draft.differ(
            "loss_type",
            "TRL divides an optimizer step's loss by the mean number of tokens of the steps of its generation, and here"
            " it is divided by the tokens of the step",
        )


def passes(draft: TrlDraft) -> None:
    epochs, max_steps = draft.values["num_train_epochs"], draft.values["max_steps"]
    if max_steps > 0:
        steps = -(-max_steps // draft.updates_per_step)
        rows = steps * (draft.prompts_per_rollout if draft.task == "rl" else draft.samples_per_update)
        draft.refuse(
            "max_steps",
            f"{max_steps}: a run ends with its data. Leave it at -1 with num_train_epochs=1; with"
            f" data.max_samples={rows} of our config the run then has as many optimizer steps, if the data has as many"
            " rows",
        )
    elif epochs != int(epochs) or epochs < 1:
        draft.refuse("num_train_epochs", f"{epochs:g}: passes are whole, at least one; set data.max_samples for less")
    elif draft.task == "rl":
        draft.set("num_train_epochs", {"train.num_episodes": int(epochs)})
    else:
        draft.set("num_train_epochs", {"train.max_epochs": int(epochs)})


def schedule(draft: TrlDraft) -> None:
    kind, arguments = draft.values["lr_scheduler_type"], draft.mapping("lr_scheduler_kwargs")
    peak, warmup = draft.values["learning_rate"], draft.values["warmup_steps"] or 0
    ours = {
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
    }.get(kind)
    if ours is None:
        draft.refuse("lr_scheduler_type", f"{kind}: the schedules are linear, cosine and constant")
        return
    draft.set("lr_scheduler_type", {"actor.optimizer.schedule": ours})
    least = 0.0
    if kind == "cosine_with_min_lr":
        rate, absolute = arguments.pop("min_lr_rate", None), arguments.pop("min_lr", None)
        least = rate if rate is not None else (absolute or 0.0) / peak if peak else 0.0
    if arguments:
        draft.refuse("lr_scheduler_kwargs", f"{arguments}: a schedule has only a least learning rate")
    if ours != "constant":
        draft.set("lr_scheduler_kwargs", {"actor.optimizer.min_learning_rate_ratio": float(least)})
    if kind == "constant":
        warmup = 0
    if warmup >= 1:
        draft.refuse("warmup_steps", f"{warmup}: warm-up is a share of all steps; give it as such, below 1")
        return
    draft.set("warmup_steps", {"actor.optimizer.warmup_ratio": float(warmup)})
    if warmup:
        draft.differ(
            "warmup_steps", "of w steps of warm-up, step s has (s + 1) / (w + 1) of the peak here, and s / w there"
        )


def optimizer(draft: TrlDraft) -> None:
    kind = draft.values["optim"]
    if kind not in ("adamw_torch", "adamw_torch_fused"):
        draft.refuse(
            "optim", f"{kind}: the optimizers are AdamW (adamw_torch, adamw_torch_fused), and Muon by our keys"
        )
    draft.set("optim", {"actor.optimizer.kind": "adamw"})
    draft.set("adam_beta1", {"actor.optimizer.betas": [draft.values["adam_beta1"], draft.values["adam_beta2"]]})


_HARMLESS = ("attn_implementation", "device_map", "use_cache")  # of `model_init_kwargs`
_WEIGHTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def precision(draft: TrlDraft) -> None:
    values = draft.values
    arguments = draft.mapping("model_init_kwargs")
    dtype = arguments.pop("dtype", arguments.pop("torch_dtype", None))
    weights = _WEIGHTS.get(str(dtype or "float32").removeprefix("torch."))
    if weights is None:
        draft.refuse("model_init_kwargs", f"dtype {dtype}: weights are in float32 or bfloat16")
    trusts = arguments.pop("trust_remote_code", values["trust_remote_code"])
    draft.set("trust_remote_code", {"trust_remote_code": bool(trusts)})
    for name in _HARMLESS:
        arguments.pop(name, None)
    if arguments:
        draft.refuse("model_init_kwargs", f"{', '.join(arguments)}: a model is loaded as its checkpoint defines it")
    is_bf16 = not values["fp16"] if values["bf16"] is None else values["bf16"]
    computes = "fp16" if values["fp16"] else "bf16" if is_bf16 else weights or "fp32"
    draft.set("fp16" if values["fp16"] else "bf16", {"train.dtype": computes})
    if values["fp16"]:
        draft.set("fp16", {"train.backend": "deepspeed"})
    if computes == "fp32" or weights is None:
        return
    if weights not in ("fp32", computes):
        draft.refuse("model_init_kwargs", f"dtype {dtype}: the computation is in {computes}, and so are such weights")
    draft.set("model_init_kwargs", {"train.fp32_master": weights == "fp32"})
    if weights == "fp32":
        draft.differ(
            "bf16" if computes == "bf16" else "fp16", f"layers compute in {computes}; autocast keeps some in fp32"
        )


def compilation(draft: TrlDraft) -> None:
    if draft.values["torch_compile"]:
        draft.set("torch_compile", {"train.compile": True})


def logs(draft: TrlDraft) -> None:
    if draft.values["logging_strategy"] != "steps":
        draft.differ("logging_strategy", f"{draft.values['logging_strategy']}: a line per step; metrics.jsonl has all")
    elif draft.values["logging_steps"] >= 1:
        draft.set("logging_steps", {"log.every": draft.in_steps("logging_steps")})
    else:
        draft.differ("logging_steps", f"{draft.values['logging_steps']}: a share of all steps; a line per step here")


def trackers(draft: TrlDraft) -> None:
    values = draft.values
    names = [values["report_to"]] if isinstance(values["report_to"], str) else list(values["report_to"] or ())
    others = sorted({*names} - {"none", "tensorboard", "wandb", "mlflow", "trackio", "kubeflow"})
    if others:
        draft.refuse("report_to", f"{', '.join(others)}: the trackers are wandb, mlflow, trackio and TensorBoard")
    if "kubeflow" in names:  # which TRL adds by itself inside a job of Kubeflow
        draft.differ("report_to", "kubeflow: a run does not report its progress there")
    for name in ("wandb", "mlflow", "trackio"):
        if name in names:
            draft.set("report_to", {f"log.{name}.enabled": True})
            if values["run_name"]:
                draft.set("run_name", {f"log.{name}.run_name": values["run_name"]})
    if "trackio" in names:
        draft.set("project", {"log.trackio.project": values["project"]})
        if values["trackio_space_id"]:
            draft.set("trackio_space_id", {"log.trackio.space": values["trackio_space_id"]})


def evaluation(draft: TrlDraft) -> None:
    values = draft.values
    if values["eval_strategy"] == "no":
        return
    if values["eval_strategy"] != "steps":
        draft.refuse("eval_strategy", f"{values['eval_strategy']}: evaluations are counted in steps; give eval_steps")
        return
    if values["eval_steps"] < 1:
        draft.refuse("eval_steps", f"{values['eval_steps']}: a share of all steps; give a number of them")
        return
    draft.set("eval_steps", {"eval.every": draft.in_steps("eval_steps")})
    if draft.task == "rl":
        samples = values["num_generations_eval"] or values["num_generations"]
        draft.set("num_generations_eval", {"eval.samples_per_prompt": samples})
        draft.set("temperature", {"eval.temperature": values["temperature"]})
    draft.differ("eval_strategy", "set eval.path to the data to evaluate on, or eval=null for no evaluation")


def saving(draft: TrlDraft) -> None:
    values = draft.values
    if values["save_strategy"] == "no":
        draft.set("save_strategy", {"checkpoint.every_minutes": 0})
        return
    if values["save_strategy"] != "steps":
        draft.refuse("save_strategy", f"{values['save_strategy']}: checkpoints are counted in steps; give save_steps")
        return
    if values["save_steps"] < 1:
        draft.refuse("save_steps", f"{values['save_steps']}: a share of all steps; give a number of them")
        return
    draft.set("save_steps", {"checkpoint.every": draft.in_steps("save_steps")})
    draft.set("save_only_model", {"checkpoint.save_state": not values["save_only_model"]})
    if values["save_total_limit"]:
        draft.set("save_total_limit", {"checkpoint.keep_last": values["save_total_limit"]})
    else:
        draft.differ("save_total_limit", "TRL keeps all checkpoints, a run the newest checkpoint.keep_last of them")


def experts(draft: TrlDraft) -> None:
    coef = draft.values["router_aux_loss_coef"]
    if coef is not None:
        draft.set("router_aux_loss_coef", {"algorithm.aux_loss_coef": float(coef)})
    else:
        draft.differ(
            "router_aux_loss_coef", "for a mixture of experts, unset is the model's own coefficient there, and 0 here"
        )


# --- GRPO -------------------------------------------------------------------------------------------------------------


def prompts(draft: TrlDraft) -> None:
    values = draft.values
    answer, whole = values["max_completion_length"], values["vllm_max_model_length"] if values["use_vllm"] else None
    draft.set("", {"data.input_key": "prompt", "reward.clip": None})
    if answer is None:
        draft.refuse("max_completion_length", _UNBOUNDED)
        return
    whole = whole or answer + PROMPT_ROOM
    draft.set(
        "max_completion_length",
        {"rollout.max_new_tokens": answer, "data.max_length": whole, "data.max_lost_fraction": 0.0},
    )
    draft.differ(
        "max_completion_length",
        f"TRL takes prompts of any length; here one of more than {whole - answer} tokens is refused: raise"
        " data.max_length",
    )
    draft.differ("", "prompts that are messages: set data.apply_chat_template=true")
    draft.differ(
        "", "prompts that are text: TRL adds the tokenizer's special tokens, such as BOS, and here none are added"
    )


def engine(draft: TrlDraft) -> None:
    values = draft.values
    if not values["use_vllm"]:
        draft.set("use_vllm", {"rollout.engine": "transformers"})
        return
    if values["vllm_mode"] != "colocate":
        draft.refuse(
            "vllm_mode", f"{values['vllm_mode']}: a run starts its engines; cluster.component_placement says where"
        )
    draft.set("use_vllm", {"rollout.engine": "vllm"})
    draft.set("vllm_gpu_memory_utilization", {"rollout.memory_share": values["vllm_gpu_memory_utilization"]})
    draft.set("vllm_tensor_parallel_size", {"rollout.tensor_parallel_size": values["vllm_tensor_parallel_size"]})
    if values["vllm_enable_sleep_mode"]:
        draft.set("vllm_enable_sleep_mode", {"rollout.enable_offload": True})
    _correction(draft)


_CORRECTIONS = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "seq-tis",
    "sequence_mask": "seq-icepop",
}


def _correction(draft: TrlDraft) -> None:
    values, prefix = draft.values, "vllm_importance_sampling"
    if not values[f"{prefix}_correction"]:
        return
    kind = _CORRECTIONS.get(values[f"{prefix}_mode"])
    if kind is None:
        draft.refuse(f"{prefix}_mode", f"{values[f'{prefix}_mode']}: the modes are {', '.join(_CORRECTIONS)}")
        return
    draft.set(f"{prefix}_mode", {"algorithm.correction.kind": kind})
    draft.set(f"{prefix}_clip_min", {"algorithm.correction.low": float(values[f"{prefix}_clip_min"] or 0.0)})
    if values[f"{prefix}_clip_max"] is None:
        draft.refuse(f"{prefix}_clip_max", "None: the weights have an upper bound; name one")
    else:
        draft.set(f"{prefix}_clip_max", {"algorithm.correction.high": float(values[f"{prefix}_clip_max"])})


def kl(draft: TrlDraft) -> None:
    beta = draft.values["beta"]
    if beta == 0:
        return
    draft.set("beta", {"algorithm.kl.coef": beta, "algorithm.kl.as_loss": True, "algorithm.kl.estimator": "k3"})
    if draft.values["use_bias_correction_kl"]:
        draft.refuse(
            "use_bias_correction_kl",
            f"True with beta={beta:g}: TRL multiplies the KL by the ratio, and here the loss has k3 alone, which is"
            " TRL's with use_bias_correction_kl=False",
        )


def advantages(draft: TrlDraft) -> None:
    how = draft.values["multi_objective_aggregation"]
    if how == "normalize_then_sum":
        draft.set("multi_objective_aggregation", {"algorithm.estimator": "gdpo"})
        draft.differ(
            "multi_objective_aggregation",
            "TRL divides by deviations + 1e-4, here each reward by its own + 1e-9 and the step by the root of its mean"
            " square; give two or more reward.functions",
        )
        return
    if how != "sum_then_normalize":
        draft.refuse("multi_objective_aggregation", f"{how}: sum_then_normalize or normalize_then_sum")
    scale = {True: "group", False: "none"}.get(draft.values["scale_rewards"], draft.values["scale_rewards"])
    if scale == "group":
        draft.set("scale_rewards", {"algorithm.estimator": "group_norm"})
        draft.differ("scale_rewards", "TRL divides by the deviation of a group + 1e-4, here it is + 1e-9")
    elif scale == "none":
        draft.set("scale_rewards", {"algorithm.estimator": "dr_grpo"})
    else:
        draft.refuse("scale_rewards", f"{scale}: rewards are divided by the deviation of their group, or not at all")


_AGGREGATIONS = {
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "constant",
}


def loss(draft: TrlDraft) -> None:
    values, kind = draft.values, draft.values["loss_type"]
    aggregation = _AGGREGATIONS.get(kind)
    if aggregation is None:
        draft.refuse("loss_type", f"{kind}: the losses are {', '.join(_AGGREGATIONS)}")
        return
    if kind == "bnpo" and values["gradient_accumulation_steps"] * draft.num_processes > 1:
        draft.refuse("loss_type", "bnpo: the mean over the tokens of a micro-batch; dapo has that over all of a step")
    draft.set("loss_type", {"algorithm.aggregation": aggregation})
    if values["mask_truncated_completions"] and aggregation != "token_mean":
        draft.differ("mask_truncated_completions", "TRL counts masked answers in the mean over answers, here none is")
    _ratio(draft, kind)
    coef = values["entropy_coef"]
    if coef == 0:
        return
    draft.set("entropy_coef", {"algorithm.entropy_coef": coef})
    if aggregation != "token_mean":
        draft.refuse("entropy_coef", f"{coef:g} with loss_type {kind}: here the bonus is weighed like the loss")
    elif draft.samples_per_update > values["per_device_train_batch_size"]:
        draft.differ("entropy_coef", "TRL's bonus is the mean of those of micro-batches, here it is that of the step")


def _ratio(draft: TrlDraft, kind: str) -> None:
    """Set the policy loss and its clip range."""
    values, level = draft.values, draft.values["importance_sampling_level"]
    high = values["epsilon"] if values["epsilon_high"] is None else values["epsilon_high"]
    if kind in ("cispo", "sapo") and level != "token":
        draft.refuse("importance_sampling_level", f"{level} with {kind}, which has a ratio per token")
    if kind == "sapo":
        draft.set("loss_type", {"algorithm.policy_loss": "sapo"})
        for side in ("pos", "neg"):
            name = f"sapo_temperature_{side}"
            draft.set(name, {f"algorithm.gate_temperature_{side}": values[name]})
        return
    if kind == "cispo":
        if high <= 1:
            draft.refuse("epsilon_high", f"{high:g} with cispo: the bound of the ratio, above 1, such as 5")
        draft.set("loss_type", {"algorithm.policy_loss": "cispo", "algorithm.clip_low": 1.0})
        draft.set("epsilon_high", {"algorithm.clip_high": max(high - 1, 1e-9)})
        return
    losses = {"token": "ppo", "sequence": "gspo"}
    if level not in losses:
        draft.refuse("importance_sampling_level", f"{level}: the levels are token and sequence")
        return
    draft.set("importance_sampling_level", {"algorithm.policy_loss": losses[level]})
    draft.set("epsilon", {"algorithm.clip_low": values["epsilon"]})
    draft.set("epsilon_high", {"algorithm.clip_high": high})
    if values["delta"] is None:
        return
    draft.set("delta", {"algorithm.dual_clip": values["delta"]})
    if values["delta"] <= 1 + high:
        draft.refuse(
            "delta", f"{values['delta']:g} is not above 1 + epsilon_high, {1 + high:g}: it would clip good answers"
        )


# --- SFT, DPO, reward models ------------------------------------------------------------------------------------------


def template(draft: TrlDraft) -> None:
    path = draft.values["chat_template_path"]
    if path is None:
        return
    if not str(path).endswith((".jinja", ".j2")):
        draft.refuse("chat_template_path", f"{path}: give a file that ends with .jinja or .j2")
    draft.set("chat_template_path", {"data.chat_template": str(path), "data.apply_chat_template": True})


def examples(draft: TrlDraft) -> None:
    values = draft.values
    if values["loss_type"] not in ("nll", "chunked_nll"):
        draft.refuse("loss_type", f"{values['loss_type']}: the loss is nll")
    if values["assistant_only_loss"]:
        draft.set(
            "assistant_only_loss",
            {"data.input_key": "messages", "data.apply_chat_template": True, "data.multiturn": True},
        )
    elif values["completion_only_loss"] is None:
        draft.set("dataset_text_field", {"data.input_key": values["dataset_text_field"]})
        draft.differ(
            "completion_only_loss",
            "TRL looks at the columns, and this config is for rows of text: with columns prompt and completion, set"
            " data.input_key=prompt and data.output_key=completion; for messages, data.input_key=messages,"
            " data.apply_chat_template=true and data.pretrain_mode=true",
        )
    else:
        draft.set("completion_only_loss", {"data.input_key": "prompt", "data.output_key": "completion"})
        if not values["completion_only_loss"]:
            draft.set("completion_only_loss", {"data.pretrain_mode": True})
    _length(draft)
    draft.set("max_length", {"data.max_lost_fraction": 1.0})


def pairs(draft: TrlDraft) -> None:
    draft.set("", {"data.prompt_key": "prompt"})
    _length(draft)
    if draft.task == "dpo":
        draft.set("max_length", {"data.max_lost_fraction": 1.0})
    else:
        draft.differ("max_length", "TRL leaves out pairs that are longer, here they lose the end of an answer")
        draft.differ("", "rows with a margin: TRL uses it; set algorithm.reward_modelling.margin=true")
    draft.differ("", "rows without a column prompt: set data.prompt_key=null; messages: data.apply_chat_template=true")


def _length(draft: TrlDraft) -> None:
    if draft.values["max_length"] is None:
        draft.refuse("max_length", _UNBOUNDED)
    else:
        draft.set("max_length", {"data.max_length": draft.values["max_length"]})


def preference(draft: TrlDraft) -> None:
    kinds, weights = draft.values["loss_type"], draft.values["loss_weights"]
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds == ["sigmoid"]:
        draft.set("loss_type", {"algorithm.dpo.loss": "dpo"})
    elif kinds == ["ipo"]:
        draft.set("loss_type", {"algorithm.dpo.loss": "ipo", "algorithm.dpo.length_normalised": True})
    else:
        draft.refuse("loss_type", f"{', '.join(kinds)}: the losses are sigmoid or ipo, each by itself")
    if weights not in (None, [1.0]):
        draft.refuse("loss_weights", f"{weights}: there is one loss, of weight 1")


DERIVED: Mapping[str, Callable[[TrlDraft], None]] = {
    function.__name__: function
    for function in (
        *(output, batches, passes, schedule, optimizer, precision, compilation, logs, trackers, evaluation, saving),
        *(experts, prompts, engine, kl, advantages, loss, template, examples, pairs, preference),
    )
}
