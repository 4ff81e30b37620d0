"""The command: translate, then print the config or start the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotseat import clock, interrupts
from hotseat.cli.ending import OK, reported
from hotseat.errors import UnsupportedError, UserError
from hotseat.openmp import wait_passively

if TYPE_CHECKING:
    from hotseat.config import Config
    from hotseat.verl.to_config import VerlTranslation

COMMAND = "main_ppo"


def entry() -> None:
    """Run the command with this process's arguments."""
    interrupts.handle_until_exit()
    wait_passively()
    sys.exit(main(sys.argv[1:], start=_start))


def main(
    argv: Sequence[str], env: Mapping[str, str] | None = None, start: Callable[[Config], Any] | None = None
) -> int:
    """Run the command and return its exit code. start: starts a run, by default `hotseat.loop.start.start`."""
    clock.begin()
    return reported(COMMAND, lambda: _run(argv, os.environ if env is None else env, start or _start))


def _run(argv: Sequence[str], env: Mapping[str, str], start: Callable[[Config], Any]) -> int:
    if any(token in ("-h", "--help", "--hydra-help") for token in argv):
        from hotseat.verl.command_help import render_help

        _show(render_help() + "\n")
        return OK
    from hotseat.verl.to_config import translate

    translation = translate(argv, env)
    for name, because in translation.no_effect:
        print(f"no effect here: {name} because {because}", file=sys.stderr)
    if translation.line.print_config:
        _show(translation.yaml)
        return OK
    check_prerequisites(translation)
    try:
        start(translation.config)
    except UserError as error:
        raise UserError(translation.in_keys(str(error))) from error
    return OK


def _show(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Without this, Python would complain again at exit.
        sys.stderr.close()


def _start(config: Config) -> None:
    from hotseat.loop import start

    start.start(config)


def check_prerequisites(translation: VerlTranslation) -> None:
    """Raise one error that lists everything that keeps the run from starting."""
    from hotseat.verl.data_sources import data_problems

    missing = [*translation.missing, *data_problems(translation.config, translation.line)]
    text = ""
    if missing:
        text = "this run cannot start:\n" + _listed(missing)
    if translation.unsupported:
        text += "not part of this version:\n" + _listed(translation.unsupported)
        text += "--print_config prints the config nevertheless"
    if text:
        raise (UserError if missing else UnsupportedError)(text.rstrip())


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f"  {name}: {text}\n" for name, text in pairs)
