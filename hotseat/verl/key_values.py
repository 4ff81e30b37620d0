"""Config fields that depend on several keys, or on more than a key's own value.

Each function takes the draft, sets fields and notes keys without effect. `DERIVED` names them for the table of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hotseat.cli.translation import CommandDraft
from hotseat.verl.overrides import HydraLine
from hotseat.verl.verl_keys import VLLM_ARGUMENTS, above_zero

BUILT_IN_REWARD = "verl_score"
MANY = 1_000_000  # checkpoints: verl keeps all unless told otherwise

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"

_SEQUENCE_SIZES = (
    f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
)

ENGINES = {"vllm": "vllm", "hf": "transformers"}
ESTIMATORS = {
    "gae": "gae",
    "grpo": "group_norm",
    "grpo_vectorized": "group_norm",
    "reinforce_plus_plus": "reinforce",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
LOSSES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
CORRECTIONS = {"token": ("tis", "icepop"), "sequence": ("seq-tis", "seq-icepop")}  # with one bound, with two
REJECTIONS = {"seq_mean_k1": "k1", "seq_mean_k2": "k2", "seq_mean_k3": "k3"}
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float16", "fp16"), "fp16"),
    **dict.fromkeys(("float32", "fp32"), "fp32"),
}
TRACKERS = ("wandb", "mlflow", "trackio")
_ALWAYS_WRITTEN = ("console", "file", "tensorboard")
_REWARD_SOURCES = (
    *(f"reward.{name}" for name in ("function", "url", "model", "graders", "judge.rubric")),
    *(f"agent.{name}" for name in ("path", "command", "environment.family")),
    "env.path",
)


@dataclass
class VerlDraft(CommandDraft):
    """The draft of a command of verl."""

    line: HydraLine

    def chosen(self, name: str, words: Mapping[str, Any], instead: str = "") -> Any:
        """Return what a key's word stands for; refuse one that is not there, and return the first one's meaning."""
        word = str(self.line[name])
        if word not in words:
            text = f"given {word!r}, must be one of {', '.join(words)}"
            self.refuse(name, f"{text}: {instead}" if instead else text)
        return words.get(word, next(iter(words.values())))


def has_critic(line: HydraLine) -> bool:
    return bool(line["algorithm.adv_estimator"] == "gae")


def has_reference(line: HydraLine) -> bool:
    return bool(line["algorithm.use_kl_in_reward"] or line[f"{_ACTOR}.use_kl_loss"])


def idle_parts(line: HydraLine) -> dict[str, str]:
    """Return keys and sections that this run has no use for, whatever their values, with the reasons."""
    idle: dict[str, str] = {}
    if not has_critic(line):
        idle["critic"] = f"algorithm.adv_estimator {line['algorithm.adv_estimator']} has no critic"
    if not has_reference(line):
        idle[_REF] = "there is no reference: use_kl_loss and use_kl_in_reward are false"
    if line[f"{_ROLLOUT}.val_kwargs.temperature"] == 0:
        greedy = "val_kwargs.temperature is 0, so evaluations take the likeliest token"
        idle |= dict.fromkeys((f"{_ROLLOUT}.val_kwargs.top_p", f"{_ROLLOUT}.val_kwargs.top_k"), greedy)
    return idle


def idle_because(line: HydraLine, name: str) -> str | None:
    """Return why this run has no use for a key; None if it has."""
    parts = idle_parts(line).items() if name != "critic.enable" else ()
    return next((because for part, because in parts if name == part or name.startswith(f"{part}.")), None)


def engine_of(draft: VerlDraft) -> str:
    """Return the name of the engine, by `rollout.name` or by our own key."""
    return str(draft.line.own.get("rollout.engine") or ENGINES.get(str(draft.line[f"{_ROLLOUT}.name"]), "vllm"))


# --- where things run -------------------------------------------------------------------------------------------------


def _placement(draft: VerlDraft) -> None:
    """Place all models on the actor's devices. 0 GPUs, or the device cpu, are processes on the CPU."""
    line = draft.line
    nodes, devices = draft.at_least("trainer.nnodes", 1), draft.at_least("trainer.n_gpus_per_node", 0)
    if line["trainer.device"] not in ("cuda", "cpu"):
        draft.refuse("trainer.device", f"given {line['trainer.device']!r}, must be cuda or cpu")
    placed = {"actor": f"{nodes}x{devices}" if _has_devices(draft) else f"cpu*{nodes * max(devices, 1)}"}
    present = {"critic": has_critic(line), "reference": has_reference(line)}
    draft.fields["cluster.component_placement"] = placed | {
        role: "@actor" for role, is_present in (*present.items(), ("rollout", True)) if is_present
    }


def _has_devices(draft: VerlDraft) -> bool:
    return draft.line["trainer.device"] != "cpu" and bool(draft.line["trainer.n_gpus_per_node"])


def _engine(draft: VerlDraft) -> None:
    name, size = f"{_ROLLOUT}.name", f"{_ROLLOUT}.tensor_model_parallel_size"
    if draft.line[name] is None:
        if "rollout.engine" not in draft.line.own:
            draft.missing.append((name, "not set: give vllm, or hf for the engine of transformers"))
    else:
        draft.chosen(name, ENGINES, "the engines are vLLM and transformers (hf)")
    draft.fields["rollout.engine"] = engine_of(draft)
    if engine_of(draft) == "vllm":
        draft.fields["rollout.tensor_parallel_size"] = draft.at_least(size, 1)
    else:
        draft.ignore("the transformers engine runs once on each of the actor's devices", size)


def _engine_arguments(draft: VerlDraft) -> None:
    """Pass on vLLM's own arguments, as far as they are given: verl's defaults change speed alone."""
    line, names = draft.line, [f"{_ROLLOUT}.{name}" for name in VLLM_ARGUMENTS]
    arguments = {name.rpartition(".")[2]: line[name] for name in names if line.has(name) and line[name] is not None}
    arguments |= line.section(f"{_ROLLOUT}.engine_kwargs.vllm")
    if engine_of(draft) != "vllm":
        for name in (*names, f"{_ROLLOUT}.engine_kwargs.vllm"):
            draft.ignore(f"the engine is {engine_of(draft)}", name)
    elif arguments:
        draft.fields["rollout.engine_args"] = arguments


def _offload(draft: VerlDraft) -> None:
    """Offload what a key says is offloaded. Otherwise it is offloaded as needed: false is what scripts write anyway."""
    line, fields = draft.line, draft.fields
    sections = {"actor": f"{_ACTOR}.fsdp_config", "reference": f"{_REF}.fsdp_config", "critic": "critic.fsdp"}
    for role, section in sections.items():
        names = [f"{section}.{leaf}" for leaf in ("param_offload", "optimizer_offload", "offload_policy")]
        because = "parts are offloaded as needed"
        if any(line[name] for name in names):
            fields[f"{role}.enable_offload"] = True
            because = "another key offloads the model between phases"
        for name in names:
            if not line[name]:
                draft.ignore(because, name)
    free = f"{_ROLLOUT}.free_cache_engine"
    if not _has_devices(draft):
        draft.ignore("there are no devices whose memory engines and trainer share", free)
    else:
        fields["rollout.enable_offload"] = line[free]


def _backend(draft: VerlDraft) -> None:
    if draft.line[f"{_ACTOR}.strategy"] not in ("fsdp", "fsdp2"):
        strategy = draft.line[f"{_ACTOR}.strategy"]
        draft.refuse(
            f"{_ACTOR}.strategy",
            f"given {strategy!r}, must be fsdp or fsdp2, which are both FSDP2 here; for DeepSpeed give"
            " hotseat.train.backend=deepspeed",
        )
    draft.fields["train.backend"] = "fsdp"


def _dtype(draft: VerlDraft) -> None:
    kept, used = f"{_ACTOR}.fsdp_config.model_dtype", f"{_ACTOR}.fsdp_config.dtype"
    draft.fields["train.dtype"] = draft.chosen(used, DTYPES)
    is_master = draft.chosen(kept, DTYPES) == "fp32"
    draft.fields["train.fp32_master"] = is_master
    if not is_master and DTYPES.get(str(draft.line[kept])) != draft.fields["train.dtype"]:
        draft.refuse(kept, f"given {draft.line[kept]}, must be fp32 or {draft.line[used]}, which {used} is")


def _sequence_parallelism(draft: VerlDraft) -> None:
    """Take the larger of both keys, as verl does."""
    names = _SEQUENCE_SIZES
    draft.fields["train.sequence_parallel_size"] = max(draft.at_least(name, 1) for name in names)
    for name, other in (names, names[::-1]):
        if draft.line[name] < draft.line[other]:
            draft.ignore(f"{other} is {draft.line[other]}", name)


def _determinism(draft: VerlDraft) -> None:
    names = (f"{_ACTOR}.fsdp_config.full_determinism", f"{_ROLLOUT}.full_determinism")
    draft.fields["train.full_determinism"] = any(draft.line[name] for name in names)
    if draft.line[names[0]] and not draft.line[names[1]]:
        draft.ignore(f"{names[0]} is true, for trainer and engines", names[1])


def _compile(draft: VerlDraft) -> None:
    name = f"{_ACTOR}.use_torch_compile"
    if draft.line[name]:
        draft.ignore("layers are compiled on a GPU wherever there is a compiler", name)
    else:
        draft.fields["train.compile"] = False


def _attention(draft: VerlDraft) -> None:
    name = f"{_MODEL}.override_config.attn_implementation"
    chosen = draft.line[name]
    if chosen is not None and not chosen.startswith("flash_attention"):
        draft.fields["train.attention"] = chosen
    else:
        draft.ignore("attention is torch's own, with its flash kernels on GPUs in 16 bits", name)


# --- models, batches and lengths --------------------------------------------------------------------------------------


def _models(draft: VerlDraft) -> None:
    line = draft.line
    draft.fields["actor.model"] = line[f"{_MODEL}.path"]
    draft.fields["critic.model"] = line["critic.model.path"]
    rank, of_critic = line[f"{_MODEL}.lora_rank"], "critic.model.lora_rank"
    if has_critic(line) and rank > 0 and not line.has(of_critic):
        draft.refuse(
            of_critic,
            f"not given, and {_MODEL}.lora_rank is {rank}: verl would train all weights of the critic, and here both"
            f" have adapters of one rank; give {of_critic}={rank}",
        )
    if has_critic(line) and line["critic.model.path"] is None and "critic.model" not in line.own:
        draft.missing.append(("critic.model.path", "not set, and algorithm.adv_estimator gae needs a critic"))


def _remote_code(draft: VerlDraft) -> None:
    names = (f"{_MODEL}.trust_remote_code", "data.trust_remote_code")
    draft.fields["trust_remote_code"] = any(draft.line[name] for name in names)
    for name, other in (names, names[::-1]):
        if draft.line[other] and not draft.line[name]:
            draft.ignore(f"{other} is true, for model and tokenizer", name)


def _batches(draft: VerlDraft) -> None:
    """Multiply verl's mini-batch, which counts prompts, by the samples of each."""
    line, mini, micro = draft.line, f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    batch, prompts = draft.at_least("data.train_batch_size", 1), draft.at_least(mini, 1)
    samples = prompts * draft.at_least(f"{_ROLLOUT}.n", 1)
    draft.fields["train.batch_size"] = samples
    if batch % prompts:
        draft.refuse(mini, f"given {prompts} prompts, must divide data.train_batch_size, {batch}")
    if "cluster.component_placement" in line.own:
        return
    ranks = _num_ranks(line)
    per_micro = 1 if line[f"{_ACTOR}.use_dynamic_bsz"] else line[micro] or 1
    if samples % (ranks * per_micro):
        draft.refuse(
            mini,
            f"given {prompts} prompts of {samples // prompts} samples, which {ranks} ranks do not share evenly in"
            f" micro-batches of {per_micro}: {ranks * per_micro} must divide {samples}",
        )


def _num_ranks(line: HydraLine) -> int:
    """Return how many ranks of the actor have samples of their own."""
    shared = max(line[name] for name in _SEQUENCE_SIZES)
    return max(line["trainer.nnodes"] * max(line["trainer.n_gpus_per_node"], 1) // max(shared, 1), 1)


def _micro_batches(draft: VerlDraft) -> None:
    for section, dynamic, size, budget in (
        ("train", f"{_ACTOR}.use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
        (
            "rollout",
            f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
            "log_prob_micro_batch_size_per_gpu",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
        ),
    ):
        size = f"{dynamic.rpartition('.')[0]}.{size}"
        if draft.line[dynamic]:
            draft.fields[f"{section}.max_tokens_per_device"] = draft.line[budget]
            draft.ignore(f"{dynamic} is true, so micro-batches are cut by tokens", size)
        else:
            draft.fields[f"{section}.micro_batch_size"] = draft.line[size] or "auto"
            draft.ignore(f"{dynamic} is false", budget)
            if draft.line[size] is None:
                draft.ignore("micro-batches are as large as fits on the device", dynamic)


def _lengths(draft: VerlDraft) -> None:
    prompt, answer = draft.at_least("data.max_prompt_length", 1), draft.at_least("data.max_response_length", 1)
    draft.fields["data.prompt_max_length"] = prompt
    draft.fields["rollout.max_new_tokens"] = answer
    draft.fields["data.max_length"] = prompt + answer


def _optimizer(role: str, section: str) -> Callable[[VerlDraft], None]:
    """Return the function for an optimizer: its schedule, and the one norm of gradients of two keys."""

    def derive(draft: VerlDraft) -> None:
        line, at, optim = draft.line, f"{role}.optimizer", f"{section}.optim"
        names = [f"{optim}.clip_grad", f"{optim}.grad_clip", f"{section}.grad_clip"]
        of_norms = [name for name in names if line.has(name) and line[name] is not None]
        norms = [line[name] for name in of_norms] or [line[names[0]]]
        draft.fields[f"{at}.max_grad_norm"] = norms[0]
        if any(norm != norms[0] for norm in norms):
            draft.refuse(of_norms[-1], f"given {norms[-1]}, and {of_norms[0]} is {norms[0]}: give one of them")
        scheduler = f"{optim}.warmup_style" if line[f"{optim}.warmup_style"] else f"{optim}.lr_scheduler_type"
        if scheduler.endswith("warmup_style"):
            draft.ignore(f"{scheduler} is given", f"{optim}.lr_scheduler_type")
        schedule = draft.chosen(scheduler, {"constant": "constant", "cosine": "cosine"})
        draft.fields[f"{at}.schedule"] = schedule
        draft.fields[f"{at}.warmup_ratio"] = line[f"{optim}.lr_warmup_steps_ratio"]
        draft.fields[f"{at}.min_learning_rate_ratio"] = line[f"{optim}.min_lr_ratio"] or 0.0

    return derive


# --- maths ------------------------------------------------------------------------------------------------------------


def _estimator(draft: VerlDraft) -> None:
    line, fields = draft.line, draft.fields
    fields["algorithm.estimator"] = draft.chosen("algorithm.adv_estimator", ESTIMATORS)
    name = "algorithm.norm_adv_by_std_in_grpo"
    if fields["algorithm.estimator"] == "group_norm":
        fields["algorithm.std_norm"] = line[name]
    else:
        draft.ignore(f"algorithm.adv_estimator is {line['algorithm.adv_estimator']}, not grpo", name)
    # Rewards are clipped by default; verl never clips them.
    fields["reward.clip"] = None


def _idle(draft: VerlDraft) -> None:
    """Note the keys that this run has no use for."""
    for argument in draft.line.arguments.values():
        because = idle_because(draft.line, argument.key.name)
        if because is not None:
            draft.ignored.setdefault(argument.spelling, because)
    if not has_critic(draft.line):
        draft.ignore(idle_parts(draft.line)["critic"], "trainer.critic_warmup")


def _critic(draft: VerlDraft) -> None:
    enable, is_there = draft.line["critic.enable"], has_critic(draft.line)
    estimator = draft.line["algorithm.adv_estimator"]
    if enable is not None and enable != is_there:
        draft.refuse(
            "critic.enable",
            f"given {str(enable).lower()}, and algorithm.adv_estimator {estimator} has"
            f" {'a' if is_there else 'no'} critic: leave it out",
        )
    draft.ignore(f"algorithm.adv_estimator {estimator} says it", "critic.enable")


def _clip(draft: VerlDraft) -> None:
    """Clip by the lower and upper range, which verl's defaults set; by `clip_ratio` only where one of them is null."""
    line, sides = draft.line, {"low": f"{_ACTOR}.clip_ratio_low", "high": f"{_ACTOR}.clip_ratio_high"}
    both, is_used = f"{_ACTOR}.clip_ratio", False
    for side, name in sides.items():
        value = line[name]
        is_used |= value is None
        draft.fields[f"algorithm.clip_{side}"] = line[both] if value is None else value
    if not is_used:
        draft.ignore("clip_ratio_low and clip_ratio_high are set, by verl's defaults to 0.2: give those", both)


def _loss(draft: VerlDraft) -> None:
    """Set policy loss and aggregation. verl's gspo has no dual clip and always the mean of sequences."""
    line, fields = draft.line, draft.fields
    mode, how = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.loss_agg_mode"
    scale, dual = f"{_ACTOR}.loss_scale_factor", f"{_ACTOR}.clip_ratio_c"
    loss = draft.chosen(mode, LOSSES)
    fields["algorithm.policy_loss"] = loss
    fields["algorithm.dual_clip"] = line[dual] if loss == "ppo" else None
    if loss != "ppo":
        draft.ignore(f"{mode} is {line[mode]}, which has no dual clip", dual)
    fields["algorithm.aggregation"] = "sequence_mean" if loss == "gspo" else draft.chosen(how, AGGREGATIONS)
    if loss == "gspo":
        draft.ignore(f"{mode} is gspo, whose loss is the mean of its sequences' means", how)
    if fields["algorithm.aggregation"] != "constant":
        draft.ignore(f"{how} is {line[how]}", scale)
    elif line[scale] not in (None, line["data.max_response_length"]):
        text = "the constant is the length of the longest answer: give data.max_response_length, or null"
        draft.refuse(scale, f"given {line[scale]}: {text}")


def _entropy(draft: VerlDraft) -> None:
    """Compute the entropy only where it is asked for: verl's coefficient is 0 by default."""
    coefficient, only = f"{_ACTOR}.entropy_coeff", f"{_ACTOR}.calculate_entropy"
    if draft.line[coefficient]:
        draft.ignore(f"{coefficient} is not 0, so the entropy is computed in any case", only)
    is_computed = draft.line[coefficient] or draft.line[only]
    draft.fields["algorithm.entropy_coef"] = float(draft.line[coefficient]) if is_computed else None
    if not is_computed:
        for name in (coefficient, only):
            draft.ignore(f"{coefficient} is 0, so there is no bonus, and the entropy is not computed", name)


def _kl(draft: VerlDraft) -> None:
    line, fields = draft.line, draft.fields
    in_reward, as_loss = "algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss"
    of_reward = ["algorithm.kl_penalty", *(f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "type"))]
    of_target = [f"algorithm.kl_ctrl.{name}" for name in ("target_kl", "horizon")]
    of_loss = [f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"]
    if line[in_reward] and line[as_loss]:
        draft.refuse(
            in_reward, f"given true, and {as_loss} is true: the KL is in the reward or in the loss, not in both"
        )
    if not line[in_reward]:
        for name in (*of_reward, *of_target):
            draft.ignore(f"{in_reward} is false", name)
    if not line[as_loss]:
        for name in of_loss:
            draft.ignore(f"{as_loss} is false", name)
    fields["algorithm.kl.coef"] = 0.0
    if line[in_reward]:
        fields["algorithm.kl.coef"] = line["algorithm.kl_ctrl.kl_coef"]
        fields["algorithm.kl.estimator"] = draft.chosen("algorithm.kl_penalty", KL_ESTIMATORS)
        if draft.chosen("algorithm.kl_ctrl.type", {"fixed": False, "adaptive": True}):
            fields["algorithm.kl.target"] = line["algorithm.kl_ctrl.target_kl"]
            fields["algorithm.kl.horizon"] = line["algorithm.kl_ctrl.horizon"]
        else:
            for name in of_target:
                draft.ignore("algorithm.kl_ctrl.type is fixed", name)
    elif line[as_loss]:
        fields["algorithm.kl.coef"] = line[of_loss[0]]
        fields["algorithm.kl.as_loss"] = True
        fields["algorithm.kl.estimator"] = draft.chosen(of_loss[1], KL_ESTIMATORS)
        if fields["algorithm.kl.estimator"] == "k1":
            fields["algorithm.kl.allow_k1_loss"] = True


def _correction(draft: VerlDraft) -> None:
    """Set the correction of the gap between engine and trainer. One threshold caps weights, two drop those outside."""
    line, fields = draft.line, draft.fields
    at = "algorithm.rollout_correction"
    weights, bounds = f"{at}.rollout_is", f"{at}.rollout_is_threshold"
    if line[weights] is None:
        draft.ignore(f"{weights} is null", bounds)
        draft.ignore(f"{weights} is null", f"{at}.rollout_is_batch_normalize")
    else:
        capped, dropped = draft.chosen(weights, CORRECTIONS)
        low, high = _bounds(draft, bounds)
        fields["algorithm.correction.kind"] = capped if low is None else dropped
        fields["algorithm.correction.low"], fields["algorithm.correction.high"] = low or 0.0, high
    rejects, limits = f"{at}.rollout_rs", f"{at}.rollout_rs_threshold"
    if line[rejects] is None:
        draft.ignore(f"{rejects} is null", limits)
        return
    fields["algorithm.correction.reject"] = draft.chosen(rejects, REJECTIONS)
    if line[limits] is None:
        draft.refuse(rejects, f"given {line[rejects]}, and {limits} is null: give a number, or for k1 LOW_HIGH")
        return
    low, high = _bounds(draft, limits)
    fields["algorithm.correction.reject_high"] = high
    if low is not None:
        fields["algorithm.correction.reject_low"] = low


def _bounds(draft: VerlDraft, name: str) -> tuple[float | None, float]:
    """Return (low, high) of a threshold, which is one number, or two joined by `_`."""
    threshold = draft.line[name]
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
        if len(numbers) > 2:
            raise ValueError
    except ValueError:
        draft.refuse(name, f"given {threshold!r}, must be a number, or two joined by _, such as 0.5_5.0")
        numbers = [1.0]
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


# --- data -------------------------------------------------------------------------------------------------------------


def paths_of(draft: VerlDraft, name: str) -> str | None:
    """Return the files of a key, joined by commas."""
    value = draft.line[name]
    paths = [str(path) for path in (value if isinstance(value, list) else [] if value is None else [value])]
    for path in paths:
        if "," in path:
            draft.refuse(name, f"given {path!r}: no name of a file may have a comma; several are a list, [a, b]")
        elif path.startswith(("hdfs://", "s3://", "gs://")):
            draft.refuse(name, f"given {path!r}: files are read from mounted folders; copy it to one")
    return ",".join(paths) or None


def _files(draft: VerlDraft) -> None:
    """Set the data. Where it is evaluated at all, it is before the first step and after the last one."""
    line, fields = draft.line, draft.fields
    fields["data.path"] = paths_of(draft, "data.train_files")
    fields["data.apply_chat_template"] = True
    every, first = "trainer.test_freq", "trainer.val_before_train"
    files = paths_of(draft, "data.val_files")
    if files is None:
        for name in (every, first):
            draft.ignore("data.val_files is null, so nothing is evaluated", name)
    elif line[every] <= 0 and not line[first]:
        draft.ignore(f"{every} is {line[every]} and {first} is false, so nothing is evaluated", "data.val_files")
    else:
        fields["eval.path"] = files
        fields["eval.every"] = above_zero(line[every])
        draft.ignore("what is evaluated at all is also evaluated before the first step", first)
        if line[every] <= 0:
            draft.ignore("nothing is evaluated in between", every)


def _overlong_prompts(draft: VerlDraft) -> None:
    """Drop prompts that are too long, or refuse data that has one. Prompts are never cut."""
    drops, cut = draft.line["data.filter_overlong_prompts"], draft.line["data.truncation"]
    draft.fields["data.max_lost_fraction"] = 1.0 if drops else 0.0
    if drops:
        draft.ignore("data.filter_overlong_prompts is true, so no prompt is too long", "data.truncation")
    elif cut != "error":
        draft.refuse(
            "data.truncation",
            f"given {cut!r}: prompts are not cut; give error, or data.filter_overlong_prompts=true to drop long ones",
        )


def _images(draft: VerlDraft) -> None:
    """Take images from the data where the command names their column: that of verl's default may be absent."""
    most = f"{_ROLLOUT}.limit_images"
    if draft.line.has("data.image_key") and draft.line["data.image_key"] is not None:
        draft.fields["data.image_key"] = draft.line["data.image_key"]
        draft.fields["data.max_images_per_prompt"] = 1 if draft.line[most] is None else draft.at_least(most, 1)
    else:
        draft.ignore("data.image_key is not given, so prompts are texts", most)
        draft.ignore("it is null, so prompts are texts", "data.image_key")


# --- rewards ----------------------------------------------------------------------------------------------------------


def _reward(draft: VerlDraft) -> None:
    line, fields = draft.line, draft.fields
    path, name = line["reward.custom_reward_function.path"], "reward.custom_reward_function.name"
    kwargs, built_in = "reward.custom_reward_function.reward_kwargs", "reward.compute_score_kwargs"
    own = [key for key in _REWARD_SOURCES if line.own.get(key)]
    if own:
        for each in ("reward.custom_reward_function.path", name, kwargs, built_in):
            draft.ignore(f"hotseat.{own[0]} says where rewards come from", each)
    elif path is None:
        fields["reward.function"] = BUILT_IN_REWARD
        fields["reward.kwargs"] = line.section(built_in)
        for each in (name, kwargs):
            draft.ignore("reward.custom_reward_function.path is null, so verl's scoring by data_source is used", each)
    else:
        if not str(path).endswith(".py"):
            draft.refuse("reward.custom_reward_function.path", f"given {path!r}, must be a Python file, FILE.py")
        fields["reward.function"] = f"{path}:{line[name] or 'compute_score'}"
        fields["reward.kwargs"] = line.section(kwargs)
        draft.ignore("reward.custom_reward_function.path is given", built_in)


def _overlong_answers(draft: VerlDraft) -> None:
    """Set DAPO's penalty on long answers, which verl has in its reward manager dapo."""
    line, fields = draft.line, draft.fields
    manager, at = "reward.reward_manager.name", "reward.reward_kwargs.overlong_buffer_cfg"
    words = {"naive": False, "None": False, "dapo": True}
    has_penalty = draft.chosen(manager, words, "give your function as reward.custom_reward_function.path")
    if has_penalty and line[f"{at}.enable"]:
        fields["reward.overlong.buffer_length"] = draft.at_least(f"{at}.len", 1)
        fields["reward.overlong.penalty_factor"] = line[f"{at}.penalty_factor"]
        return
    because = f"{at}.enable is false" if has_penalty else f"{manager} is {line[manager]}, not dapo"
    for leaf in ("enable", "len", "penalty_factor"):
        draft.ignore(because, f"{at}.{leaf}")
    draft.ignore("a function scores each answer, and no penalty is added", manager)


# --- checkpoints and logs ---------------------------------------------------------------------------------------------


def _checkpoints(draft: VerlDraft) -> None:
    """Save only with `save_freq`, as verl does, and keep all unless told otherwise."""
    line, fields = draft.line, draft.fields
    every, kept, contents = "trainer.save_freq", "trainer.max_actor_ckpt_to_keep", f"{_ACTOR}.checkpoint.save_contents"
    fields["checkpoint.every"] = above_zero(line[every])
    if line[every] <= 0:
        fields["checkpoint.every_minutes"] = 0.0
        draft.ignore("it is not above 0, so no checkpoint is made", every)
    fields["checkpoint.keep_last"] = MANY if line[kept] is None else draft.at_least(kept, 1)
    text = "give auto, with the folder of the checkpoints as trainer.default_local_dir"
    fields["checkpoint.resume"] = draft.chosen("trainer.resume_mode", {"auto": True, "disable": False}, text)
    listed = line[contents] if isinstance(line[contents], list) else [line[contents]]
    states, models = {"model", "optimizer", "extra"}, {"hf_model"}
    if not (set(listed) == models or states <= set(listed) <= states | models):
        fits = "[model, optimizer, extra], [model, optimizer, extra, hf_model] or [hf_model]"
        draft.refuse(contents, f"given [{', '.join(map(str, listed))}], must be {fits}")
    fields["checkpoint.export_each"] = "hf_model" in listed
    fields["checkpoint.save_state"] = set(listed) != models


def _trackers(draft: VerlDraft) -> None:
    """Turn on trackers, and name the run at them. Console, TensorBoard's files and metric files are always there."""
    line, fields = draft.line, draft.fields
    loggers = line["trainer.logger"] if isinstance(line["trainer.logger"], list) else [line["trainer.logger"]]
    for name in loggers:
        if name not in (*TRACKERS, *_ALWAYS_WRITTEN):
            known = ", ".join((*_ALWAYS_WRITTEN, *TRACKERS))
            draft.refuse("trainer.logger", f"given {name!r}, must be one of {known}")
    for name in TRACKERS:
        if name not in loggers:
            continue
        fields[f"log.{name}.enabled"] = True
        fields[f"log.{name}.{'experiment' if name == 'mlflow' else 'project'}"] = line["trainer.project_name"]
        fields[f"log.{name}.run_name"] = line["trainer.experiment_name"]


DERIVED: Mapping[str, Callable[[VerlDraft], None]] = {
    "keys without use": _idle,
    "placement": _placement,
    "engine": _engine,
    "engine arguments": _engine_arguments,
    "offload": _offload,
    "backend": _backend,
    "dtype": _dtype,
    "sequence parallelism": _sequence_parallelism,
    "determinism": _determinism,
    "compile": _compile,
    "attention": _attention,
    "models": _models,
    "remote code": _remote_code,
    "batches": _batches,
    "micro-batches": _micro_batches,
    "lengths": _lengths,
    "actor optimizer": _optimizer("actor", _ACTOR),
    "critic optimizer": _optimizer("critic", "critic"),
    "estimator": _estimator,
    "critic": _critic,
    "clip": _clip,
    "loss": _loss,
    "entropy": _entropy,
    "kl": _kl,
    "correction": _correction,
    "files": _files,
    "overlong prompts": _overlong_prompts,
    "images": _images,
    "reward": _reward,
    "overlong answers": _overlong_answers,
    "checkpoints": _checkpoints,
    "trackers": _trackers,
}
