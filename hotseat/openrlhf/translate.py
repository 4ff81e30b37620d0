"""Translation of a command line of OpenRLHF into our config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.cli.translation import KeyNames, Translation
from hotseat.config.load import valid_keys
from hotseat.openrlhf.argv import CommandLine, parse
from hotseat.openrlhf.config_draft import ConfigDraft
from hotseat.openrlhf.derive import DERIVED
from hotseat.openrlhf.flag import Flag
from hotseat.openrlhf.flags import TASKS


@dataclass(frozen=True)
class FlagTranslation(Translation):
    """A translated command line of OpenRLHF. secrets: environment variables for this process and no one else."""

    line: CommandLine = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)


def translate(command: str, argv: Sequence[str], env: Mapping[str, str]) -> FlagTranslation:
    """Translate a command line, or raise a ConfigError that names every flag that is wrong."""
    line = parse(command, argv)
    draft = ConfigDraft(line, env, task=TASKS[command])
    _fill(draft)
    names = _Flags(line)
    config, dropped = draft.config(names)
    return FlagTranslation(
        **draft.outcome(config, names), no_effect=_no_effect(draft, dropped, names), secrets=draft.secrets
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


def _no_effect(draft: ConfigDraft, dropped: Mapping[str, str], names: _Flags) -> list[tuple[str, str]]:
    """List flags without effect in the order of the command line, each once, then environment variables."""
    line = draft.line
    reasons: dict[str, str] = {}
    for before in line.overridden:
        reasons[str(before)] = f"{line.arguments[before.flag.name]} comes later"
    for argument in line.arguments.values():
        because = (
            draft.ignored.get(argument.spelling)
            or argument.flag.because
            or draft.why_dropped(argument.flag.sets, dropped)
        )
        if because:
            reasons[argument.spelling] = names.rename_keys(because)
    for name, because in draft.ignored.items():
        reasons.setdefault(name, because)
    return list(reasons.items())


class _Flags(KeyNames):
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

    def name_of(self, key: str) -> str:
        """Return the flag that sets a key, or the key itself if there is none."""
        at = key.partition("[")[0]
        return self._line.spelling(self._names[at]) if at in self._names else key

    def rename_keys(self, text: str) -> str:
        """Replace the keys in a message by flags, and name repeated ones once."""
        said = self._pattern.sub(lambda match: self.name_of(match[0]), text)
        said = re.sub(r"(--[\w.]+)(?:, \1| or \1| nor from \1)+", r"\1", said)
        # One flag takes all keys; of several, the last would count.
        first, *others = re.split(r"--allow-change ", said)
        return first + (f"--allow_change {''.join(others)}" if others else "")
