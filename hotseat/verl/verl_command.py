"""The command: translate, then print the config or start the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotseat import clock, interrupts
from hotseat.cli.ending import OK, reported, show
from hotseat.errors import UserError
from hotseat.openmp import wait_passively

if TYPE_CHECKING:
    from hotseat.config import Config

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

        show(render_help() + "\n")
        return OK
    from hotseat.verl.data_sources import data_problems
    from hotseat.verl.to_config import translate

    translation = translate(argv, env)
    translation.show_no_effect()
    if translation.line.print_config:
        show(translation.yaml)
        return OK
    translation.check_prerequisites(data_problems(translation.config, translation.line))
    try:
        start(translation.config)
    except UserError as error:
        raise UserError(translation.rename_keys(str(error))) from error
    return OK


def _start(config: Config) -> None:
    from hotseat.loop import start

    start.start(config)
