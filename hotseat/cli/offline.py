"""Commands that work on models without training: checks before a model loads, and what is printed at the end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from hotseat.checks.agent_trial import agent_trial
from hotseat.checks.pipeline import check_user_code
from hotseat.config import Config
from hotseat.errors import UserError
from hotseat.loop.offline.group_file import Selection, check_output, partial_path
from hotseat.loop.offline.options import has_reward, offline_config, play_config, refuse
from hotseat.observe import LiveView
from hotseat.words import quantity


def run_generate(arguments: argparse.Namespace) -> int:
    selection = Selection(arguments.keep, arguments.min_reward)
    output = Path(arguments.output)
    flags = {**_sampling(arguments, "rollout"), "rollout.samples_per_prompt": arguments.samples, **_reward(arguments)}
    config = offline_config(
        "generate", arguments.model, arguments.data, file=arguments.config, flags=flags, overrides=arguments.overrides
    )
    if selection.needs_reward and not has_reward(config):
        option = "--min-reward" if arguments.keep == "all" else f"--keep {arguments.keep}"
        raise UserError(f"{option} compares rewards, and there are none: give --reward FILE, or reward.graders")
    if arguments.keep == "pairs" and config.rollout.samples_per_prompt < 2:
        raise UserError("--keep pairs compares the answers to a prompt, and there is one: give --samples 2 or more")
    check_output(output, arguments.overwrite)
    generate_with(config, output, selection, overwrite=arguments.overwrite, command="hotseat generate")
    return 0


def generate_with(
    config: Config, output: Path, selection: Selection, *, overwrite: bool, command: str, first_row: int = 0
) -> None:
    """Refuse what cannot work; then generate, and print what was written."""
    refuse(config, needs_reward=False)
    with _view("generate") as view, _resumable(output, command):
        _try_user_code(config, view)
        view.stage("loading torch and transformers")
        from hotseat.loop.offline.answering import generate

        made = generate(config, output, selection, view, overwrite=overwrite, first_row=first_row)
    failed = f", {made.num_failed:,} failed" if made.num_failed else ""
    answers = f"{quantity(made.num_samples, 'answer')} to {quantity(made.num_prompts, 'prompt')}{failed}"
    print(f"{output}: {quantity(made.num_lines, 'line')} of {answers}")


def score_with(options: dict[str, Any], output: str, selection: Selection) -> None:
    """Score the answers of a file with a reward model, and print what was written. options: of `ScoreOptions`."""
    path = Path(output)
    check_output(path, overwrite=True)
    with _view("score") as view:
        view.stage("loading torch and transformers")
        from hotseat.loop.offline.score import ScoreOptions, score_answers

        made = score_answers(ScoreOptions(**options), path, selection, view)
    answers = f"{quantity(made.num_scored, 'answer')} to {quantity(made.num_prompts, 'prompt')}"
    dropped = f", {quantity(made.num_dropped, 'row')} left out: no room for an answer" if made.num_dropped else ""
    print(f"{path}: {quantity(made.num_lines, 'line')} of {answers}{dropped}")


def run_eval(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.output)
    answers = folder / "answers.jsonl"
    flags = {**_sampling(arguments, "eval"), "eval.samples_per_prompt": arguments.samples, **_reward(arguments)}
    config = offline_config(
        "eval", arguments.model, arguments.data, file=arguments.config, flags=flags, overrides=arguments.overrides
    )
    if folder.is_file():
        raise UserError(f"--output {folder} is a file: give a folder")
    check_output(answers, arguments.overwrite)
    refuse(config, needs_reward=True)
    with _view("eval") as view, _resumable(answers, "hotseat eval"):
        _try_user_code(config, view)
        view.stage("loading torch and transformers")
        from hotseat.loop.offline.evaluate import REPORT, evaluate

        metrics = evaluate(config, folder, view, overwrite=arguments.overwrite)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.4g}")
    print(f"{folder / REPORT}")
    return 0


def run_merge(arguments: argparse.Namespace) -> int:
    """Refuse what cannot be merged; then merge, and print what was written."""
    from hotseat.loop.offline.merge import base_of, merge

    adapter, output = Path(arguments.adapter), Path(arguments.output)
    model = base_of(adapter, arguments.base, output)
    with _view("merge-lora") as view:
        view.stage(f"adding {adapter} to {model}")
        num_layers = merge(model, adapter, output, is_reward_model=arguments.reward_model, bf16=arguments.bf16)
    print(f"{output}: {model} with {quantity(num_layers, 'layer')} of {adapter} merged")
    return 0


def run_chat(arguments: argparse.Namespace) -> int:
    config = offline_config(
        "chat",
        arguments.model,
        file=arguments.config,
        flags={**_sampling(arguments, "rollout"), "data.apply_chat_template": True},
        overrides=arguments.overrides,
    )
    refuse(config, needs_reward=False, needs_data=False)
    console = Console()
    with _view("chat") as view:
        view.stage("loading torch and transformers")
        from hotseat.loop.offline.chat import Chat, converse

        chat = Chat(config, Path("logs"), view, arguments.system)
    console.print("/new begins another conversation, /exit or Ctrl-D ends", style="dim")
    try:
        with suppress(EOFError):
            converse(chat, _lines(console), lambda text: console.print(text, markup=False, highlight=False))
    finally:
        chat.close()
    return 0


def run_play(arguments: argparse.Namespace) -> int:
    config = play_config(arguments.config, arguments.model, arguments.overrides)
    refuse(config, needs_reward=False)
    console = Console(highlight=False)
    styles = {"about": "dim", "read": "", "sampled": "bold green"}
    view = _view("play")
    with view:
        _try_user_code(config, view)
        view.stage("loading torch and transformers")
        from hotseat.loop.offline.play import play
        from hotseat.types import Failed, ScoredEpisode

    outcome = play(
        config,
        arguments.prompt,
        Path("logs"),
        _view("play"),
        lambda text, kind: console.print(text, style=styles[kind], markup=False, emoji=False, soft_wrap=True),
    )
    if isinstance(outcome, Failed):
        print(f"failed: {outcome.reason}")
        return 1
    episode = outcome.episode if isinstance(outcome, ScoredEpisode) else outcome
    print(f"{quantity(episode.num_sampled, 'sampled token')} in {quantity(len(episode.segments), 'segment')}")
    if isinstance(outcome, ScoredEpisode):
        for name, value in {"reward": outcome.reward, "score": outcome.score, **outcome.extra}.items():
            print(f"{name}  {value:.6g}")
    return 0


def _lines(console: Console) -> Iterator[str]:
    while True:
        yield console.input("[bold]> [/bold]")


# --- parts of several commands ----------------------------------------------------------------------------------------


def _sampling(arguments: argparse.Namespace, section: str) -> dict[str, Any]:
    return {
        "rollout.engine": arguments.engine,
        f"{section}.temperature": arguments.temperature,
        "rollout.max_new_tokens": arguments.max_new_tokens,
    }


def _reward(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"reward.function": arguments.reward}


def _view(title: str) -> LiveView:
    """Make a view on standard error: standard output has the result."""
    return LiveView(title, console=Console(stderr=True))


def _try_user_code(config: Config, view: LiveView) -> None:
    """Try reward files, the sandbox and reward servers before a model loads. Raises `UserError` if they cannot work."""
    for note in check_user_code(config, view.stage):
        view.say(note)
    with agent_trial(config) as trial:
        for note in [] if trial is None else trial.notes():
            view.say(note)


@contextmanager
def _resumable(output: Path, command: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        partial = partial_path(output)
        if partial.exists():
            interrupt.add_note(f"{partial} has the answers so far: the same {command} command resumes")
        raise
