"""Translation of a command line of verl into our config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hotseat.cli.translation import KeyNames, Translation
from hotseat.config.load import valid_keys
from hotseat.verl.key_values import DERIVED, VerlDraft, idle_because
from hotseat.verl.overrides import HydraLine, parse, refusals
from hotseat.verl.verl_keys import KEYS, OWN


def translate(argv: Sequence[str], env: Mapping[str, str]) -> Translation:
    """Translate a command line, or raise a ConfigError that names every key that is wrong."""
    line = parse(argv)
    draft = VerlDraft(line, env)
    draft.problems += [problem for name, problem in refusals(line) if idle_because(line, name) is None]
    _fill(draft)
    names = _Keys(line)
    config, dropped = draft.config(names)
    return Translation(**draft.outcome(config, names), no_effect=_no_effect(draft, dropped, names))


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


def _no_effect(draft: VerlDraft, dropped: Mapping[str, str], names: _Keys) -> list[tuple[str, str]]:
    """List keys without effect in the order of the command line, each once."""
    line = draft.line
    reasons: dict[str, str] = {}
    for spelling, value in line.overridden:
        reasons[f"{spelling}={value}"] = f"{spelling} comes later"
    reasons |= dict(line.removed)
    for argument in line.arguments.values():
        key = argument.key
        because = draft.ignored.get(argument.spelling) or key.because or draft.why_dropped(key.sets, dropped)
        if because:
            reasons[argument.spelling] = names.rename_keys(because)
    for name in line.own:
        if name in dropped:
            reasons[f"{OWN}{name}"] = names.rename_keys(dropped[name])
    return list(reasons.items())


_OTHER_UNITS = ("batches", "overlong prompts")  # whose fields have values that their keys do not take


class _Keys(KeyNames):
    """Translator of our config's keys into those of a command line."""

    def __init__(self, line: HydraLine):
        self._names: dict[str, str] = {}
        on_line = [key for key in KEYS if line.has(key.name)]
        for key in (*on_line, *KEYS):  # in the order of the table, the key that is most about a field comes first
            for name in key.sets if key.by not in _OTHER_UNITS else ():
                self._names.setdefault(name, line.spelling(key.name))
        self._names |= {name: f"{OWN}{name}" for name in line.own}
        known = sorted((key for key in valid_keys() if "." in key), key=len, reverse=True)
        # A key of ours after our prefix is one already.
        self._pattern = re.compile("|".join(rf"(?<![\w.-]){re.escape(key)}(?![\w.])" for key in known))

    def name_of(self, key: str) -> str:
        """Return the key that sets a key of ours: verl's, or ours behind its prefix."""
        at = key.partition("[")[0]
        if at in self._names:
            return self._names[at]
        return f"{OWN}{key}" if key and not key.startswith(OWN) else key

    def rename_keys(self, text: str) -> str:
        """Replace the keys of our config in a message, and name repeated ones once."""
        said = self._pattern.sub(lambda match: self.name_of(match[0]), text)
        return re.sub(r"([\w.]+\.[\w.]+)(?:, \1| or \1| nor from \1)+(?![\w.])", r"\1", said)
