"""VerlTranslation of a command line of verl into our config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotseat.config import Config, conflicts, to_yaml
from hotseat.config.load import valid_keys, validate
from hotseat.config.unsupported import unsupported
from hotseat.config.yaml_lines import Document, nested
from hotseat.errors import ConfigError, Problem
from hotseat.verl.key_values import DERIVED, VerlDraft, idle_because
from hotseat.verl.overrides import HydraLine, parse, refusals
from hotseat.verl.verl_keys import KEYS, OWN, Key


@dataclass(frozen=True)
class VerlTranslation:
    """A translated command line. config: without options that have no effect. yaml: the shortest that loads as it."""

    config: Config
    yaml: str
    no_effect: list[tuple[str, str]]  # key, why
    unsupported: list[tuple[str, str]]  # key, feature
    missing: list[tuple[str, str]]  # required key, message
    line: HydraLine = field(repr=False)

    def in_keys(self, text: str) -> str:
        """Rewrite a message about the config with the keys of the command line."""
        return _Words(self.line).in_keys(text)


def translate(argv: Sequence[str], env: Mapping[str, str]) -> VerlTranslation:
    """Translate a command line, or raise a ConfigError that names every key that is wrong."""
    line = parse(argv)
    draft = VerlDraft(line, env)
    draft.problems += [problem for name, problem in refusals(line) if idle_because(line, name) is None]
    _fill(draft)
    config, dropped = _effective(draft)
    words = _Words(line)
    problems = draft.problems + [
        Problem(words.key_of(key), words.in_keys(message)) for key, message in conflicts.conflicts(config)
    ]
    if problems:
        raise ConfigError(problems)
    return VerlTranslation(
        config=config,
        yaml=to_yaml(config),
        no_effect=_no_effect(draft, dropped, words),
        unsupported=[(words.key_of(key), words.in_keys(what)) for key, what in unsupported(config)],
        missing=[
            *((words.key_of(key), words.in_keys(message)) for key, message in conflicts.missing(config)),
            *draft.missing,
        ],
        line=line,
    )


def _fill(draft: VerlDraft) -> None:
    """Set the draft's fields: those that are copied, then derived ones, then those of our own keys."""
    for key in KEYS:
        if not key.sets or key.by is not None:
            continue
        value = draft.line[key.name]
        value = value if key.convert is None else key.convert(value)
        if value is not None or key.is_optional:
            draft.fields |= dict.fromkeys(key.sets, value)
    for derive in DERIVED.values():
        derive(draft)
    for name, value in draft.line.own.items():
        for below in [each for each in draft.fields if each.startswith(f"{name}.")]:
            del draft.fields[below]  # a section as a whole
        if value is not None or name in valid_keys():  # null clears a section
            draft.fields[name] = value


def _effective(draft: VerlDraft) -> tuple[Config, dict[str, str]]:
    """Return the config of the fields with an effect, and why the others have none. Adds problems to the draft."""
    dropped: dict[str, str] = {}
    words = _Words(draft.line)
    config, problems = validate(Document(nested(draft.fields)))
    draft.problems += [Problem(words.key_of(problem.key), words.in_keys(problem.message)) for problem in problems]
    wrong = {problem.key for problem in problems}
    while True:
        left = {key: value for key, value in draft.fields.items() if key not in dropped and key not in wrong}
        config, _ = validate(Document(nested(left)))
        idle = conflicts.no_effect(config, left)
        if not idle:
            return config, dropped
        dropped |= dict(idle)


def _no_effect(draft: VerlDraft, dropped: Mapping[str, str], words: _Words) -> list[tuple[str, str]]:
    """List keys without effect in the order of the command line, each once."""
    line = draft.line
    reasons: dict[str, str] = {}
    for spelling, value in line.overridden:
        reasons[f"{spelling}={value}"] = f"{spelling} comes later"
    reasons |= dict(line.removed)
    for argument in line.arguments.values():
        key = argument.key
        because = draft.ignored.get(argument.spelling) or key.because or _dropped_because(key, draft, dropped)
        if because:
            reasons[argument.spelling] = words.in_keys(because)
    for name in line.own:
        if name in dropped:
            reasons[f"{OWN}{name}"] = words.in_keys(dropped[name])
    return list(reasons.items())


def _dropped_because(key: Key, draft: VerlDraft, dropped: Mapping[str, str]) -> str | None:
    """Return why a key has no effect, if none of the fields that it sets has one."""
    keys = [name for name in key.sets if name in draft.fields]
    return dropped[keys[0]] if keys and all(name in dropped for name in keys) else None


_OTHER_UNITS = ("batches", "overlong prompts")  # whose fields have values that their keys do not take


class _Words:
    """Translator of our config's keys into those of a command line."""

    def __init__(self, line: HydraLine):
        self._names: dict[str, str] = {}
        given = [key for key in KEYS if line.has(key.name)]
        for key in (*given, *KEYS):  # in the order of the table, the key that is most about a field comes first
            for name in key.sets if key.by not in _OTHER_UNITS else ():
                self._names.setdefault(name, line.spelling(key.name))
        self._names |= {name: f"{OWN}{name}" for name in line.own}
        known = sorted((key for key in valid_keys() if "." in key), key=len, reverse=True)
        # A key of ours after our prefix is one already.
        self._pattern = re.compile("|".join(rf"(?<![\w.-]){re.escape(key)}(?![\w.])" for key in known))

    def key_of(self, key: str) -> str:
        """Return the key that sets a key of ours: verl's, or ours behind its prefix."""
        at = key.partition("[")[0]
        if at in self._names:
            return self._names[at]
        return f"{OWN}{key}" if key and not key.startswith(OWN) else key

    def in_keys(self, text: str) -> str:
        """Replace the keys of our config in a message, and name repeated ones once."""
        said = self._pattern.sub(lambda match: self.key_of(match[0]), text)
        return re.sub(r"([\w.]+\.[\w.]+)(?:, \1| or \1| nor from \1)+(?![\w.])", r"\1", said)
