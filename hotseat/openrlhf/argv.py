"""Parser of a command line. As with argparse, flags are `--flag value` or `--flag=value`, and the last one counts.

It is stricter in two ways. A flag must be written out: argparse would accept `--micro_train` for the only flag that
begins so, and another version of the table might have two. And it reports every problem, not only the first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.errors import ConfigError, Problem
from hotseat.openrlhf.flag import Flag
from hotseat.openrlhf.flags import COMMANDS, spellings

HIDDEN = "***"
SWITCHES_OF_OURS = ("--print_config",)
_NUMBER = re.compile(r"-(\d|\.\d|inf$|nan$)")
_PARSERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "int|auto": (lambda text: text if text == "auto" else int(text), "a whole number or auto"),
    "float": (float, "a number"),
    "str": (str, "text"),
}


@dataclass(frozen=True)
class FlagArgument:
    """A flag and its value, as written on the command line."""

    flag: Flag
    spelling: str
    value: Any

    def __str__(self) -> str:
        if self.flag.kind == "switch":
            return self.spelling
        values = self.value if isinstance(self.value, list) else [self.value]
        return " ".join([self.spelling, *(HIDDEN if self.flag.is_secret else str(value) for value in values)])


@dataclass
class CommandLine:
    """A parsed command line. Indexing it returns a flag's value: the last one written, or OpenRLHF's default."""

    command: str
    arguments: dict[str, FlagArgument] = field(default_factory=dict)  # by name, in the order of each flag's last use
    overridden: list[FlagArgument] = field(default_factory=list)
    is_newer: bool = False  # written in dotted spelling
    print_config: bool = False

    @property
    def flags(self) -> tuple[Flag, ...]:
        return COMMANDS[self.command]

    def has(self, name: str) -> bool:
        return name in self.arguments

    def __getitem__(self, name: str) -> Any:
        if name in self.arguments:
            return self.arguments[name].value
        return self.flag(name).default_for(self.is_newer)

    def flag(self, name: str) -> Flag:
        return next(flag for flag in self.flags if flag.name == name)

    def knows(self, name: str) -> bool:
        return any(flag.name == name for flag in self.flags)

    def last_of(self, *names: str) -> str:
        """Return which of these flags comes last on the command line; if none does, the last of `names`."""
        return next((name for name in reversed(self.arguments) if name in names), names[-1])

    def spelling(self, name: str) -> str:
        """Return a flag's name in the spelling that this command line uses."""
        if name in self.arguments:
            return self.arguments[name].spelling
        flag = self.flag(name)
        return flag.dotted if self.is_newer and flag.dotted else flag.name


def parse(command: str, argv: Sequence[str]) -> CommandLine:
    """Parse a command line, or raise one error with all of its problems."""
    known = spellings(command)
    line = CommandLine(command)
    problems: list[Problem] = []
    tokens = list(argv)
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not _is_flag(token, known):
            problems.append(Problem("", _stray(token, line)))
            continue
        spelling, equals, text = token.partition("=")
        values = [text] if equals else []
        flag = known.get(spelling)
        most = flag.num_values[1] if flag else len(tokens)
        if spelling in SWITCHES_OF_OURS:
            most = 0
        while not equals and position < len(tokens) and len(values) < most and not _is_flag(tokens[position], known):
            values.append(tokens[position])
            position += 1
        if spelling in SWITCHES_OF_OURS:
            line.print_config = True
            if equals:
                problems.append(Problem(spelling, f"takes no value, given {text}"))
        elif flag is None:
            problems.append(Problem(spelling, f"unknown flag; {nearest(command, spelling)}"))
        else:
            problems += _take(line, flag, spelling, values)
    if problems:
        raise ConfigError(problems)
    line.is_newer = any("." in argument.spelling for argument in line.arguments.values())
    return line


def hide_secrets(command: str, argv: Sequence[str]) -> list[str]:
    """Return the command line with the values of secret flags replaced by stars."""
    known = spellings(command)
    shown: list[str] = []
    is_next_hidden = False
    for token in argv:
        spelling, equals, _ = token.partition("=")
        flag = known.get(spelling)
        is_secret = flag is not None and flag.is_secret
        if is_next_hidden and not _is_flag(token, known):
            shown.append(HIDDEN)
        elif is_secret and equals:
            shown.append(f"{spelling}={HIDDEN}")
        else:
            shown.append(token)
        is_next_hidden = is_secret and not equals
    return shown


def nearest(command: str, spelling: str) -> str:
    """Return `did you mean ...` for an unknown flag: the same words joined otherwise, a longer or a similar flag."""
    known = [*spellings(command), *SWITCHES_OF_OURS, "--help"] if _plain(spelling) else []
    plain = _plain(spelling)
    same = [name for name in known if _plain(name) == plain]
    longer = [name for name in known if name.startswith(spelling)]
    if same or len(longer) == 1:
        return f"did you mean {(same or longer)[0]}?"
    elsewhere = [other for other in COMMANDS if other != command and spelling in spellings(other)]
    if elsewhere:
        return f"{' and '.join(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} it, {command} does not"
    close = difflib.get_close_matches(spelling, longer or known, n=3 if longer else 1, cutoff=0.0 if longer else 0.7)
    return f"did you mean {' or '.join(close)}?" if close else "--help lists all there are"


def _plain(spelling: str) -> str:
    return re.sub(r"[-_.]", "", spelling).lower()


def _is_flag(token: str, known: Mapping[str, Flag]) -> bool:
    """Return whether a token is a flag and not a value: -1 and '-- {}' are values."""
    if token.partition("=")[0] in known or token in SWITCHES_OF_OURS:
        return True
    return token.startswith("-") and token != "-" and not _NUMBER.match(token) and " " not in token


def _stray(token: str, line: CommandLine) -> str:
    before = next(reversed(line.arguments.values()), None)
    if before is None:
        return f"{token!r} stands before any flag"
    if before.flag.kind == "switch":
        return f"{token!r} stands after {before.spelling}, which takes no value: writing the flag turns it on"
    if before.flag.is_secret:
        return f"there is one value too many after {before.spelling}"
    return f"{token!r} stands after {before}, which is complete"


def _take(line: CommandLine, flag: Flag, spelling: str, texts: Sequence[str]) -> list[Problem]:
    """Add a flag and its values to the line. Returns what is wrong with them."""
    least, most = flag.num_values
    problems = [] if least <= len(texts) <= most else [Problem(spelling, _wrong_number(flag, texts))]
    values: list[Any] = []
    for text in texts if not problems else ():
        try:
            values.append(_read(flag, text))
        except ValueError as error:
            problems.append(Problem(spelling, f"given {HIDDEN if flag.is_secret else repr(text)}, must be {error}"))
    value = values if most > 1 else values[0] if values else True
    before = line.arguments.pop(flag.name, None)
    if before is not None and before.value != value:
        line.overridden.append(before)
    line.arguments[flag.name] = FlagArgument(flag, spelling, value)
    return problems


def _wrong_number(flag: Flag, texts: Sequence[str]) -> str:
    if flag.kind == "switch":
        return f"takes no value, given {' '.join(texts)}: writing the flag turns it on"
    words = {(1, 1): "a value", (2, 2): "two values", (1, 2): "one or two values"}
    values = "none" if not texts else str(len(texts)) if flag.is_secret else " ".join(texts)
    return f"takes {words.get(flag.num_values, 'at least one value')}, given {values}"


def _read(flag: Flag, text: str) -> Any:
    """Convert a value to the flag's kind. Empty text means unset, as in OpenRLHF."""
    if flag.choices is not None and text not in flag.choices:
        raise ValueError(f"one of {', '.join(flag.choices)}")
    if flag.kind == "str" and not text:
        return None
    parser, expected = _PARSERS[flag.kind]
    try:
        return parser(text)
    except ValueError:
        raise ValueError(expected) from None
