"""From a command line of OpenRLHF's to our config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.cli.openrlhf.argv import Given, Line, parse
from hotseat.cli.openrlhf.derive import DERIVED, Draft
from hotseat.cli.openrlhf.flags import TASKS, Flag
from hotseat.config import Config, checks, to_yaml
from hotseat.config.built import not_built, value_at
from hotseat.config.load import valid_keys, validate
from hotseat.config.yaml_lines import Document
from hotseat.errors import ConfigError, Problem


@dataclass(frozen=True)
class Translation:
    """What a command line asks for. `config` holds only what has an effect; `yaml` is the shortest that loads as it."""

    config: Config
    yaml: str
    no_effect: list[tuple[str, str]]  # flag or variable, why
    not_built: list[tuple[str, str]]  # flag, feature
    missing: list[tuple[str, str]]  # flag, what a run cannot start without
    inventory: str | None
    line: Line = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)  # environment variables for this process and no one else

    def in_flags(self, text: str) -> str:
        """A message about the config in the words of the command line."""
        return _Words(self.line).in_flags(text)


def translate(command: str, argv: Sequence[str], env: Mapping[str, str]) -> Translation:
    """Translate a command line, or raise a ConfigError that names every flag that is wrong."""
    line = parse(command, argv)
    draft = Draft(line, TASKS[command], env)
    _fill(draft)
    config, dropped = _effective(draft)
    keys = [key for key in draft.fields if key not in dropped]
    words = _Words(line)
    problems = draft.problems + [
        Problem(words.flag_of(key), words.in_flags(message)) for key, message in checks.conflicts(config)
    ]
    if problems:
        raise ConfigError(problems)
    return Translation(
        config=config,
        yaml=to_yaml(config),
        no_effect=_no_effect(draft, dropped, words),
        not_built=_not_built(draft, config, keys, words),
        missing=[
            *((words.flag_of(key), words.in_flags(message)) for key, message in checks.missing(config)),
            *draft.missing,
        ],
        inventory=line["--inventory"],
        line=line,
        secrets=draft.secrets,
    )


def _fill(draft: Draft) -> None:
    """Every field: OpenRLHF's defaults, then what flags mean together, then what was given, in its order."""
    line = draft.line
    draft.fields["task"] = draft.task
    copied = [flag for flag in line.flags if flag.sets and flag.by is None]
    for flag in copied:
        default = flag.default_for(line.is_newer)
        if default is not None:
            _copy(draft, flag, default)
    for name in dict.fromkeys(["placement", *(flag.by for flag in line.flags if flag.by)]):
        DERIVED[name](draft)
    for given in line.given.values():
        if given.flag in copied:
            _copy(draft, given.flag, given.value)


def _copy(draft: Draft, flag: Flag, value: Any) -> None:
    if flag.choices is not None:
        value = flag.choices[value]
    if flag.convert is not None:
        value = flag.convert(value)
    for key in flag.sets:
        draft.fields[key] = value


def _effective(draft: Draft) -> tuple[Config, dict[str, str]]:
    """The config of what has an effect, and (key, why) of the rest. Values that do not fit become problems."""
    dropped: dict[str, str] = {}
    words = _Words(draft.line)
    config, problems = validate(Document(_tree(draft.fields)))
    draft.problems += [Problem(words.flag_of(found.key), words.in_flags(found.message)) for found in problems]
    wrong = {found.key for found in problems}
    while True:
        left = {key: value for key, value in draft.fields.items() if key not in dropped and key not in wrong}
        config, _ = validate(Document(_tree(left)))
        found = checks.no_effect(config, left)
        if not found:
            return config, dropped
        dropped |= dict(found)


def _tree(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in fields.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


def _no_effect(draft: Draft, dropped: Mapping[str, str], words: _Words) -> list[tuple[str, str]]:
    """Flags in the order given, each once, then variables."""
    line = draft.line
    found: dict[str, str] = {}
    for before in line.overridden:
        found[str(before)] = f"{line.given[before.flag.name]} comes later"
    for given in line.given.values():
        because = draft.ignored.get(given.spelling) or given.flag.because or _dropped_because(given, draft, dropped)
        if because:
            found[given.spelling] = words.in_flags(because)
    for name, because in draft.ignored.items():
        found.setdefault(name, because)
    return list(found.items())


def _dropped_because(given: Given, draft: Draft, dropped: Mapping[str, str]) -> str | None:
    """Why nothing that a flag sets has an effect."""
    keys = [key for key in given.flag.sets if key in draft.fields]
    return dropped[keys[0]] if keys and all(key in dropped for key in keys) else None


def _not_built(draft: Draft, config: Config, keys: Iterable[str], words: _Words) -> list[tuple[str, str]]:
    """Each by the flag that asked for it, given or by its default."""
    line = draft.line
    found = {given.spelling: given.flag.not_built for given in line.given.values() if given.flag.not_built}
    for key, what in not_built(config, keys):
        if key == "task":
            found.setdefault(line.command, what)
            continue
        name = words.flag_of(key)
        is_given = any(given.spelling == name for given in line.given.values())
        name = name if is_given else f"{name} ({value_at(config, key)} by default)"
        found.setdefault(name, words.in_flags(what))
    return list(found.items())


class _Words:
    """Config keys in the words of the user's flags."""

    def __init__(self, line: Line):
        self._line = line
        self._names: dict[str, str] = {}
        for flag in line.flags:
            for key in flag.sets:
                self._names.setdefault(key, flag.name)
        for given in line.given.values():
            for key in given.flag.sets:
                self._names[key] = given.flag.name
        known = sorted(valid_keys(), key=len, reverse=True)
        self._pattern = re.compile(
            # What --allow-change takes stays a key.
            "|".join(rf"(?<![\w.-])(?<!--allow-change ){re.escape(key)}(?![\w.])" for key in known if "." in key)
        )

    def flag_of(self, key: str) -> str:
        """The flag that sets a key, or the key."""
        at = key.partition("[")[0]
        return self._line.spelling(self._names[at]) if at in self._names else key

    def in_flags(self, text: str) -> str:
        """A message with flags instead of keys, each named once."""
        said = self._pattern.sub(lambda match: self.flag_of(match[0]), text)
        return re.sub(r"(--[\w.]+)(?:, \1| or \1| nor from \1)+", r"\1", said)
