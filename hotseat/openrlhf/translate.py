"""Translation of a command line of OpenRLHF into our config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.config import Config, conflicts, to_yaml
from hotseat.config.load import valid_keys, validate
from hotseat.config.unsupported import unsupported
from hotseat.config.yaml_lines import Document, nested
from hotseat.errors import ConfigError, Problem
from hotseat.openrlhf.argv import CommandLine, FlagArgument, parse
from hotseat.openrlhf.config_draft import ConfigDraft
from hotseat.openrlhf.derive import DERIVED
from hotseat.openrlhf.flag import Flag
from hotseat.openrlhf.flags import TASKS


@dataclass(frozen=True)
class Translation:
    """A translated command line. config: without options that have no effect. yaml: the shortest that loads as it."""

    config: Config
    yaml: str
    no_effect: list[tuple[str, str]]  # flag or variable, why
    unsupported: list[tuple[str, str]]  # flag, feature
    missing: list[tuple[str, str]]  # required flag, message
    inventory: str | None
    line: CommandLine = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)  # environment variables for this process and no one else

    def in_flags(self, text: str) -> str:
        """Rewrite a message about the config with the flags of the command line."""
        return _Words(self.line).in_flags(text)


def translate(command: str, argv: Sequence[str], env: Mapping[str, str]) -> Translation:
    """Translate a command line, or raise a ConfigError that names every flag that is wrong."""
    line = parse(command, argv)
    draft = ConfigDraft(line, TASKS[command], env)
    _fill(draft)
    config, dropped = _effective(draft)
    words = _Words(line)
    problems = draft.problems + [
        Problem(words.flag_of(key), words.in_flags(message)) for key, message in conflicts.conflicts(config)
    ]
    if problems:
        raise ConfigError(problems)
    return Translation(
        config=config,
        yaml=to_yaml(config),
        no_effect=_no_effect(draft, dropped, words),
        unsupported=[(words.flag_of(key), words.in_flags(what)) for key, what in unsupported(config)],
        missing=[
            *((words.flag_of(key), words.in_flags(message)) for key, message in conflicts.missing(config)),
            *draft.missing,
        ],
        inventory=line["--inventory"],
        line=line,
        secrets=draft.secrets,
    )


def _fill(draft: ConfigDraft) -> None:
    """Set the draft's fields: OpenRLHF's defaults, then derived fields, then the flags in their order."""
    line = draft.line
    draft.fields["task"] = draft.task
    copied = [flag for flag in line.flags if flag.sets and flag.by is None]
    for flag in copied:
        default = flag.default_for(line.is_newer)
        if default is not None:
            _copy(draft, flag, default)
    for name in dict.fromkeys(["placement", *(flag.by for flag in line.flags if flag.by)]):
        DERIVED[name](draft)
    for argument in line.arguments.values():
        if argument.flag in copied:
            _copy(draft, argument.flag, argument.value)


def _copy(draft: ConfigDraft, flag: Flag, value: Any) -> None:
    if flag.choices is not None:
        value = flag.choices[value]
    if flag.convert is not None:
        value = flag.convert(value)
    for key in flag.sets:
        draft.fields[key] = value


def _effective(draft: ConfigDraft) -> tuple[Config, dict[str, str]]:
    """Return the config of the fields with an effect, and why the others have none. Adds problems to the draft."""
    dropped: dict[str, str] = {}
    words = _Words(draft.line)
    config, problems = validate(Document(nested(draft.fields)))
    draft.problems += [Problem(words.flag_of(problem.key), words.in_flags(problem.message)) for problem in problems]
    wrong = {problem.key for problem in problems}
    while True:
        left = {key: value for key, value in draft.fields.items() if key not in dropped and key not in wrong}
        config, _ = validate(Document(nested(left)))
        idle = conflicts.no_effect(config, left)
        if not idle:
            return config, dropped
        dropped |= dict(idle)


def _no_effect(draft: ConfigDraft, dropped: Mapping[str, str], words: _Words) -> list[tuple[str, str]]:
    """List flags without effect in the order of the command line, each once, then environment variables."""
    line = draft.line
    reasons: dict[str, str] = {}
    for before in line.overridden:
        reasons[str(before)] = f"{line.arguments[before.flag.name]} comes later"
    for argument in line.arguments.values():
        because = (
            draft.ignored.get(argument.spelling) or argument.flag.because or _dropped_because(argument, draft, dropped)
        )
        if because:
            reasons[argument.spelling] = words.in_flags(because)
    for name, because in draft.ignored.items():
        reasons.setdefault(name, because)
    return list(reasons.items())


def _dropped_because(argument: FlagArgument, draft: ConfigDraft, dropped: Mapping[str, str]) -> str | None:
    """Return why a flag has no effect, if none of the fields that it sets has one."""
    keys = [key for key in argument.flag.sets if key in draft.fields]
    return dropped[keys[0]] if keys and all(key in dropped for key in keys) else None


class _Words:
    """Translator of config keys into the flags of a command line."""

    def __init__(self, line: CommandLine):
        self._line = line
        self._names: dict[str, str] = {}
        for flag in line.flags:
            for key in flag.sets:
                self._names.setdefault(key, flag.name)
        for argument in line.arguments.values():
            for key in argument.flag.sets:
                self._names[key] = argument.flag.name
        known = sorted(valid_keys(), key=len, reverse=True)
        self._pattern = re.compile(
            # A key after --allow-change is not translated.
            "|".join(rf"(?<![\w.-])(?<!--allow-change ){re.escape(key)}(?![\w.])" for key in known if "." in key)
        )

    def flag_of(self, key: str) -> str:
        """Return the flag that sets a key, or the key itself if there is none."""
        at = key.partition("[")[0]
        return self._line.spelling(self._names[at]) if at in self._names else key

    def in_flags(self, text: str) -> str:
        """Replace the keys in a message by flags, and name repeated ones once."""
        said = self._pattern.sub(lambda match: self.flag_of(match[0]), text)
        said = re.sub(r"(--[\w.]+)(?:, \1| or \1| nor from \1)+", r"\1", said)
        # One flag takes all keys; of several, the last would count.
        first, *others = re.split(r"--allow-change ", said)
        return first + (f"--allow_change {''.join(others)}" if others else "")
