"""The text of `--help` of OpenRLHF's commands: an example, then every flag in groups.

A flag is in the group of the config fields that it sets. Flags without effect here, and those of features that are not
built yet, have groups of their own at the end.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from hotseat.config.unsupported import UNSUPPORTED
from hotseat.openrlhf.flag import MANY, SAME, UNBOUNDED, Flag
from hotseat.openrlhf.flags import COMMANDS

WIDTH = 100
EXAMPLES: Mapping[str, str] = {
    "train_ppo_ray": """\
python -m hotseat.cli.train_ppo_ray --pretrain my/model --prompt_data prompts.jsonl --label_key label \\
  --remote_rm_url reward.py --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 \\
  --colocate_all_models --actor_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_enable_sleep""",
    "train_sft": """\
python -m hotseat.cli.train_sft --pretrain my/model --dataset examples.jsonl \\
  --input_key question --output_key answer --apply_chat_template --max_len 2048 \\
  --train_batch_size 128 --learning_rate 5e-6 --save_path my_sft_model""",
    "train_rm": """\
python -m hotseat.cli.train_rm --pretrain my/model --dataset pairs.jsonl \\
  --prompt_key prompt --chosen_key chosen --rejected_key rejected --apply_chat_template \\
  --train_batch_size 128 --learning_rate 9e-6 --save_path my_reward_model""",
    "train_dpo": """\
python -m hotseat.cli.train_dpo --pretrain my/model --dataset pairs.jsonl \\
  --prompt_key prompt --chosen_key chosen --rejected_key rejected --apply_chat_template \\
  --beta 0.1 --learning_rate 5e-7 --print_config""",
}

_SIZES = {
    f"--{flag}_num_{unit}": f"{words} of the {role}."
    for flag, role in (("actor", "actor"), ("critic", "critic"), ("ref", "reference"), ("reward", "reward model"))
    for unit, words in (("nodes", "Nodes"), ("gpus_per_node", "Devices on each node"))
}
# Meanings of flags that differ from the meaning of the field that they set.
MEANINGS: Mapping[str, str] = {
    **_SIZES,
    "--colocate_actor_ref": "The reference is on the actor's devices.",
    "--colocate_critic_reward": "The reward model is on the critic's devices.",
    "--colocate_all_models": "All models are on the actor's devices, and so are the engines.",
    "--vllm_num_engines": "Number of engines.",
    "--vllm_tensor_parallel_size": "Devices that share an engine's weights.",
    "--remote_rm_url": "A Python file with `reward_func(queries, prompts, labels)`, or the address of a reward server.",
    "--no_advantage_std_norm": "Do not divide advantages by the batch's deviation; group_norm divides in any case.",
    "--disable_ds_ckpt": "Do not save the state that resuming needs.",
    "--load_checkpoint": "Resume from the newest checkpoint.",
    "--eps_clip": "The ratio is clipped to 1 minus and 1 plus this.",
    "--eps_clip_low_high": "The ratio is clipped to 1 minus the first and 1 plus the second number.",
    "--dynamic_filtering_reward_range": "Keep prompts whose mean score is between these.",
    "--vllm_is_truncated_threshold": "Upper bound of the ratio, or lower and upper bound.",
    "--enable_vllm_is_correction": "Correct for the gap between the log-probs of engine and trainer.",
    "--use_dynamic_batch": "Cut micro-batches by tokens, not by samples.",
    "--async_train": "Train beside the rollout.",
    "--vllm_generate_batch_size": "Prompts sampled at a time, with --async_train: above a batch, places of the queue"
    " hold several.",
    "--async_queue_size": "Batches sampled ahead of the one in training: samples are up to this many versions old.",
    "--partial_rollout": "Open requests continue with new weights; a batch takes the groups that finish first.",
    "--bf16": "Compute in bf16.",
    "--vllm_enable_sleep": "Offload engines in phases that do not use them.",
    "--deepspeed_enable_sleep": "Offload actor and critic in phases that do not use them.",
    "--ref_reward_offload": "Offload reference and reward model in phases that do not use them.",
    "--ref.offload": "Offload the reference in phases that do not use it.",
    "--ref_offload": "Offload the reference in phases that do not use it.",
    "--reward.offload": "Offload the reward model in phases that do not use it.",
}

NOT_BUILT, NO_EFFECT = "Not built (a run that uses one is refused)", "Accepted, without effect here"
# The longest prefix of a config key decides its group; a flag that sets several keys belongs to that of the first.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model and data": ("actor.model", "critic.model", "reference.model", "data", "use_modelscope"),
    "Rollout and agents": ("rollout", "agent", "overlap"),
    "Algorithm": ("algorithm", "critic.value_clip", "critic.warmup_steps"),
    "Reward": ("reward",),
    "Training": ("train", "actor.optimizer", "critic.optimizer", "critic.value_head_prefix", "seed"),
    "Evaluation, checkpoints and logging": ("run_dir", "eval", "checkpoint", "log"),
    "Placement": (
        "cluster",
        *(f"{role}.enable_offload" for role in ("actor", "critic", "reference", "reward", "rollout")),
    ),
}

_INTRODUCTION = (
    "OpenRLHF's command line on Hotseat. Each flag below has its newer spelling, if there is one, and OpenRLHF's"
    " default; then the config fields that it sets (`hotseat options FIELD` describes one) and what it does. Exit"
    " codes: 0 done, 1 failed while running, 2 refused before anything ran, 130 stopped by Ctrl-C or SIGTERM."
)


def render_help(command: str) -> str:
    """Render an example and every flag with its spellings, its default, the config field it sets and its meaning."""
    from hotseat.cli.options_view import options

    meanings = {option["key"]: option for option in options("")}
    lines = [f"usage: python -m hotseat.cli.{command} [FLAG [VALUE ...]] ...", "", *EXAMPLES[command].splitlines(), ""]
    lines += _wrapped(_INTRODUCTION, "")
    lines += ["", "  --print_config", "      Print the equivalent YAML config and exit.", "  --help, -h"]
    lines.append("      Show this text and exit.")
    groups: dict[str, list[Flag]] = {name: [] for name in (*GROUPS, NOT_BUILT, NO_EFFECT)}
    for flag in sorted(COMMANDS[command], key=lambda flag: flag.name.lower()):
        groups[group_of(flag)].append(flag)
    for name, flags in groups.items():
        if flags:
            lines += ["", f"{name}:", *(line for flag in flags for line in _help_of(flag, meanings))]
    return "\n".join(lines)


def group_of(flag: Flag) -> str:
    """Return the group in which `--help` lists a flag."""
    if flag.because:
        return NO_EFFECT
    if not flag.sets:  # flags that launchers set
        return "Training"
    if flag.sets[0] in UNSUPPORTED:
        return NOT_BUILT
    prefixes = {prefix: name for name, each in GROUPS.items() for prefix in each}
    first = flag.sets[0].split(".")
    return next(prefixes[key] for n in range(len(first), 0, -1) if (key := ".".join(first[:n])) in prefixes)


def _help_of(flag: Flag, meanings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    least, most = flag.num_values
    value = "" if flag.kind == "switch" else " " + " ".join([flag.kind.upper()] * max(least, 1))
    value += " ..." if most == MANY else f" [{flag.kind.upper()}]" if most > least > 0 else ""
    return [f"  {', '.join(flag.spellings)}{value} ({_default(flag)})", *_wrapped(_effect(flag, meanings), " " * 6)]


def _default(flag: Flag) -> str:
    if flag.newer_default is SAME or flag.newer_default == flag.default:
        return f"default: {_shown(flag, flag.default)}"
    return f"default: {_shown(flag, flag.default)}; with dotted flags {_shown(flag, flag.newer_default)}"


def _shown(flag: Flag, value: Any) -> str:
    if flag.kind == "switch":
        return "off"
    if value is None:
        return "unset"
    if value == UNBOUNDED:
        return "no limit"
    return " ".join(str(item) for item in value) if isinstance(value, list) else repr(value)


def _effect(flag: Flag, meanings: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe what a flag does, in a sentence."""
    if flag.because:
        return f"no effect: {flag.because}"
    if not flag.sets:
        return "set by deepspeed and torchrun for each process"
    first = meanings.get(flag.sets[0])
    meaning = f": {MEANINGS.get(flag.name) or (first['meaning'] if first else '')}"
    lacking = UNSUPPORTED.get(flag.sets[0])
    return f"{', '.join(flag.sets)}{meaning}" + (f" Not part of this version: {lacking}." if lacking else "")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
