"""Parser of a command line of overrides in Hydra's syntax, of which `main_ppo` takes any number.

    a.b=c    sets a key            +a.b=c, ++a.b=c    the same here: whether verl's files have the key does not matter
    ~a.b     removes a key: allowed where nothing depends on it

Values are numbers, booleans, `null`, lists `[a,b]`, mappings `{a:b}`, quoted strings, and anything else as text.
`${a.b}` stands for the value of another key, alone or within a text. All problems are reported at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.config.load import nearest_key, valid_keys
from hotseat.errors import ConfigError, Problem
from hotseat.verl.verl_keys import BY_NAME, OWN, Key, find

SWITCHES_OF_OURS = ("--print_config",)
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[\w.@/-]+)(?:=(?P<value>.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_INT, _FLOAT = re.compile(r"[-+]?\d[\d_]*"), re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(inf|nan)")
_WORDS = {"null": None, "true": True, "false": False}
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "text": "text", "list": "a list"}


@dataclass(frozen=True)
class Argument:
    """A key and its value, as written on the command line. rest: the path below the key, for one that is a section."""

    key: Key
    spelling: str
    rest: str
    value: Any


@dataclass
class HydraLine:
    """A parsed command line. Indexing it returns a key's value: the last one written, or verl's default."""

    arguments: dict[str, Argument] = field(default_factory=dict)  # by name and rest, in the order of their last use
    overridden: list[tuple[str, Any]] = field(default_factory=list)  # spelling, value
    removed: list[tuple[str, str]] = field(default_factory=list)  # keys after ~, and why they have no effect
    own: dict[str, Any] = field(default_factory=dict)  # keys of our own config
    print_config: bool = False

    def has(self, name: str) -> bool:
        return any(argument.key.name == name for argument in self.arguments.values())

    def __getitem__(self, name: str) -> Any:
        argument, key = self.arguments.get(name), BY_NAME[name]
        value = self._resolved(key.default if argument is None else argument.value, (name,))
        return _plain(value) if key.kind == "text" and _is_number(value) else value

    def section(self, name: str) -> dict[str, Any]:
        """Return the values below a section's key, nested as their paths are."""
        values: dict[str, Any] = {}
        for argument in self.arguments.values():
            if argument.key.name != name:
                continue
            value = self._resolved(argument.value, (name,))
            if not argument.rest:
                values = dict(value or {})
                continue
            node = values
            *path, leaf = argument.rest.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = value
        return values

    def spelling(self, name: str) -> str:
        """Return a key's name as this command line has it."""
        spellings = [argument.spelling for argument in self.arguments.values() if argument.key.name == name]
        return spellings[-1] if spellings else name

    def default(self, key: Key) -> Any:
        """Return verl's default of a key."""
        return self._resolved(key.default, ())

    def _resolved(self, value: Any, path: tuple[str, ...]) -> Any:
        """Replace `${a.b}` in a value by the values of these keys. path: keys that led here."""
        if isinstance(value, list):
            return [self._resolved(item, path) for item in value]
        if isinstance(value, Mapping):
            return {name: self._resolved(item, path) for name, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self._referred(whole[1], path)
        return _REFERENCE.sub(lambda match: _plain(self._referred(match[1], path)), value)

    def _referred(self, name: str, path: tuple[str, ...]) -> Any:
        key = BY_NAME[name].name
        argument = self.arguments.get(key)
        return self._resolved(BY_NAME[key].default if argument is None else argument.value, (*path, key))


def parse(argv: Sequence[str]) -> HydraLine:
    """Parse a command line, or raise one error with all of its problems."""
    line, problems = HydraLine(), []
    for token in argv:
        if token in SWITCHES_OF_OURS:
            line.print_config = True
        elif token.startswith("-"):
            problems.append(_option_problem(token))
        else:
            problems += _take(line, token)
    problems += _reference_problems(line)
    if not problems:
        problems += _kind_problems(line)
    if problems:
        raise ConfigError(problems)
    return line


def parse_value(text: str) -> Any:
    """Read a value in Hydra's syntax; ValueError says what is wrong with it."""
    reader = _Reader(text)
    value = reader.value(())
    reader.skip_spaces()
    if reader.at < len(text):
        left = text[reader.at :]
        if left.startswith(","):
            raise ValueError("is several values, a sweep: give one, or a list in brackets")
        raise ValueError(f"has {left!r} after its end: put it into quotes")
    return value


def nearest(name: str) -> str:
    """Return `did you mean ...` for an unknown key: one of the same leaf, a similar one, or the keys below it."""
    below = [known for known in BY_NAME if known.startswith(f"{name}.")]
    if below:
        return f"it is a section: give its keys one by one, such as {below[0]}"
    leaf = name.rpartition(".")[2]
    same = [known for known in BY_NAME if known.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(name, same, n=1, cutoff=0.0) if same else []
    close = close or difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else "--help lists all there are"


# --- one token --------------------------------------------------------------------------------------------------------


def _option_problem(token: str) -> Problem:
    name = token.partition("=")[0]
    if name in ("--config-name", "--config-path", "--config-dir", "-cn", "-cp", "-cd"):
        return Problem(name, "configs of your own are not read: give their keys as KEY=VALUE")
    if name in ("--cfg", "-c", "--info", "--resolve"):
        return Problem(name, "--print_config prints the config here")
    if name in ("--multirun", "-m"):
        return Problem(name, "one command is one run: start several")
    return Problem(token, "unknown option; a command line is made of KEY=VALUE, --print_config and --help")


def _take(line: HydraLine, token: str) -> list[Problem]:
    """Add an override to the line. Returns what is wrong with it."""
    match = _OVERRIDE.fullmatch(token)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        return [Problem("", f"{token!r} is not KEY=VALUE")]
    name = match["key"]
    if "@" in name or "/" in name:
        return [Problem(name, "groups of verl's config files are not read: give the keys that they set")]
    if name.startswith(OWN):
        return _take_own(line, name, match["value"])
    key = find(name)
    if key is None:
        return [Problem(name, f"unknown key; {nearest(name)}")]
    if match["sign"] == "~":
        return _remove(line, key, name)
    try:
        value = parse_value(match["value"])
    except ValueError as error:
        return [Problem(name, f"{match['value']!r} {error}")]
    used = next(each for each in key.names if name == each or name.startswith(f"{each}."))
    rest = name.removeprefix(used).removeprefix(".")
    at = f"{key.name}.{rest}" if rest else key.name
    before = line.arguments.pop(at, None)
    if before is not None and before.value != value:
        line.overridden.append((before.spelling, before.value))
    line.arguments[at] = Argument(key, name, rest, value)
    return []


def _take_own(line: HydraLine, name: str, text: str | None) -> list[Problem]:
    """Add a key of our own config to the line."""
    own = name.removeprefix(OWN)
    if not any(f"{own}.".startswith(f"{known}.") or known.startswith(f"{own}.") for known in valid_keys()):
        return [Problem(name, f"unknown key of our own config; {nearest_key(tuple(own.split('.')))}")]
    if text is None:
        return [Problem(name, f"cannot be removed: give {name}=null")]
    try:
        line.own[own] = parse_value(text)
    except ValueError as error:
        return [Problem(name, f"{text!r} {error}")]
    return []


def _remove(line: HydraLine, key: Key, name: str) -> list[Problem]:
    if key.effect == "mapped":
        return [Problem(f"~{name}", "a run needs its value: give one instead of removing the key")]
    line.removed.append((f"~{name}", key.because or "nothing here depends on it"))
    return []


# --- values -----------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads a value from a text, from `at` on."""

    def __init__(self, text: str):
        self._text = text
        self.at = 0

    def skip_spaces(self) -> None:
        while self._peek().isspace():
            self.at += 1

    def value(self, ends: tuple[str, ...]) -> Any:
        """Read one value, up to one of `ends` or, at the top, to the end of the text or a comma."""
        self.skip_spaces()
        first = self._peek()
        if first == "[":
            return list(self._items("]", self.value))
        if first == "{":
            return dict(self._items("}", self._entry))
        if first in ("'", '"'):
            return self._quoted(first)
        return self._plain(ends or (",",))

    def _peek(self) -> str:
        return self._text[self.at : self.at + 1]

    def _items(self, end: str, read: Any) -> Iterator[Any]:
        self.at += 1
        self.skip_spaces()
        while self._peek() != end:
            yield read((",", end))
            self.skip_spaces()
            if self._peek() == ",":
                self.at += 1
                self.skip_spaces()
            elif self._peek() != end:
                raise ValueError(f"has no {end} at its end")
        self.at += 1

    def _entry(self, ends: tuple[str, ...]) -> tuple[str, Any]:
        key = self.value((":", *ends))
        self.skip_spaces()
        if self._peek() != ":":
            raise ValueError("has an entry that is not key: value")
        self.at += 1
        return str(key), self.value(ends)

    def _quoted(self, quote: str) -> str:
        self.at += 1
        text = ""
        while (character := self._peek()) != quote:
            if not character:
                raise ValueError(f"has no {quote} at its end")
            if character == "\\" and self._text[self.at + 1 : self.at + 2] in (quote, "\\"):
                self.at += 1
                character = self._peek()
            text += character
            self.at += 1
        self.at += 1
        return text

    def _plain(self, ends: tuple[str, ...]) -> Any:
        start, depth = self.at, 0
        while (character := self._peek()) and (depth or character not in ends):
            depth += self._text.startswith("${", self.at)
            depth -= bool(depth and character == "}")
            self.at += 1
        return _scalar(self._text[start : self.at].strip())


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- references and kinds ---------------------------------------------------------------------------------------------


def _reference_problems(line: HydraLine) -> list[Problem]:
    """Find interpolations that are not `${a.b}` of a known key, or that lead back to themselves."""
    problems = []
    for argument in line.arguments.values():
        texts = [text for text in _texts(argument.value) if "${" in text]
        for text in texts:
            other = _REFERENCE.sub("", text)
            unknown = [name for name in _REFERENCE.findall(text) if name not in BY_NAME]
            if "${" in other:
                words = f"given {text!r}: of interpolations only ${{a.b}} is read: write the value"
                problems.append(Problem(argument.spelling, words))
            elif unknown:
                problems.append(Problem(argument.spelling, f"given {text!r}: unknown key; {nearest(unknown[0])}"))
            elif _returns(line, argument.key.name, ()):
                problems.append(Problem(argument.spelling, f"given {text!r}, which leads back to itself"))
    return problems


def _returns(line: HydraLine, name: str, path: tuple[str, ...]) -> bool:
    """Return whether the references of a key lead back to a key on their path."""
    if name in path:
        return True
    argument = line.arguments.get(name)
    value = BY_NAME[name].default if argument is None else argument.value
    references = [BY_NAME[each].name for text in _texts(value) for each in _REFERENCE.findall(text) if each in BY_NAME]
    return any(_returns(line, each, (*path, name)) for each in references)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _kind_problems(line: HydraLine) -> list[Problem]:
    problems = []
    for name, argument in line.arguments.items():
        if argument.rest:
            continue
        key, value = argument.key, line[name]
        is_unset = value is None and (key.default is None or key.is_optional or key.effect != "mapped")
        if not is_unset and not _fits_kind(key, value):
            shown = "null" if value is None else repr(value)
            problems.append(Problem(argument.spelling, f"given {shown}, must be {_expected(key)}"))
        elif key.is_section and value is not None and not isinstance(value, dict):
            problems.append(Problem(argument.spelling, f"given {value!r}, must be a mapping such as {{a: 1}}"))
    return problems


def _fits_kind(key: Key, value: Any) -> bool:
    fits = {
        "int": isinstance(value, int) and _is_number(value),
        "float": _is_number(value),
        "bool": isinstance(value, bool),
        "text": isinstance(value, str),
        "list": isinstance(value, list | str),
        "any": True,
    }
    return fits[key.kind]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expected(key: Key) -> str:
    return _EXPECTED[key.kind] + (" or null" if key.default is None or key.is_optional else "")


def refusals(line: HydraLine) -> list[tuple[str, Problem]]:
    """Return the keys that are refused with the value that they have, each with what was given and what would fit."""
    problems: list[tuple[str, Problem]] = []
    for name, argument in line.arguments.items():
        key = argument.key
        if key.refused is None:
            continue
        value = argument.value if argument.rest else line[name]
        if key.same_as is not None:
            fitting: tuple[Any, ...] = (line[key.same_as], None)
        elif key.is_section:
            fitting = () if argument.rest else (None, {})
        else:
            fitting = (line.default(key), *key.fits)
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in fitting):
            other = f", but {key.same_as} is {_plain(line[key.same_as])}" if key.same_as else ""
            problems.append((key.name, Problem(argument.spelling, f"given {_plain(value)}{other}: {key.refused}")))
    return problems
