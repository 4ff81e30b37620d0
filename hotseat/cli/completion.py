"""`hotseat completion`: a script for bash, zsh or fish, made by shtab from the parser and the config tree.

The script contains all words, so that completing does not start Python.
"""

from __future__ import annotations

import argparse
import typing
from typing import Any

SHELLS = ("bash", "zsh", "fish")
FILE_NAMES, FOLDER_NAMES = ("FILE", "PROMPTS", "DATA"), ("RUN_DIR", "DIR", "MODEL", "OUTPUT")
KEY_NAMES, OVERRIDE_NAMES = ("SECTION", "KEY"), ("KEY=VALUE",)

# bash takes a word apart at "=".
_BASH = """\
_hotseat_keys="{keys}"
_hotseat_values() {{
  case $1 in
{values}
  esac
}}
_hotseat_key() {{ compgen -W "$_hotseat_keys" -- "$1"; }}
_hotseat_override() {{
  local at=$COMP_CWORD
  if [[ ${{COMP_WORDS[at]}} == "=" ]]; then
    compgen -W "$(_hotseat_values "${{COMP_WORDS[at-1]}}")"
  elif [[ ${{COMP_WORDS[at-1]}} == "=" ]]; then
    compgen -W "$(_hotseat_values "${{COMP_WORDS[at-2]}}")" -- "$1"
  else
    compopt -o nospace 2>/dev/null
    compgen -S = -W "$_hotseat_keys" -- "$1"
  fi
}}
"""
_ZSH = """\
_hotseat_values() {{
  case $1 in
{values}
  esac
}}
_hotseat_key() {{ compadd -- {keys}; }}
_hotseat_override() {{
  if [[ $PREFIX == *=* ]]; then
    local key=${{PREFIX%%=*}}
    compset -P '*='
    compadd -- $(_hotseat_values $key)
  else
    compadd -S = -- {keys}
  fi
}}
"""
_FISH = """\
set -g __hotseat_keys {keys}
set -g __hotseat_overrides {assignments}
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    shells = f'{", ".join(SHELLS)}: eval "$(hotseat completion bash)" in ~/.bashrc; `hotseat completion fish | source`'
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help=shells)


def run_completion(arguments: argparse.Namespace) -> int:
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    import shtab

    from hotseat.cli.main import make_parser

    parser = make_parser()
    group = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in group.choices.values():
        for action in command._actions:
            complete = _source(str(action.metavar or action.dest).upper())
            if complete is not None and action.choices is None and action.nargs != 0:
                action.complete = complete  # which shtab reads
    return shtab.complete(parser, shell, preamble=_preambles())


def keys() -> dict[str, tuple[str, ...]]:
    """Return the keys of the config tree with the words that each accepts; none for numbers and free text."""
    from hotseat.config.annotations import words_of
    from hotseat.config.load import fields_of
    from hotseat.config.schema import Config

    def words(info: Any) -> tuple[str, ...]:
        if typing.get_origin(info.annotation) in (dict, list):
            return ()
        return (
            *words_of(info),
            *(("true", "false") if bool in (info.annotation, *typing.get_args(info.annotation)) else ()),
        )

    return {key: words(info) for key, info in fields_of(Config)}


def _source(name: str) -> Any:
    """Return where completions of an argument of this name come from, in the form of shtab; None: nowhere."""
    import shtab

    if name == "CONFIG":
        return shtab.glob("*.yaml", "*.yml")
    if name in FILE_NAMES:
        return shtab.FILE
    if name in FOLDER_NAMES:
        return shtab.DIRECTORY
    if name in KEY_NAMES:
        return {"bash": "_hotseat_key", "zsh": "_hotseat_key", "fish": "$__hotseat_keys"}
    if name in OVERRIDE_NAMES:
        return {"bash": "_hotseat_override", "zsh": "_hotseat_override", "fish": "$__hotseat_overrides"}
    return None


def _preambles() -> dict[str, str]:
    """Make the part of each script that knows the keys and their values."""
    known = keys()
    words = " ".join(known)
    values = "\n".join(f"    {key}) echo {' '.join(each)} ;;" for key, each in known.items() if each)
    assignments = " ".join(f"{key}={word}" for key, each in known.items() for word in each or ("",))
    return {
        "bash": _BASH.format(keys=words, values=values),
        "zsh": _ZSH.format(keys=words, values=values),
        "fish": _FISH.format(keys=words, assignments=assignments),
    }
