"""RLinf's configs in our keys: `translate` returns the values that have a meaning here, and lists the rest.

`TABLE` has every key that is taken or known to have no effect; docs/rlinf.md shows it. A key that is not in the table
is listed as well, so nothing is dropped in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotseat.config.load import valid_keys
from hotseat.config.yaml_lines import nested
from hotseat.errors import ConfigError, Problem

NONE = ""  # stands for our key where there is none


@dataclass(frozen=True)
class RlinfKey:
    """A key of RLinf: ours, how its value is converted, and why it has no effect where it has none."""

    theirs: str
    ours: str = NONE
    convert: Callable[[Any], Any] = lambda value: value
    because: str = ""
    choices: Mapping[Any, Any] | None = None  # our value for each of theirs
    instead: str = ""  # of a switch that would change what is learned: what to do where it is on

    def ours_of(self, value: Any) -> Any:
        """Return our value for one of theirs; None: ours is left unset."""
        if self.choices is None:
            return self.convert(value)
        if value not in self.choices:
            known = ", ".join(str(each) for each in self.choices if each is not None)
            problem = f"{value!r} has no counterpart here; those that have one are {known}"
            raise ConfigError([Problem(self.theirs, problem)])
        return self.choices[value]


@dataclass(frozen=True)
class ConfigTranslation:
    """Our values, as nested sections, and RLinf's keys without effect, each with the reason."""

    values: dict[str, Any]
    no_effect: list[tuple[str, str]]


def _positive_or_none(value: Any) -> Any:
    return None if value is None or value <= 0 else value


def _limit(value: int) -> int:
    """Convert 1000000, RLinf's way to write no limit, to 0."""
    return 0 if value >= 1000000 else value


def _paths(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


_ESTIMATORS = {"grpo": "group_norm", "gae": "gae", "reinpp": "reinforce", "raw": "reinforce"}
_BASELINE, _KL_IN_REWARD = "algorithm.use_reinpp_baseline", "algorithm.reinpp_kl_beta"
_NORMALISES = "algorithm.normalize_advantages"
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-mean": "sequence_mean",
}
_TIME_STEPS = {None: None, "action_level": "action", "chunk_level": "chunk"}
_RATIO_STEPS = {"token_level": "token", **_TIME_STEPS}
_ENGINES = {"huggingface": "transformers", "vllm": "vllm", "sglang": "vllm"}
_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "32": "fp32", 32: "fp32"}
_BACKENDS = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "fsdp"}
_SIMULATORS = ("gym", "babyai", "mujoco_warp")
_KL = {"low_var_kl": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "k3"}
_ENTROPY = "entropy is a mean over tokens; for that of longer units multiply algorithm.entropy_bonus by their tokens"
_MEGATRON = "Megatron is not a backend here"
_LAYERS = "the layers follow the model's own config.json"


def simulator_of(kind: Any) -> Any:
    """Return a simulator that is here, by RLinf's `env_type`: one of ours, or a Python file; None for any other."""
    return kind if kind in _SIMULATORS or str(kind).endswith(".py") else None


TABLE: tuple[RlinfKey, ...] = (
    RlinfKey("cluster.num_nodes", "cluster.num_nodes"),
    RlinfKey("cluster.component_placement", "cluster.component_placement"),
    RlinfKey("cluster.node_groups", "cluster.node_groups"),
    RlinfKey("cluster.num_gpus_per_node", because="devices are counted on the machines; see cluster.inventory"),
    RlinfKey("cluster.auto_scheduler", because="devices are not moved between roles while a run lasts"),
    RlinfKey("runner.experiment_name", "name"),
    RlinfKey("runner.output_dir", "run_dir"),
    RlinfKey("runner.logger.log_path", "run_dir"),
    RlinfKey("runner.logger.experiment_name", "name"),
    RlinfKey("runner.max_epochs", "train.num_episodes"),
    RlinfKey("runner.save_interval", "checkpoint.every", _positive_or_none),
    RlinfKey("runner.val_check_interval", "eval.every", _positive_or_none),
    RlinfKey("runner.seq_length", "data.max_length"),
    RlinfKey("runner.max_tokens_per_mbs", "train.max_tokens_per_device"),
    RlinfKey("runner.task_type", because="the task is rl; `hotseat config` shows it"),
    RlinfKey("runner.max_steps", because="steps follow from the data and runner.max_epochs"),
    RlinfKey("runner.resume_dir", because="`hotseat resume RUN` continues a run"),
    RlinfKey("runner.enable_dynamic_batch_size", because="micro-batches have the size that fits unless one is set"),
    RlinfKey("runner.logger", because="every run records its metrics; see log.wandb and log.tensorboard_path"),
    RlinfKey("algorithm.group_size", "rollout.samples_per_prompt"),
    RlinfKey("algorithm.adv_type", "algorithm.estimator", choices=_ESTIMATORS),
    RlinfKey("algorithm.loss_agg_func", "algorithm.aggregation", choices=_AGGREGATIONS),
    RlinfKey("algorithm.kl_beta", "algorithm.kl.coef"),  # of the loss; see `_penalty`
    RlinfKey("algorithm.kl_penalty_type", "algorithm.kl.estimator", choices=_KL),
    RlinfKey("algorithm.ratio_clip_eps", "algorithm.clip_low"),
    RlinfKey("algorithm.clip_ratio_low", "algorithm.clip_low"),
    RlinfKey("algorithm.clip_ratio_high", "algorithm.clip_high"),
    RlinfKey("algorithm.clip_ratio_c", "algorithm.dual_clip"),
    RlinfKey("algorithm.entropy_bonus", "algorithm.entropy_coef", lambda value: value or None),
    RlinfKey("algorithm.gamma", "algorithm.gamma"),
    RlinfKey("algorithm.gae_lambda", "algorithm.gae_lambda"),
    RlinfKey("algorithm.reward_type", "algorithm.time_step", choices=_TIME_STEPS),
    RlinfKey("algorithm.logprob_type", "algorithm.ratio_step", choices=_RATIO_STEPS),
    RlinfKey("algorithm.entropy_type", because=_ENTROPY),
    RlinfKey("algorithm.value_clip", "critic.value_clip", _positive_or_none),
    RlinfKey("algorithm.huber_delta", because="values are learned by their squared error"),
    RlinfKey("algorithm.update_epoch", "train.max_epochs"),
    RlinfKey("algorithm.eval_rollout_epoch", because="env.eval_seeds says how much is evaluated"),
    RlinfKey("algorithm.length_params", because="a chunk of actions has as many tokens as its numbers"),
    RlinfKey("algorithm.training_batch_size_per_gpu", "train.micro_batch_size"),
    RlinfKey("algorithm.logprob_forward_micro_batch_size", "rollout.micro_batch_size"),
    RlinfKey("algorithm.staleness_threshold", "overlap.staleness"),
    RlinfKey("algorithm.sampling_params.temperature", "rollout.temperature"),
    RlinfKey("algorithm.sampling_params.temperature_train", "rollout.temperature"),
    RlinfKey("algorithm.sampling_params.temperature_eval", "eval.temperature"),
    RlinfKey("algorithm.sampling_params.top_p", "rollout.top_p"),
    RlinfKey("algorithm.sampling_params.top_k", "rollout.top_k", _limit),
    RlinfKey("algorithm.sampling_params.max_new_tokens", "rollout.max_new_tokens"),
    RlinfKey("algorithm.sampling_params.use_greedy", because="set algorithm.sampling_params.temperature to 0"),
    RlinfKey("algorithm.sampling_params.min_new_tokens", because="an answer has at least one token"),
    RlinfKey("algorithm.sampling_params.repetition_penalty", because="it would change the sampled distribution"),
    RlinfKey("algorithm.calculate_entropy", because="the entropy is computed where algorithm.entropy_bonus is set"),
    RlinfKey(
        "algorithm.reward_coef", because="env.train.reward_coef, which usually refers to it, is the factor of rewards"
    ),
    RlinfKey(
        "algorithm.filter_rewards",
        because="all groups are learned from",
        instead="RLinf leaves groups out of a step, and here others take their place: set it to False, or convert the"
        " config with hotseat rlinf-config and give algorithm.filtering.enabled, low and high, bounds of the mean"
        " score",
    ),
    RlinfKey("algorithm.rewards_lower_bound", because="algorithm.filter_rewards, which it is a bound of, is off"),
    RlinfKey("algorithm.rewards_upper_bound", because="algorithm.filter_rewards, which it is a bound of, is off"),
    RlinfKey("algorithm.bootstrap_type", "env.bootstrap_terminated", choices={"standard": False, "always": True}),
    RlinfKey("algorithm.loss_type", because="the loss follows from the estimator; see algorithm.policy_loss"),
    RlinfKey("algorithm.early_stop_imp_ratio", because="updates are clipped, not stopped"),
    RlinfKey("algorithm.use_valid_token_scale", because="algorithm.loss_agg_func says how tokens are weighted"),
    RlinfKey("algorithm.val_rollout_batch_size_per_gpu", because="evaluation samples as training does"),
    RlinfKey("algorithm.rollout_batch_size_per_gpu", because="engines share the batch as they finish"),
    RlinfKey("rollout.model_dir", "actor.model"),
    RlinfKey("rollout.gpu_memory_utilization", "rollout.memory_share"),
    RlinfKey("rollout.tensor_parallel_size", "rollout.tensor_parallel_size"),
    RlinfKey("rollout.enforce_eager", "rollout.enforce_eager"),
    RlinfKey("rollout.max_running_requests", "rollout.num_slots"),
    RlinfKey("rollout.rollout_backend", "rollout.engine", choices={"vllm": "vllm", "sglang": "vllm"}),
    RlinfKey("rollout.backend", "rollout.engine", choices=_ENGINES),
    RlinfKey("rollout.generation_backend", "rollout.engine", choices=_ENGINES),
    RlinfKey("rollout.sampling_params.temperature_train", "rollout.temperature"),
    RlinfKey("rollout.sampling_params.temperature_eval", "eval.temperature"),
    RlinfKey("rollout.sampling_params.top_p", "rollout.top_p"),
    RlinfKey("rollout.sampling_params.top_k", "rollout.top_k", _limit),
    RlinfKey("rollout.model", because="engines have the actor's model, in the dtype of training"),
    RlinfKey("rollout.enable_offload", "rollout.enable_offload"),
    RlinfKey("rollout.pipeline_stage_num", "rollout.pipeline_stage_num"),
    RlinfKey("rollout.recompute_logprobs", because="old log-probs are the trainer's own; see algorithm.correction"),
    RlinfKey("actor.model.model_path", "actor.model"),
    RlinfKey("actor.model.precision", "train.dtype", choices=_DTYPES),
    RlinfKey(
        "actor.model.tensor_model_parallel_size", because=_MEGATRON + "; see train.deepspeed.tensor_parallel_size"
    ),
    RlinfKey("actor.model.pipeline_model_parallel_size", because=_MEGATRON),
    RlinfKey("actor.model.num_action_chunks", "env.chunk"),
    RlinfKey("actor.model.action_dim", because="the simulator says what an action is"),
    RlinfKey("actor.model.add_value_head", because="the critic is a model of its own; see critic.model"),
    RlinfKey("actor.model.lora_path", because="adapters begin anew; merge those of an earlier run into the model"),
    RlinfKey("actor.model", because=_LAYERS),
    RlinfKey("actor.enable_offload", "actor.enable_offload"),
    RlinfKey("actor.seed", "seed"),
    RlinfKey("actor.micro_batch_size", "train.micro_batch_size"),
    RlinfKey("actor.global_batch_size", "train.batch_size"),
    RlinfKey("actor.training_backend", "train.backend", choices=_BACKENDS),
    RlinfKey("actor.gradient_checkpointing", "train.gradient_checkpointing"),
    RlinfKey("actor.optim.lr", "actor.optimizer.learning_rate"),
    RlinfKey("actor.optim.adam_eps", "actor.optimizer.eps"),
    RlinfKey("actor.optim.weight_decay", "actor.optimizer.weight_decay"),
    RlinfKey("actor.optim.clip_grad", "actor.optimizer.max_grad_norm"),
    RlinfKey("actor.optim.value_lr", "critic.optimizer.learning_rate"),
    RlinfKey("actor.optim.critic_warmup_steps", "critic.warmup_steps"),
    RlinfKey("actor.optim", because="it is a setting of Megatron's optimizer"),
    RlinfKey("actor.lr_sched.lr_warmup_fraction", "actor.optimizer.warmup_ratio"),
    RlinfKey("actor.lr_sched.lr_decay_style", "actor.optimizer.schedule"),
    RlinfKey("actor.lr_sched", because="actor.optimizer has the schedule: warmup_ratio, min_learning_rate_ratio"),
    RlinfKey("actor.tokenizer.trust_remote_code", "trust_remote_code"),
    RlinfKey("actor.tokenizer", because="the tokenizer is the model's"),
    RlinfKey("actor.megatron", because=_MEGATRON),
    RlinfKey("actor.fsdp_config.gradient_checkpointing", "train.gradient_checkpointing"),
    RlinfKey("actor.fsdp_config", because="FSDP2 shards weights, gradients and optimizer over all ranks"),
    RlinfKey("actor.offload_optimizer", because="actor.enable_offload covers optimizer, weights and gradients"),
    RlinfKey("actor.offload_weight", because="actor.enable_offload covers optimizer, weights and gradients"),
    RlinfKey("actor.offload_grad", because="actor.enable_offload covers optimizer, weights and gradients"),
    RlinfKey("inference.enable_offload", "inference.enable_offload"),
    RlinfKey("env.enable_offload", "env.enable_offload"),
    RlinfKey("env.train.enable_offload", "env.enable_offload"),
    RlinfKey("env.train.total_num_envs", "env.num_envs"),
    RlinfKey("env.train.max_episode_steps", "env.max_steps"),
    RlinfKey("env.train.env_type", "env.path", simulator_of),
    RlinfKey("env.train.init_params.id", "env.tasks", lambda value: [value]),
    RlinfKey("env.train.reward_coef", "env.reward_scale"),
    RlinfKey("env.train.use_rel_reward", "env.relative_rewards"),
    RlinfKey(
        "env.train.ignore_terminations",
        because="an episode ends where its simulator ends it",
        instead="an episode ends here where its simulator ends it: set it to False, or have the simulator not"
        " terminate",
    ),
    RlinfKey(
        "env.train.use_step_penalty",
        because="steps cost nothing but what the simulator says",
        instead="steps have no penalty here: set it to False, or reward in the simulator",
    ),
    RlinfKey("env.eval.reward_coef", because="episodes of evaluations are rewarded as those of training are"),
    RlinfKey("env.eval.use_rel_reward", because="episodes of evaluations are rewarded as those of training are"),
    RlinfKey("env.eval.ignore_terminations", because="an episode is evaluated up to where its simulator ends it"),
    RlinfKey("env.train.video_cfg", because="env.films makes films of recorded samples"),
    RlinfKey("env.eval.video_cfg", because="env.films makes films of recorded samples"),
    RlinfKey("env.train.auto_reset", because="a simulator is reset by whoever plays the next episode in it"),
    RlinfKey("env.train.seed", because="actor.seed is the seed of everything random"),
    RlinfKey("env.train.group_size", because="algorithm.group_size says it"),
    RlinfKey("env.train.max_steps_per_rollout_epoch", because="episodes are played to their end"),
    RlinfKey("env", because="an environment is a file here, with keyword arguments; see env.path"),
    RlinfKey("critic.use_critic_model", because="the estimator gae has a critic; see critic.model"),
    RlinfKey("reward.use_reward_model", because="reward.model, reward.function or reward.graders say what rewards are"),
    RlinfKey("reward", because="reward.model, reward.function or reward.graders say what rewards are"),
    RlinfKey("data.rollout_batch_size", "rollout.batch_size"),
    RlinfKey("data.max_prompt_length", "data.prompt_max_length"),
    RlinfKey("data.prompt_key", "data.input_key"),
    RlinfKey("data.answer_key", "data.label_key"),
    RlinfKey("data.train_data_paths", "data.path", _paths),
    RlinfKey("data.val_data_paths", "eval.path", _paths),
    RlinfKey("data.seed", because="actor.seed is the seed of everything random"),
    RlinfKey("data", because="data is read by datasets, in a fixed random order; see docs/first-run.md"),
    RlinfKey("algorithm", because="it has no counterpart here"),
    RlinfKey("runner", because="it has no counterpart here"),
    RlinfKey("rollout", because="it is a setting of SGLang, or of RLinf's engine"),
    RlinfKey("actor", because="it has no counterpart here"),
    RlinfKey("hydra", because="overrides are written as key=value after the file's name"),
    RlinfKey("defaults", because="a config is one file here"),
)
_BY_KEY = {key.theirs: key for key in TABLE}
_GROUP_NAMES = "workers are named after their roles; hotseat.rlinf has groups of any name"


def looks_like_rlinf(values: Mapping[str, Any]) -> bool:
    """Tell whether a config is RLinf's: it has a section `runner`, which ours has not."""
    return isinstance(values.get("runner"), Mapping)


def translate(values: Mapping[str, Any]) -> ConfigTranslation:
    """Return a config of RLinf in our keys. Raises if a value has no counterpart but changes what is learned."""
    if problems := unsupported_values(values):
        raise ConfigError(problems)
    ours: dict[str, Any] = {}
    no_effect: list[tuple[str, str]] = []
    valid = set(valid_keys())
    for path, value in _leaves(values):
        entry = _entry_of(path)
        if path.endswith(".group_name"):
            no_effect.append((path, _GROUP_NAMES))
        elif entry is None:
            no_effect.append((path, "it has no counterpart here"))
        elif entry.ours == NONE or entry.theirs != path:
            no_effect.append((path, entry.because))
        elif entry.ours not in valid:
            no_effect.append((path, f"this version has no {entry.ours}"))
        else:
            converted = entry.ours_of(value)
            if converted is not None:
                ours[entry.ours] = converted
    _together(values, ours)
    no_effect += _estimator(values, ours)
    no_effect += _penalty(values, ours)
    no_effect += _share_simulators(values, ours)
    no_effect += _in_episodes(values, ours)
    taken = _steps_of_simulators(values, ours) | _numeric(values, ours)
    return ConfigTranslation(nested(ours), [each for each in no_effect if each[0] not in taken])


def their_key(values: Mapping[str, Any], ours: str) -> str:
    """Return the key of RLinf's config that one of ours comes from; ours, if it comes from several."""
    return next((key.theirs for key in TABLE if key.ours == ours and at(values, key.theirs) is not None), ours)


def unsupported_values(values: Mapping[str, Any]) -> list[Problem]:
    """Return the keys whose values would change what is learned, and have no counterpart here."""
    return [
        Problem(key.theirs, f"{at(values, key.theirs)!r}: {key.instead}")
        for key in TABLE
        if key.instead and at(values, key.theirs) not in (None, False)
    ]


def _together(values: Mapping[str, Any], ours: dict[str, Any]) -> None:
    """Set the keys that follow from several of RLinf's."""
    both = at(values, "algorithm.ratio_clip_eps")
    if both is not None:
        ours.setdefault("algorithm.clip_low", both)
        ours.setdefault("algorithm.clip_high", both)
    time_step, ratio_step = ours.get("algorithm.time_step"), ours.get("algorithm.ratio_step")
    if (time_step, ratio_step) == ("action", "chunk"):
        problem = "chunk_level is longer than algorithm.reward_type action_level, and a ratio is multiplied by one"
        raise ConfigError([Problem("algorithm.logprob_type", f"{problem} advantage: set reward_type to chunk_level")])
    if ratio_step is not None and time_step in (None, ratio_step):
        ours["algorithm.time_step"] = ours.pop("algorithm.ratio_step")  # of both, unless they differ
    optim = at(values, "actor.optim") or {}
    if "adam_beta1" in optim or "adam_beta2" in optim:
        ours["actor.optimizer.betas"] = [optim.get("adam_beta1", 0.9), optim.get("adam_beta2", 0.95)]
    if at(values, "actor.model.is_lora") and at(values, "actor.model.lora_rank"):
        ours["train.lora.rank"] = ours["train.lora.alpha"] = at(values, "actor.model.lora_rank")
    minibatches = at(values, "algorithm.n_minibatches")
    if minibatches and "rollout.batch_size" in ours and "train.batch_size" not in ours:
        num_samples = ours["rollout.batch_size"] * ours.get("rollout.samples_per_prompt", 1)
        ours["train.batch_size"] = max(1, num_samples // minibatches)


def _estimator(values: Mapping[str, Any], ours: dict[str, Any]) -> list[tuple[str, str]]:
    """Set what RLinf's estimator takes from other keys; return those without effect on it.

    RLinf discounts under gae alone. `normalize_advantages` normalises over the batch whatever the estimator made;
    reinpp has done so already, and raw, rewards as they are, is normalised only if the key says so.
    """
    kind, unused = at(values, "algorithm.adv_type"), []
    has_baseline, normalises = at(values, _BASELINE), at(values, _NORMALISES)
    if has_baseline and kind == "reinpp":
        ours["algorithm.estimator"] = "reinforce_baseline"
    elif has_baseline:
        unused.append((_BASELINE, f"algorithm.adv_type is {kind}; it is for reinpp"))
    if kind in ("reinpp", "raw") and ours.pop("algorithm.gamma", None) is not None:
        unused.append(("algorithm.gamma", f"RLinf does not discount where algorithm.adv_type is {kind}"))
    if kind not in (None, "gae") and ours.pop("env.bootstrap_terminated", None) is not None:
        unused.append(("algorithm.bootstrap_type", f"algorithm.adv_type is {kind}, which has no critic"))
    if kind is not None:
        ours["reward.clip"] = None  # RLinf takes rewards as they are
    if kind == "raw" and not normalises:
        ours["algorithm.batch_norm"] = False
    elif kind == "reinpp" and normalises is False:
        unused.append((_NORMALISES, "reinpp normalises over the batch in any case"))
    elif (kind, normalises) in (("gae", False), ("grpo", True)):
        ours["algorithm.batch_norm"] = normalises
    return unused


def _penalty(values: Mapping[str, Any], ours: dict[str, Any]) -> list[tuple[str, str]]:
    """Set the KL: RLinf's kl_beta weighs it in the loss, reinpp_kl_beta in the reward of reinpp."""
    in_loss, in_reward = at(values, "algorithm.kl_beta") or 0, at(values, _KL_IN_REWARD) or 0
    if in_reward and at(values, "algorithm.adv_type") != "reinpp":
        return [(_KL_IN_REWARD, "algorithm.adv_type is not reinpp, which alone has a KL in the reward")]
    if in_loss and in_reward:
        problem = f"{in_reward}, and algorithm.kl_beta is {in_loss}: here the KL is in the reward or in the loss"
        raise ConfigError([Problem(_KL_IN_REWARD, f"{problem}; set one of them to 0")])
    if in_loss:
        ours["algorithm.kl.as_loss"] = True
    elif in_reward:
        ours["algorithm.kl.coef"] = in_reward
    return []


def _share_simulators(values: Mapping[str, Any], ours: dict[str, Any]) -> list[tuple[str, str]]:
    """Divide RLinf's number of all simulators by the processes of env; return the key if they cannot be counted."""
    total = at(values, _ALL_SIMULATORS)
    if total is None:
        return []
    count = _num_env_processes(values)
    if count is None:
        because = f"the placement does not say how many processes env has: set env.num_envs to {total} divided by them"
        return [(_ALL_SIMULATORS, because)]
    if total % count:
        problem = f"{total} simulators cannot be divided evenly among {count} processes of env: set it to a multiple"
        raise ConfigError([Problem(_ALL_SIMULATORS, f"{problem} of {count}")])
    ours["env.num_envs"] = total // count
    return []


def _in_episodes(values: Mapping[str, Any], ours: dict[str, Any]) -> list[tuple[str, str]]:
    """Count the batches of a run in simulators in episodes; return the keys that count something else."""
    total, group = at(values, _ALL_SIMULATORS), ours.get("rollout.samples_per_prompt", 1)
    is_embodied = at(values, "runner.task_type") == "embodied"
    unused = []
    epochs = next((key for key in _EPOCHS if at(values, key) is not None), None)
    if epochs is not None and not (is_embodied and total is not None):
        unused.append((epochs, f"it multiplies {_ALL_SIMULATORS} where runner.task_type is embodied"))
    if not is_embodied:
        return unused
    if total is not None:
        num_episodes = total * (1 if epochs is None else at(values, epochs))
        if num_episodes % group:
            problem = f"{num_episodes} episodes of a step (with {_EPOCHS[0]}) are no multiple of {group}"
            raise ConfigError([Problem(_ALL_SIMULATORS, f"{problem}, algorithm.group_size: choose one that is")])
        ours["rollout.batch_size"] = num_episodes // group
    others = {
        "actor.global_batch_size": ("train.batch_size", "it counts chunks of actions, and train.batch_size episodes"),
        "actor.micro_batch_size": ("train.micro_batch_size", "it counts chunks of actions; the size that fits is used"),
        "runner.max_epochs": (
            "train.num_episodes",
            "steps follow from env.tasks, env.num_seeds and train.num_episodes, the passes over them",
        ),
    }
    return unused + [
        (theirs, because)
        for theirs, (key, because) in others.items()
        if at(values, theirs) is not None and ours.pop(key, None) is not None
    ]


def _steps_of_simulators(values: Mapping[str, Any], ours: dict[str, Any]) -> set[str]:
    """Set how many steps a run in simulators has; return the keys that said so."""
    if "env.path" not in ours:
        ours.pop("env.tasks", None)
        return set()
    ours["env.reward"] = "simulator"
    num_steps, max_steps = at(values, "runner.max_epochs"), at(values, "runner.max_steps")
    if max_steps is not None and max_steps > 0:
        num_steps = max_steps if num_steps is None else min(num_steps, max_steps)
    if num_steps and "rollout.batch_size" in ours:
        ours["env.num_seeds"], ours["train.num_episodes"] = ours["rollout.batch_size"] * num_steps, 1
    of_evaluation = [at(values, f"env.eval.{name}") or 1 for name in ("total_num_envs", "rollout_epoch")]
    ours["env.eval_seeds"] = math.prod(of_evaluation) if "eval.every" in ours else 0
    return {"runner.max_epochs", "runner.max_steps", "env.eval.total_num_envs", "env.eval.rollout_epoch"}


def _numeric(values: Mapping[str, Any], ours: dict[str, Any]) -> set[str]:
    """Set what follows from a policy that acts in numbers; return the keys that said so.

    RLinf's batches count chunks of actions: a step has the same number of updates here, of as many episodes.
    """
    if not ours.get("actor.model"):
        ours.pop("actor.model", None)
    model = at(values, "actor.model") or {}
    if "env.path" not in ours or model.get("model_type") != "mlp_policy":
        return set()
    chunk = model.get("num_action_chunks", 1)
    ours |= {"rollout.engine": "numeric", "env.chunk": chunk, "rollout.num_slots": ours.get("env.num_envs", 1)}
    ours["data.max_length"] = model["obs_dim"] + model["action_dim"] * chunk + 1
    num_samples = ours.get("rollout.batch_size", 1) * ours.get("rollout.samples_per_prompt", 1)
    per_update, length = at(values, "actor.global_batch_size"), at(values, "env.train.max_episode_steps")
    if per_update and length:
        max_updates = max(1, num_samples * (length // chunk) // per_update)
        num_updates = max(count for count in range(1, min(max_updates, num_samples) + 1) if num_samples % count == 0)
        ours["train.batch_size"] = num_samples // num_updates
    names = ("model_type", "obs_dim", "action_dim", "hidden_dim", "add_value_head")
    return {"actor.global_batch_size", *(f"actor.model.{name}" for name in names)}


def _num_env_processes(values: Mapping[str, Any]) -> int | None:
    """Count the processes of env in RLinf's placement, which is text such as 0-3,6 or 0-3:0-7, or `all`."""
    placement = at(values, "cluster.component_placement")
    for names, written in (placement if isinstance(placement, Mapping) else {}).items():
        if "env" not in [name.strip() for name in str(names).split(",")]:
            continue
        text = str(written.get("placement") if isinstance(written, Mapping) else written).strip()
        if text == "all" and not isinstance(written, Mapping):
            num_nodes, num_devices = (at(values, f"cluster.{name}") for name in ("num_nodes", "num_gpus_per_node"))
            return int(num_nodes) * int(num_devices) if num_nodes and num_devices else None
        # A rank or several; with a colon, the processes on them.
        ranges = [re.fullmatch(r"\s*(?:[\d-]+:)?(\d+)(?:-(\d+))?\s*", each) for each in text.split(",")]
        if any(each is None for each in ranges):
            return None
        return sum(int(each[2] or each[1]) - int(each[1]) + 1 for each in ranges if each is not None)
    return None


def at(values: Mapping[str, Any], path: str) -> Any:
    section: Any = values
    for part in path.split("."):
        section = section.get(part) if isinstance(section, Mapping) else None
    return section


_ALL_SIMULATORS = "env.train.total_num_envs"
_EPOCHS = ("algorithm.rollout_epoch", "env.train.rollout_epoch")  # its place in older and newer configs
_TOGETHER = (
    "actor.optim.adam_beta1",
    "actor.optim.adam_beta2",
    "algorithm.n_minibatches",
    "algorithm.ratio_clip_eps",
    "actor.model.is_lora",
    "actor.model.lora_rank",
    _BASELINE,
    _KL_IN_REWARD,
    _NORMALISES,
    _ALL_SIMULATORS,
    *_EPOCHS,
)
_WHOLE = ("cluster.component_placement", "cluster.node_groups")  # mappings and lists that are one value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in _TOGETHER:
            continue
        if isinstance(value, Mapping) and path not in _WHOLE:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _entry_of(path: str) -> RlinfKey | None:
    """Return the entry of a key, or of the nearest section above it."""
    while path:
        if path in _BY_KEY:
            return _BY_KEY[path]
        path = path.rpartition(".")[0]
    return None
