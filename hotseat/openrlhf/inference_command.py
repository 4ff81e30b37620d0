"""OpenRLHF's `batch_inference` on Hotseat: answers to prompts, or rewards of answers; rejection sampling and pairs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotseat.cli.ending import reported
from hotseat.errors import UnsupportedError, UserError
from hotseat.registry.engines import engine_entry

_NO_EFFECT = {
    "--micro_batch_size": "an engine batches by itself",
    "--max_num_seqs": "an engine batches by itself",
    "--zero_stage": "the engine holds the whole model",
    "--local_rank": "one process samples; vLLM starts those of --tp_size itself",
    "--attn_implementation": "the engine has its own attention",
    "--zpg": "the engine holds the whole model",
    "--max_len": "prompts have --prompt_max_len and answers --max_new_tokens",
    "--output_key": "the data's answers are not read",
    "--reward_template": "it is for --post_processor csft",
    "--value_head_prefix": "no reward model is loaded",
    "--csft_prompt": "it is for --enable_csft",
}
_SWITCHES_WITHOUT_EFFECT = {
    "--flash_attn": "the engine has its own attention",
    "--disable_fast_tokenizer": "the tokenizer is the model's",
    "--full_determinism": "seeds of requests decide the answers",
    "--adam_offload": "nothing is trained",
    "--packing_samples": "nothing is trained",
    "--normalize_reward": "it is for --post_processor csft",
}
# Of `--eval_task rm`, which reads --max_len, --micro_batch_size, --output_key and --value_head_prefix instead.
_ONLY_FOR_RM = ("--max_len", "--micro_batch_size", "--output_key", "--value_head_prefix")
_NO_EFFECT_ON_RM = {
    "--prompt_max_len": "prompt and answer have --max_len",
    **dict.fromkeys(
        ("--max_new_tokens", "--greedy_sampling", "--temperature", "--top_p", "--best_of_n"), "nothing is sampled"
    ),
    "--tp_size": "one device scores",
    "--enable_prefix_caching": "nothing is sampled",
    "--remote_rm_url": "--pretrain scores",
    "--label_key": "a reward model gets no label",
}
_TASKS = {"generate": "transformers", "generate_vllm": "vllm"}
_KEEPS = {None: "all", "null": "all", "rs": "best", "iter_dpo": "pairs"}


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    arguments = _parser().parse_args(argv)
    return reported("batch_inference", lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batch_inference", allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("--eval_task", help="generate (transformers), generate_vllm, or rm: score answers with a reward model")
    add("--pretrain", help="model")
    add("--dataset", help="prompts")
    add("--dataset_probs", help="probability of each part of --dataset")
    add("--dataset_split", default="train", help="split of --dataset")
    add("--output_path", help="file for the answers; it is replaced")
    add("--input_key", default="input", help="column of the prompt")
    add("--label_key", help="column that the reward function gets as label")
    add("--apply_chat_template", action="store_true", help="render messages with the tokenizer's template")
    add("--input_template", help="format string with one {} for the prompt")
    add("--max_samples", type=float, help="rows at most")
    add("--prompt_max_len", type=int, default=1024, help="longest prompt")
    add("--max_new_tokens", type=int, default=1024, help="longest answer")
    add("--greedy_sampling", action="store_true", help="temperature 0")
    add("--temperature", type=float, default=1.0, help="sampling temperature")
    add("--top_p", type=float, default=1.0, help="nucleus sampling")
    add("--repetition_penalty", type=float, default=1.0, help="only 1")
    add("--best_of_n", type=int, default=1, help="answers to each prompt")
    add("--post_processor", choices=("rs", "csft", "iter_dpo", "null"), help="what is written of each prompt")
    add(
        "--remote_rm_url",
        help="reward file or servers: sampling and scoring are one command here",
    )
    add("--tp_size", type=int, default=1, help="devices of vLLM")
    add("--enable_prefix_caching", action="store_true", help="reuse the cache of common prefixes (vLLM)")
    add("--iter", type=int, help="use rows iter * rollout_batch_size to (iter + 1) * rollout_batch_size")
    add("--rollout_batch_size", type=int, default=2048, help="rows of an iteration")
    add("--seed", type=int, default=1234, help="of sampling")
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--param_dtype", choices=("bf16",), help="as --bf16")
    add("--enable_csft", action="store_true", help="not built")
    add("--use_ms", action="store_true", help="not built")
    for name, why in _NO_EFFECT.items():
        add(name, help=f"no effect: {why}")
    for name, why in _SWITCHES_WITHOUT_EFFECT.items():
        add(name, action="store_true", help=f"no effect: {why}")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    is_rm = arguments.eval_task == "rm"
    for name, why in (_NO_EFFECT | _SWITCHES_WITHOUT_EFFECT | (_NO_EFFECT_ON_RM if is_rm else {})).items():
        value = getattr(arguments, name.removeprefix("--"))
        if value != _parser().get_default(name.removeprefix("--")) and not (is_rm and name in _ONLY_FOR_RM):
            print(f"no effect here: {name} because {why}", file=sys.stderr)
    return _score(arguments) if is_rm else _generate(arguments)


def _first_row(arguments: argparse.Namespace) -> int:
    return 0 if arguments.iter is None else arguments.iter * arguments.rollout_batch_size


def _max_samples(arguments: argparse.Namespace) -> int | None:
    max_samples = None if arguments.max_samples is None else int(arguments.max_samples)
    if arguments.iter is None:
        return max_samples
    end = (arguments.iter + 1) * arguments.rollout_batch_size
    return end if max_samples is None else min(end, max_samples)


def _score(arguments: argparse.Namespace) -> int:
    from hotseat.cli.offline import score_with
    from hotseat.loop.offline.group_file import Selection

    selection = Selection(_KEEPS[arguments.post_processor])  # type: ignore[arg-type]
    options = {
        "model": arguments.pretrain,
        "data": arguments.dataset,
        "split": arguments.dataset_split,
        "probs": arguments.dataset_probs,
        "seed": arguments.seed,
        "max_samples": _max_samples(arguments),
        "first_row": _first_row(arguments),
        "input_key": arguments.input_key,
        "input_template": arguments.input_template,
        "apply_chat_template": arguments.apply_chat_template,
        "output_key": arguments.output_key,
        "max_length": None if arguments.max_len is None else int(arguments.max_len),
        "micro_batch_size": None if arguments.micro_batch_size is None else int(arguments.micro_batch_size),
        "value_head_prefix": arguments.value_head_prefix,
        "dtype": "bf16" if arguments.bf16 or arguments.param_dtype else None,
    }
    score_with({name: value for name, value in options.items() if value is not None}, arguments.output_path, selection)
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from hotseat.cli.offline import generate_with
    from hotseat.loop.offline.group_file import Selection, check_output
    from hotseat.loop.offline.options import offline_config

    config = offline_config("generate", arguments.pretrain, arguments.dataset, flags=_flags(arguments))
    output = Path(arguments.output_path)
    check_output(output, overwrite=True)
    generate_with(
        config,
        output,
        Selection(_KEEPS[arguments.post_processor]),  # type: ignore[arg-type]
        overwrite=True,
        command="batch_inference",
        first_row=_first_row(arguments),
    )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    is_rm = arguments.eval_task == "rm"
    if not is_rm and arguments.eval_task not in _TASKS:
        raise UserError(f"--eval_task {arguments.eval_task}: give one of {', '.join(_TASKS)}, rm")
    missing = [name for name in ("pretrain", "dataset", "output_path") if not getattr(arguments, name)]
    if missing:
        raise UserError(f"set {', '.join(f'--{name}' for name in missing)}")
    if arguments.repetition_penalty != 1.0:
        raise UnsupportedError("--repetition_penalty is not part of this version: engines sample from the model itself")
    if arguments.enable_csft or arguments.post_processor == "csft":
        raise UnsupportedError("conditional SFT (--enable_csft, --post_processor csft) is not part of this version")
    if arguments.use_ms:
        raise UnsupportedError("--use_ms is not part of this version: give the folder of a model on this machine")
    if is_rm:
        return
    if _KEEPS[arguments.post_processor] != "all" and arguments.remote_rm_url is None:
        raise UserError(f"--post_processor {arguments.post_processor} compares rewards: give --remote_rm_url FILE")
    if arguments.post_processor == "iter_dpo" and arguments.best_of_n < 2:
        raise UserError("--post_processor iter_dpo compares the answers to a prompt: give --best_of_n 2 or more")


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the config keys that the flags set."""
    is_served = (arguments.remote_rm_url or "").startswith(("http://", "https://"))
    engine = engine_entry(_TASKS[arguments.eval_task])
    return {
        "rollout.engine": engine.name,
        "rollout.tensor_parallel_size": arguments.tp_size if "tensor_parallel_size" in engine.options else None,
        "rollout.prefix_caching": ("prefix_caching" in engine.options and arguments.enable_prefix_caching) or None,
        "rollout.temperature": 0.0 if arguments.greedy_sampling else arguments.temperature,
        "rollout.top_p": arguments.top_p,
        "rollout.max_new_tokens": arguments.max_new_tokens,
        "rollout.samples_per_prompt": arguments.best_of_n,
        "data.prompt_max_length": arguments.prompt_max_len,
        "data.max_length": arguments.prompt_max_len + arguments.max_new_tokens,
        "data.probs": arguments.dataset_probs,
        "data.split": arguments.dataset_split,
        "data.max_samples": _max_samples(arguments),
        "data.input_key": arguments.input_key,
        "data.label_key": arguments.label_key,
        "data.input_template": arguments.input_template,
        "data.apply_chat_template": arguments.apply_chat_template or None,
        "reward.function": None if is_served else arguments.remote_rm_url,
        "reward.url": arguments.remote_rm_url.split(",") if is_served else None,
        "train.dtype": "bf16" if arguments.bf16 or arguments.param_dtype else None,
        "seed": arguments.seed,
    }
