"""Config fields that depend on several flags, or on more than a flag's own value.

Each function takes the draft, sets fields and notes flags without effect. `DERIVED` names them for the table of flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hotseat.openrlhf.argv import CommandLine
from hotseat.openrlhf.config_draft import (
    ConfigDraft,
    engine_of,
    has_critic,
    has_reference,
    has_reward_model,
    no_critic,
    reward_source,
    shares_with_rollout,
)
from hotseat.openrlhf.flags import SCHEDULES

QUEUE_VARIABLE = "OPENRLHF_ASYNC_QUEUE_SIZE"
# In scripts written for OpenRLHF; said once, so that nobody looks for their effect.
VARIABLES_WITHOUT_EFFECT = {
    "VLLM_USE_V1": "the versions of vLLM that run here have no other engine",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "the process that reads it here uses no device",
}
TASKS_VARIABLE = "OPENRLHF_ASYNC_NUM_TASKS"
WANDB_VARIABLE = "WANDB_API_KEY"


# --- placement --------------------------------------------------------------------------------------------------------

_ROLES = {"critic": "critic", "ref": "reference", "reward": "reward"}  # flag prefix -> role


def _placement(draft: ConfigDraft) -> None:
    line = draft.line
    if draft.task != "rl":
        # With adapters and no model of its own, the reference is the actor without them.
        is_compared = draft.task == "dpo" and (not line["--lora_rank"] or line.has("--ref_pretrain"))
        placed = {"actor": "all"} | ({"reference": "@actor"} if is_compared else {})
        draft.fields["cluster.component_placement"] = placed
        return
    shares_all = line["--colocate_all_models"]
    present = {"critic": has_critic(line), "ref": has_reference(line), "reward": has_reward_model(line)}
    absent = {
        "critic": no_critic(draft),
        "ref": f"{draft.named('--init_kl_coef')} is 0, so there is no reference model",
        "reward": "rewards do not come from a model",
    }
    host: dict[str, str | None] = dict.fromkeys(_ROLES, "actor" if shares_all else None)
    if not shares_all and line["--colocate_actor_ref"]:
        host["ref"] = "actor"
    if not shares_all and line["--colocate_critic_reward"] and present["critic"]:
        host["reward"] = "critic"
    _note_pairs(draft, present, absent)

    placed = {"actor": _block(draft, "actor")}
    for prefix, role in _ROLES.items():
        sizes = (f"--{prefix}_num_nodes", f"--{prefix}_num_gpus_per_node")
        if not present[prefix]:
            draft.ignore(absent[prefix], *sizes)
        elif host[prefix]:
            draft.ignore(f"the {role} uses the {host[prefix]}'s devices", *sizes)
        if present[prefix]:
            placed[role] = f"@{host[prefix]}" if host[prefix] else _block(draft, prefix)
    placed["rollout"] = _rollout(draft)
    draft.fields["cluster.component_placement"] = placed


def _note_pairs(draft: ConfigDraft, present: Mapping[str, bool], absent: Mapping[str, str]) -> None:
    pairs = {"--colocate_actor_ref": ("ref",), "--colocate_critic_reward": ("critic", "reward")}
    for name, prefixes in pairs.items():
        if draft.line["--colocate_all_models"]:
            draft.ignore(f"{draft.named('--colocate_all_models')} says so already", name)
        for prefix in prefixes:
            if not present[prefix]:
                draft.ignore(absent[prefix], name)


def _block(draft: ConfigDraft, prefix: str) -> str:
    """Return the selection N nodes x G devices; 0 devices are CPU processes, one per node (not in OpenRLHF)."""
    nodes = draft.at_least(f"--{prefix}_num_nodes", 1)
    devices = draft.at_least(f"--{prefix}_num_gpus_per_node", 0)
    return f"{nodes}x{devices}" if devices else f"cpu*{nodes}"


def _rollout(draft: ConfigDraft) -> str:
    line, fields = draft.line, draft.fields
    engines = draft.at_least("--vllm_num_engines", 0) if line["--vllm_num_engines"] is not None else 0
    size = draft.at_least("--vllm_tensor_parallel_size", 1)
    shares = shares_with_rollout(line)
    if engine_of(line) == "vllm" or size == 1:
        fields["rollout.num_engines"] = engines or None
        fields["rollout.tensor_parallel_size"] = size
    elif shares:
        # The engines share the actor's devices, and each device has one.
        because = "the transformers engine runs once on each of the actor's devices"
        draft.ignore(because, "--vllm_num_engines", "--vllm_tensor_parallel_size")
    if line["--async_train"] and not engines:
        needs = f"not set, and {draft.named('--async_train')} needs engines on devices of their own"
        draft.missing.append((draft.named("--vllm_num_engines"), needs))
    if shares:
        return "@actor"
    return f"{engines}x{size}" if line["--actor_num_gpus_per_node"] else f"cpu*{engines}"


def _offload(draft: ConfigDraft) -> None:
    """Set offloading where a switch is on; otherwise the planner decides what is offloaded."""
    line, fields = draft.line, draft.fields

    def is_on(name: str) -> bool:
        return line.knows(name) and bool(line[name])

    if is_on("--deepspeed_enable_sleep"):
        fields["actor.enable_offload"] = fields["critic.enable_offload"] = True
    if is_on("--ref_reward_offload") or is_on("--ref.offload") or is_on("--ref_offload"):
        fields["reference.enable_offload"] = True
    if is_on("--ref_reward_offload") or is_on("--reward.offload"):
        fields["reward.enable_offload"] = True
    if is_on("--vllm_enable_sleep"):
        if shares_with_rollout(line):
            fields["rollout.enable_offload"] = True
        else:
            draft.ignore("the engines have devices of their own", "--vllm_enable_sleep")


def _engine_choice(draft: ConfigDraft) -> None:
    draft.fields["rollout.engine"] = engine_of(draft.line) if draft.task == "rl" else draft.line["--engine"]
    for variable, because in VARIABLES_WITHOUT_EFFECT.items():
        if draft.task == "rl" and draft.env.get(variable):
            draft.ignored.setdefault(variable, because)


def _overlap(draft: ConfigDraft) -> None:
    """Set queue and staleness: with a queue of n batches, a sample is up to n weight versions old.

    A batch takes a place in OpenRLHF's queue before it is generated and gives it back when training takes it. So while
    one batch is trained, n others wait or are generated, and the newest of them is trained n versions later.

    `--vllm_generate_batch_size` makes places of the queue larger: with prompts for k batches in each, n k batches wait
    or are generated while k are trained, so that the newest is trained up to (n + 1) k - 1 versions later.

    A partial rollout on shared devices, without `--async_train`: open answers wait while the devices train.
    """
    line = draft.line
    tasks = draft.number_from(TASKS_VARIABLE)
    if tasks is not None:
        draft.fields["agent.max_concurrent"] = tasks
    batches = _batches_generated(draft)
    if not line["--async_train"]:
        because = f"{draft.named('--async_train')} is not given"
        draft.ignore(because, "--async_queue_size")
        if line["--partial_rollout"] and shares_with_rollout(line):
            draft.fields |= {"overlap.staleness": 1, "overlap.order": "arrival", "overlap.in_flight": "recompute"}
        else:
            draft.ignore(because, "--partial_rollout")
        if draft.env.get(QUEUE_VARIABLE):
            draft.ignored.setdefault(QUEUE_VARIABLE, because)
        return
    queue = draft.at_least("--async_queue_size", 1)
    if line.has("--async_queue_size") and draft.env.get(QUEUE_VARIABLE):
        draft.ignored.setdefault(QUEUE_VARIABLE, f"{draft.named('--async_queue_size')} is given")
    elif not line.has("--async_queue_size"):
        queue = draft.number_from(QUEUE_VARIABLE) or queue
    draft.fields["overlap.queue"] = queue * batches - 1
    draft.fields["overlap.staleness"] = (queue + 1) * batches - 1
    if line["--partial_rollout"]:
        draft.fields["overlap.order"] = "arrival"
        draft.fields["overlap.in_flight"] = "recompute" if engine_of(line) == "vllm" else "keep"


def _batches_generated(draft: ConfigDraft) -> int:
    """Return for how many batches prompts are generated at a time, rounded up."""
    size, batch_size = draft.line["--vllm_generate_batch_size"], draft.line["--rollout_batch_size"]
    if size is None or size == batch_size:
        return 1
    if size < batch_size:
        draft.refuse(
            "--vllm_generate_batch_size", f"{size} is below {draft.named('--rollout_batch_size')}, {batch_size}"
        )
    elif not draft.line["--async_train"]:
        draft.refuse(
            "--vllm_generate_batch_size",
            f"{size} is above {draft.named('--rollout_batch_size')}, {batch_size}: sampling ahead of training takes"
            f" {draft.named('--async_train')}",
        )
    return -(-size // batch_size)


# --- models and rewards -----------------------------------------------------------------------------------------------


def _critic(draft: ConfigDraft) -> None:
    model = draft.line["--critic_pretrain"]
    if model == "None" and has_critic(draft.line):
        estimator = draft.named("--advantage_estimator")
        draft.refuse("--critic_pretrain", f"None is no critic, and {estimator} gae needs one: choose another estimator")
    draft.fields["critic.model"] = model


def _reward(draft: ConfigDraft) -> None:
    line, fields = draft.line, draft.fields
    source = reward_source(line)
    if source == "--agent_func_path" and line["--remote_rm_url"]:
        source = "--remote_rm_url"  # scores the episodes to which the agent gives no reward
    for name in ("--remote_rm_url", "--reward_pretrain"):
        if source is not None and source != name:
            decides = reward_source(line) or source
            draft.ignore(f"rewards come from {draft.named(decides)}", name)
    if source == "--reward_pretrain":
        fields["reward.model"] = line[source]
    if source != "--remote_rm_url":
        return
    places = [place.strip() for place in line[source].split(",")]
    if all(place.startswith(("http://", "https://")) for place in places):
        fields["reward.url"] = places[0] if len(places) == 1 else places
    elif len(places) == 1 and places[0].endswith(".py"):
        fields["reward.function"] = places[0]
    else:
        draft.refuse(
            source,
            f"given {line[source]!r}, must be one .py file, or addresses that begin with http:// or https://, joined by"
            " commas",
        )


def _chosen_dtype(line: CommandLine) -> str:
    is_bf16 = line["--bf16"] and not line.has("--param_dtype")
    return "bf16" if is_bf16 else str(line["--param_dtype"] or "fp32")


def _dtype(draft: ConfigDraft) -> None:
    if draft.line.has("--param_dtype"):
        draft.ignore(f"{draft.named('--param_dtype')} is given", "--bf16")
    draft.fields["train.dtype"] = _chosen_dtype(draft.line)


def _checkpoints(draft: ConfigDraft) -> None:
    """Save checkpoints only with --save_steps, as OpenRLHF does, and none by time: one folder may serve many runs."""
    steps = draft.line["--save_steps"]
    draft.fields["checkpoint.every"] = None if steps == -1 else steps
    if steps == -1:
        draft.fields["checkpoint.every_minutes"] = 0.0


def _attention(draft: ConfigDraft) -> None:
    """Pass on a choice of attention, except for flash attention, which follows from the device, dtype and packing."""
    line = draft.line
    chosen = line["--attn_implementation"]
    if chosen is not None and not chosen.startswith("flash_attention"):
        draft.fields["train.attention"] = chosen
        draft.ignore(f"{draft.named('--attn_implementation')} is {chosen}", "--flash_attn")
        return
    if _chosen_dtype(line) == "fp32":
        happens = "training is in fp32, for which torch has no flash attention: it uses another kernel; --bf16 has one"
    elif _is_packed(draft):
        happens = "on GPUs packed sequences go through torch's flash attention in any case; on CPUs there is none"
    else:
        happens = (
            f"{draft.named('--packing_samples')} is not given: rows are padded, and torch chooses the kernel of its"
            " scaled_dot_product_attention, on GPUs a flash kernel"
        )
    draft.ignore(happens, "--attn_implementation", "--flash_attn")


def _template(draft: ConfigDraft) -> None:
    template = draft.line["--input_template"]
    if template is not None and "{}" not in template:
        draft.ignore("it has no {} for the prompt, which goes without a template", "--input_template")
        template = None
    draft.fields["data.input_template"] = template


def _images(draft: ConfigDraft) -> None:
    count = draft.line["--max_images_per_prompt"]
    if count:
        draft.fields["data.image_key"] = draft.line["--image_key"] or "images"
        draft.fields["data.max_images_per_prompt"] = count
        draft.fields["train.freeze_visual_encoder"] = draft.line["--freeze_visual_encoder"]
    else:
        draft.ignore(f"{draft.named('--max_images_per_prompt')} is 0", "--image_key", "--freeze_visual_encoder")


# --- batches and lengths ----------------------------------------------------------------------------------------------


def _is_packed(draft: ConfigDraft) -> bool:
    """Return whether sequences are packed, which dynamic batches and sequence parallelism imply, as in OpenRLHF."""
    line = draft.line
    is_dynamic = draft.task == "rl" and bool(line["--use_dynamic_batch"])
    return bool(line["--packing_samples"] or is_dynamic or line["--ring_attn_size"] > 1)


def _micro_batches(draft: ConfigDraft) -> None:
    """Set token budgets and packing."""
    line, fields = draft.line, draft.fields
    fields["train.packing"] = _is_packed(draft)
    if draft.task != "rl":
        return
    if line["--use_dynamic_batch"]:
        budget = line["--train_max_tokens_per_gpu"]
        fields["train.max_tokens_per_device"] = budget
        fields["rollout.max_tokens_per_device"] = line["--rollout_max_tokens_per_gpu"] or budget
        return
    because = f"{draft.named('--use_dynamic_batch')} is not given"
    draft.ignore(because, "--train_max_tokens_per_gpu", "--rollout_max_tokens_per_gpu")


def _lengths(draft: ConfigDraft) -> None:
    line, fields = draft.line, draft.fields
    prompt, new, both = line["--prompt_max_len"], line["--generate_max_len"], line["--max_len"]
    fields["data.prompt_max_length"] = prompt
    fields["rollout.max_new_tokens"] = new
    if line["--agent_func_path"]:
        fields["agent.turn_length"] = "rest"  # OpenRLHF's executors give a turn all that --max_len leaves
    fields["data.max_length"] = both if both is not None else prompt + new


# --- maths ------------------------------------------------------------------------------------------------------------


def _clip(draft: ConfigDraft) -> None:
    line = draft.line
    low = high = line["--eps_clip"]
    if line["--eps_clip_low_high"] is not None:
        low, high = line["--eps_clip_low_high"]
        draft.ignore(f"{draft.named('--eps_clip_low_high')} is given", "--eps_clip")
    if line.has("--clip_eps_low") and line.has("--clip_eps_high"):
        draft.ignore("--clip_eps_low and --clip_eps_high are given", "--eps_clip", "--eps_clip_low_high")
    draft.fields["algorithm.clip_low"] = line["--clip_eps_low"] if line.has("--clip_eps_low") else low
    draft.fields["algorithm.clip_high"] = line["--clip_eps_high"] if line.has("--clip_eps_high") else high


def _estimator(draft: ConfigDraft) -> None:
    """Set the estimator. OpenRLHF's dr_grpo keeps the mean over tokens, where the paper divides by a constant.

    OpenRLHF's switch drops the deviation of the batch. Its group_norm divides by the group's, with and without it.
    """
    estimator, fields = draft.line["--advantage_estimator"], draft.fields
    fields["algorithm.estimator"] = estimator
    if estimator == "dr_grpo" and draft.line["--policy_loss_type"] == "ppo":
        fields["algorithm.aggregation"] = "token_mean"
    if estimator == "group_norm":
        always = f"{draft.named('--advantage_estimator')} group_norm divides by the group's deviation in any case"
        draft.ignore(f"{always}, as in OpenRLHF; dr_grpo does not divide", "--no_advantage_std_norm")
    elif draft.line["--no_advantage_std_norm"]:
        fields["algorithm.std_norm"] = False


def _kl(draft: ConfigDraft) -> None:
    """Set the KL estimator. OpenRLHF's default k1 is allowed as a loss for its commands; the run warns of it."""
    line, fields = draft.line, draft.fields
    estimator = line["--kl_estimator"]
    is_k1 = estimator == "k1"
    fields["algorithm.kl.estimator"] = None if is_k1 and not line["--use_kl_loss"] else estimator
    if is_k1 and line["--use_kl_loss"]:
        fields["algorithm.kl.allow_k1_loss"] = True


def _correction(draft: ConfigDraft) -> None:
    """Set the off-policy correction. One threshold is OpenRLHF 0.8's cap without a lower bound; newer ones have two.

    GSPO uses its ratio to the engine's probabilities instead, whatever the type and the thresholds.
    """
    line, fields = draft.line, draft.fields
    details = ("--vllm_is_correction_type", "--vllm_is_truncated_threshold")
    threshold = line[details[1]]
    if not line["--enable_vllm_is_correction"]:
        draft.ignore(f"{draft.named('--enable_vllm_is_correction')} is not given", *details)
        return
    if line["--policy_loss_type"] == "gspo":
        fields["algorithm.correction.kind"] = "rollout-ratio"
        draft.ignore("gspo takes its ratio to the engine's probabilities, as OpenRLHF does", *details)
        return
    if threshold is None:
        threshold = [0.5, 5.0] if line.is_newer or line.has("--vllm_is_correction_type") else [2.0]
    fields["algorithm.correction.kind"] = line["--vllm_is_correction_type"] or "tis"
    fields["algorithm.correction.low"], fields["algorithm.correction.high"] = [0.0, *threshold][-2:]


def _filtering(draft: ConfigDraft) -> None:
    low, high = draft.line["--dynamic_filtering_reward_range"]
    draft.fields["algorithm.filtering.low"], draft.fields["algorithm.filtering.high"] = low, high


def _schedule(draft: ConfigDraft) -> None:
    """Translate the names of transformers' schedules, for the actor and, in RL, the critic."""
    line = draft.line

    def chosen(role: str, name: str) -> str:
        own = f"--{role}.{name}"
        return line.last_of(own, f"--{name}") if line.knows(own) else f"--{name}"

    unused: dict[str, str] = {}
    used: set[str] = set()
    for role in ("actor", "critic") if draft.task == "rl" and has_critic(line) else ("actor",):
        scheduler = chosen(role, "lr_scheduler")
        if line[scheduler] not in SCHEDULES:
            draft.refuse(scheduler, f"given {line[scheduler]!r}, must be one of {', '.join(SCHEDULES)}")
            continue
        kind, has_least, warms_up = SCHEDULES[line[scheduler]]
        warmup, least = chosen(role, "lr_warmup_ratio"), chosen(role, "min_lr_ratio")
        at = f"{role}.optimizer"
        draft.fields[f"{at}.schedule"] = kind
        draft.fields[f"{at}.warmup_ratio"] = line[warmup] if warms_up else 0.0
        draft.fields[f"{at}.min_learning_rate_ratio"] = line[least] if has_least else 0.0
        for name, is_used in ((warmup, warms_up), (least, has_least)):
            if is_used:
                used.add(name)
            unused[name] = f"{draft.named(scheduler)} is {line[scheduler]}"
    for name in unused.keys() - used:
        draft.ignore(unused[name], name)
    if draft.task == "rl" and not has_critic(line):
        draft.ignore(no_critic(draft), "--critic.lr_scheduler", "--critic.lr_warmup_ratio", "--critic.min_lr_ratio")


def _wandb(draft: ConfigDraft) -> None:
    """Turn on W&B. A key goes only into this process's environment, where one that is set already takes precedence."""
    key = draft.line["--use_wandb"]
    if key is None:
        return
    draft.fields["log.wandb.enabled"] = True
    if draft.env.get(WANDB_VARIABLE, key) != key:
        draft.ignored.setdefault(f"the key given to {draft.named('--use_wandb')}", f"{WANDB_VARIABLE} is set already")
    elif key.lower() not in ("true", "1", "yes"):
        draft.secrets[WANDB_VARIABLE] = key


DERIVED: Mapping[str, Callable[[ConfigDraft], None]] = {
    "engine": _engine_choice,
    "placement": _placement,
    "offload": _offload,
    "overlap": _overlap,
    "critic": _critic,
    "reward": _reward,
    "dtype": _dtype,
    "checkpoints": _checkpoints,
    "attention": _attention,
    "template": _template,
    "images": _images,
    "micro_batches": _micro_batches,
    "lengths": _lengths,
    "clip": _clip,
    "estimator": _estimator,
    "kl": _kl,
    "correction": _correction,
    "filtering": _filtering,
    "schedule": _schedule,
    "wandb": _wandb,
}
