"""A command line taken apart, as argparse would: `--flag value`, `--flag=value`, the last of several holds.

Two things are stricter. A flag must be written out: argparse would take `--micro_train` for the only flag that begins
so, and another version of the table might know two. And every problem is found, not only the first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.cli.openrlhf.flags import COMMANDS, Flag, spellings
from hotseat.errors import ConfigError, Problem

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
class Given:
    """A flag as it stands on the command line."""

    flag: Flag
    spelling: str
    value: Any

    def __str__(self) -> str:
        if self.flag.kind == "switch":
            return self.spelling
        values = self.value if isinstance(self.value, list) else [self.value]
        return " ".join([self.spelling, *(HIDDEN if self.flag.is_secret else str(value) for value in values)])


@dataclass
class Line:
    """What was given, in order, and what holds for each flag: the last that was given, or OpenRLHF's default."""

    command: str
    given: dict[str, Given] = field(default_factory=dict)  # by name; a flag stands where it stood last
    overridden: list[Given] = field(default_factory=list)
    is_newer: bool = False  # written in dotted spelling
    print_config: bool = False

    @property
    def flags(self) -> tuple[Flag, ...]:
        return COMMANDS[self.command]

    def has(self, name: str) -> bool:
        return name in self.given

    def __getitem__(self, name: str) -> Any:
        if name in self.given:
            return self.given[name].value
        return self.flag(name).default_for(self.is_newer)

    def flag(self, name: str) -> Flag:
        return next(flag for flag in self.flags if flag.name == name)

    def knows(self, name: str) -> bool:
        return any(flag.name == name for flag in self.flags)

    def last_of(self, *names: str) -> str:
        """The flag that was given last; none of them: the last named, which has the default."""
        return next((name for name in reversed(self.given) if name in names), names[-1])

    def spelling(self, name: str) -> str:
        """How this user writes a flag."""
        if name in self.given:
            return self.given[name].spelling
        flag = self.flag(name)
        return flag.dotted if self.is_newer and flag.dotted else flag.name


def parse(command: str, argv: Sequence[str]) -> Line:
    """Take a command line apart, or raise with all that is wrong with it."""
    known = spellings(command)
    line = Line(command)
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
    line.is_newer = any("." in given.spelling for given in line.given.values())
    return line


def hide_secrets(command: str, argv: Sequence[str]) -> list[str]:
    """The same command line without what only the program itself may know."""
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
    """`did you mean ...` for an unknown flag: the same words joined otherwise, what it begins, what it resembles."""
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
    """Whether a token is a flag and not a value: -1 and '-- {}' are values."""
    if token.partition("=")[0] in known or token in SWITCHES_OF_OURS:
        return True
    return token.startswith("-") and token != "-" and not _NUMBER.match(token) and " " not in token


def _stray(token: str, line: Line) -> str:
    before = next(reversed(line.given.values()), None)
    if before is None:
        return f"{token!r} stands before any flag"
    if before.flag.kind == "switch":
        return f"{token!r} stands after {before.spelling}, which takes no value: it is on when it is there"
    if before.flag.is_secret:
        return f"there is one value too many after {before.spelling}"
    return f"{token!r} stands after {before}, which is complete"


def _take(line: Line, flag: Flag, spelling: str, texts: Sequence[str]) -> list[Problem]:
    """Note a flag that was given; or what is wrong with it."""
    least, most = flag.num_values
    problems = [] if least <= len(texts) <= most else [Problem(spelling, _wrong_number(flag, texts))]
    values: list[Any] = []
    for text in texts if not problems else ():
        try:
            values.append(_read(flag, text))
        except ValueError as error:
            problems.append(Problem(spelling, f"given {HIDDEN if flag.is_secret else repr(text)}, must be {error}"))
    value = values if most > 1 else values[0] if values else True
    before = line.given.pop(flag.name, None)
    if before is not None and before.value != value:
        line.overridden.append(before)
    line.given[flag.name] = Given(flag, spelling, value)
    return problems


def _wrong_number(flag: Flag, texts: Sequence[str]) -> str:
    if flag.kind == "switch":
        return f"takes no value, given {' '.join(texts)}: it is on when it is there"
    words = {(1, 1): "a value", (2, 2): "two values", (1, 2): "one or two values"}
    given = "none" if not texts else str(len(texts)) if flag.is_secret else " ".join(texts)
    return f"takes {words.get(flag.num_values, 'at least one value')}, given {given}"


def _read(flag: Flag, text: str) -> Any:
    """A value of the flag's kind. Empty text is OpenRLHF's way of saying nothing."""
    if flag.choices is not None and text not in flag.choices:
        raise ValueError(f"one of {', '.join(flag.choices)}")
    if flag.kind == "str" and not text:
        return None
    parser, wanted = _PARSERS[flag.kind]
    try:
        return parser(text)
    except ValueError:
        raise ValueError(wanted) from None
