"""`hotseat completion`: a script for bash, zsh or fish, generated from the parser and the config tree.

The script contains all words, so that completing does not start Python. It completes commands, options, choices, config
files, run directories, and the keys of overrides with the words that they accept.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Takes = Literal["nothing", "text", "words", "file", "config", "folder", "overrides", "key"]

_BY_NAME: dict[str, Takes] = {
    "CONFIG": "config",
    "KEY=VALUE": "overrides",
    "RUN_DIR": "folder",
    "DIR": "folder",
    "FILE": "file",
    "MODEL": "folder",
    "OUTPUT": "folder",
    "PROMPTS": "file",
    "DATA": "file",
    "SECTION": "key",
    "KEY": "key",
}


@dataclass(frozen=True)
class Argument:
    """An option (with names) or a positional argument of a command, and the source of completions of its value."""

    names: tuple[str, ...]
    takes: Takes
    words: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Command:
    """A command of the parser."""

    name: str
    help: str
    arguments: tuple[Argument, ...]

    @property
    def options(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if argument.names)

    @property
    def positionals(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if not argument.names)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    shells = f"{', '.join(SHELLS)}; the script's first lines say how to use it"
    command.add_argument("shell", choices=list(SHELLS), metavar="SHELL", help=shells)


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell, and return the exit code."""
    from hotseat.cli.main import make_parser

    print(SHELLS[arguments.shell](commands_of(make_parser())), end="")
    return 0


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """Describe every command of a parser."""
    group = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {action.dest: action.help or "" for action in group._choices_actions}
    return [
        Command(name, texts[name], tuple(_argument(action) for action in command._actions))
        for name, command in group.choices.items()
    ]


def _argument(action: argparse.Action) -> Argument:
    takes: Takes = _BY_NAME.get(str(action.metavar or action.dest).upper(), "text")
    words: tuple[str, ...] = ()
    if action.choices is not None:
        takes, words = "words", tuple(map(str, action.choices))
    elif action.nargs == 0:
        takes = "nothing"
    return Argument(tuple(action.option_strings), takes, words, action.help or "")


def keys() -> dict[str, tuple[str, ...]]:
    """Return the keys of the config tree with the words that each accepts; none for numbers and free text."""
    from hotseat.config.load import fields_of
    from hotseat.config.names import names_of
    from hotseat.config.schema import Config

    return {key: (*names_of(info), *_words(info.annotation)) for key, info in fields_of(Config)}


def _words(annotation: Any) -> Iterator[str]:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        yield from map(str, typing.get_args(annotation))
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _words(member)
    elif annotation is bool:
        yield from ("true", "false")


# --- bash -------------------------------------------------------------------------------------------------------------

_BASH = """\
# hotseat in bash. In ~/.bashrc: eval "$(hotseat completion bash)"
_hotseat_keys="{keys}"

_hotseat_values() {{
  case $1 in
{values}
  esac
}}

_hotseat_words() {{
  COMPREPLY=($(compgen -W "$1" -- "$cur"))
}}

_hotseat_files() {{
  local IFS=$'\\n'
  compopt -o filenames 2>/dev/null
  COMPREPLY+=($(compgen "$@" -- "$cur"))
}}

_hotseat_take() {{
  case $1 in
    config) _hotseat_files -f -X '!*.y*ml'; _hotseat_files -d ;;
    folder) _hotseat_files -d ;;
    file) _hotseat_files -f ;;
    key) _hotseat_words "$_hotseat_keys" ;;
    overrides) compopt -o nospace 2>/dev/null; COMPREPLY=($(compgen -S = -W "$_hotseat_keys" -- "$cur")) ;;
    words) _hotseat_words "$2" ;;
  esac
}}

_hotseat() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} at place=0
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    _hotseat_words "{commands} --help --version"
    return
  fi
  # bash takes a word apart at "=".
  if [[ $cur == "=" ]]; then
    cur=
    _hotseat_words "$(_hotseat_values "$prev")"
    return
  elif [[ $prev == "=" ]]; then
    _hotseat_words "$(_hotseat_values "${{COMP_WORDS[COMP_CWORD-2]}}")"
    return
  fi
  case "$command $prev" in
{option_values}
  esac
  for ((at = 2; at < COMP_CWORD; at++)); do
    case "$command ${{COMP_WORDS[at]}}" in
      {with_value}) ((at++)) ;;
      "$command "-*) ;;
      *) ((place++)) ;;
    esac
  done
  case $command in
{cases}
  esac
}}
complete -F _hotseat hotseat
"""


def bash(commands: Sequence[Command]) -> str:
    """Make the script for bash."""

    def take(argument: Argument) -> str:
        return f'_hotseat_take {argument.takes} "{" ".join(argument.words)}"'

    return _BASH.format(
        keys=" ".join(keys()),
        commands=" ".join(command.name for command in commands),
        **_cases(commands, take, 'if [[ $cur == -* ]]; then _hotseat_words "{}"; return; fi'),
    )


def _cases(commands: Sequence[Command], take: Callable[[Argument], str], offer_options: str) -> dict[str, str]:
    """Make the parts that bash and zsh share: cases for values of keys, for values of options, and for commands."""
    option_values, with_value, cases = [], [], []
    for command in commands:
        for option in command.options:
            if option.takes != "nothing":
                pattern = "|".join(f'"{command.name} {name}"' for name in option.names)
                with_value.append(pattern)
                option_values.append(f"    {pattern}) {take(option)}; return ;;")
        names = " ".join(name for option in command.options for name in option.names)
        lines = [f"    {command.name})", f"      {offer_options.format(names)}"]
        last = len(command.positionals) - 1
        for place, argument in enumerate(command.positionals):
            lines.append(f"      {'((place >= ' if place == last else '((place == '}{place})) && {take(argument)}")
        cases.append("\n".join([*lines, "      ;;"]))
    return {
        "values": "\n".join(f"    {key}) echo {' '.join(words)} ;;" for key, words in keys().items() if words),
        "option_values": "\n".join(option_values),
        "with_value": "|".join(with_value),
        "cases": "\n".join(cases),
    }


# --- zsh --------------------------------------------------------------------------------------------------------------

_ZSH = """\
#compdef hotseat
# hotseat in zsh. In ~/.zshrc, below compinit: eval "$(hotseat completion zsh)"
_hotseat_values() {{
  case $1 in
{values}
  esac
}}

_hotseat_take() {{
  local -a known=({keys})
  case $1 in
    config) _files -g '*.(yaml|yml)' ;;
    folder) _files -/ ;;
    file) _files ;;
    key) compadd -- $known ;;
    overrides)
      if [[ $PREFIX == *=* ]]; then
        local key=${{PREFIX%%=*}}
        compset -P '*='
        compadd -- $(_hotseat_values $key)
      else
        compadd -S = -- $known
      fi ;;
    words) shift; compadd -- "$@" ;;
  esac
}}

_hotseat() {{
  local command=$words[2] prev=$words[CURRENT-1] at place=0
  if ((CURRENT == 2)); then
    local -a commands=(
{commands}
    )
    _describe command commands
    return
  fi
  case "$command $prev" in
{option_values}
  esac
  for ((at = 3; at < CURRENT; at++)); do
    case "$command $words[at]" in
      {with_value}) ((at++)) ;;
      "$command "-*) ;;
      *) ((place++)) ;;
    esac
  done
  case $command in
{cases}
  esac
}}
compdef _hotseat hotseat
"""


def zsh(commands: Sequence[Command]) -> str:
    """Make the script for zsh."""

    def take(argument: Argument) -> str:
        return " ".join(["_hotseat_take", argument.takes, *argument.words])

    return _ZSH.format(
        keys=" ".join(keys()),
        commands="\n".join(f"      {_quoted(f'{command.name}:{command.help}')}" for command in commands),
        **_cases(commands, take, "if [[ $PREFIX == -* ]]; then compadd -- {}; return; fi"),
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish -------------------------------------------------------------------------------------------------------------


def fish(commands: Sequence[Command]) -> str:
    """Make the script for fish."""
    known = keys()
    lines = [
        "# hotseat in fish. hotseat completion fish > ~/.config/fish/completions/hotseat.fish",
        "complete -c hotseat -f",
        f"set -g __hotseat_keys {' '.join(known)}",
        f"set -g __hotseat_overrides {' '.join(_assignments(known))}",
        "complete -c hotseat -n __fish_use_subcommand -l help -d 'show help'",
        "complete -c hotseat -n __fish_use_subcommand -l version -d 'show the version'",
    ]
    for command in commands:
        lines.append(f"complete -c hotseat -n __fish_use_subcommand -a {command.name} -d {_fish_quoted(command.help)}")
        here = f"complete -c hotseat -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = "" if option.takes == "nothing" else f" -r{_fish_words(option)}"
            lines.append(f"{here} {flags}{value} -d {_fish_quoted(option.help)}")
        lines += [f"{here}{_fish_words(argument)}" for argument in command.positionals]
    return "\n".join(lines) + "\n"


def _assignments(known: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for key, words in known.items():
        yield from (f"{key}={word}" for word in words or ("",))


def _fish_words(argument: Argument) -> str:
    if argument.takes in ("config", "file"):
        return " -F"
    sources = {
        "folder": "(__fish_complete_directories)",
        "key": "$__hotseat_keys",
        "overrides": "$__hotseat_overrides",
        "words": " ".join(argument.words),
    }
    return f" -a {_fish_quoted(sources[argument.takes])}" if argument.takes in sources else ""


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
