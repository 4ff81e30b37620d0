"""Arguments of commands that work on models without training. Loads nothing heavy: `--help` answers at once."""

from __future__ import annotations

import argparse

from hotseat.registry.engines import DEFAULT_ENGINE, ENGINES

DEFAULT_OUTPUT = "answers.jsonl"
_FURTHER = "further settings by their config keys, such as data.input_key=question or rollout.top_p=0.9"


def add_generate_arguments(command: argparse.ArgumentParser) -> None:
    _takes_model(command)
    command.add_argument("data", metavar="PROMPTS", help="file, saved data set or hub name, as data.path in a config")
    _takes_settings(command)
    _takes_sampling(command)
    _takes_reward(command)
    command.add_argument(
        "-n", "--samples", type=int, metavar="N", help="answers to each prompt (rollout.samples_per_prompt; default: 1)"
    )
    command.add_argument(
        "--keep",
        choices=("all", "best", "pairs"),
        default="all",
        help="what is written of each prompt: all answers, the one with the highest reward (best of n), or the best and"
        " the worst as chosen and rejected (default: %(default)s)",
    )
    command.add_argument(
        "--min-reward", type=float, metavar="X", help="leave out answers with a lower reward (rejection sampling)"
    )
    command.add_argument("--output", default=DEFAULT_OUTPUT, metavar="FILE", help="JSON lines (default: %(default)s)")
    command.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")


def add_eval_arguments(command: argparse.ArgumentParser) -> None:
    _takes_model(command)
    command.add_argument("data", metavar="DATA", help="file, saved data set or hub name, as eval.path in a config")
    _takes_settings(command)
    _takes_sampling(command)
    _takes_reward(command)
    command.add_argument(
        "-n", "--samples", type=int, metavar="N", help="answers to each prompt (eval.samples_per_prompt; default: 4)"
    )
    command.add_argument(
        "--output", default="eval", metavar="DIR", help="folder for the results (default: %(default)s)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the results that are in DIR")


def add_merge_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("adapter", metavar="DIR", help="folder with adapter_config.json and adapter_model.safetensors")
    command.add_argument("output", metavar="OUTPUT", help="folder for the merged model, which is new or empty")
    command.add_argument(
        "--base", metavar="MODEL", help="base model (default: the one that the adapter's config names)"
    )
    command.add_argument(
        "--reward-model", action="store_true", help="the base is a reward model, with one number as head"
    )
    command.add_argument("--bf16", action="store_true", help="write bfloat16 (default: as the base model is stored)")


def add_chat_arguments(command: argparse.ArgumentParser) -> None:
    _takes_model(command)
    _takes_settings(command)
    _takes_sampling(command)
    command.add_argument("--system", metavar="TEXT", help="first message of the conversation, of the role system")


def add_play_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", help="config of a run, whose agent plays")
    command.add_argument("--prompt", type=int, default=0, metavar="N", help="prompt to play, from 0 (default: 0)")
    command.add_argument("--model", metavar="MODEL", help="another model than actor.model, such as runs/rl-1/model")
    add_overrides(command)


# --- parts of several commands ----------------------------------------------------------------------------------------


def _takes_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="checkpoint folder, such as runs/rl-1/model, or hub name")


def add_overrides(command: argparse.ArgumentParser, meaning: str = _FURTHER) -> None:
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=meaning)


def _takes_settings(command: argparse.ArgumentParser) -> None:
    add_overrides(command)
    command.add_argument(
        "--config", metavar="CONFIG", help="config of a run: its data keys, templates, rewards and engine are used"
    )
    command.add_argument("--engine", choices=tuple(ENGINES), help=f"rollout.engine (default: {DEFAULT_ENGINE})")


def _takes_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    command.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (rollout.max_new_tokens)")


def _takes_reward(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--reward",
        metavar="FILE",
        help="Python file with reward_func(queries, prompts, labels), FILE.py:NAME, exact_match or number_match",
    )
