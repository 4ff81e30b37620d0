"""A command line of another framework that becomes our config: its draft, the result, and what users read about it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.config import Config, conflicts, to_yaml
from hotseat.config.load import validate
from hotseat.config.unsupported import unsupported
from hotseat.config.yaml_lines import Document, nested
from hotseat.errors import ConfigError, Problem, UnsupportedError, UserError


class KeyNames(ABC):
    """Translator of our config's keys into the names of a command line."""

    @abstractmethod
    def name_of(self, key: str) -> str:
        """Return the name that sets a key."""

    @abstractmethod
    def rename_keys(self, text: str) -> str:
        """Replace the keys in a message by names, and say repeated ones once."""

    def pairs(self, keys: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Translate keys with messages about them."""
        return [(self.name_of(key), self.rename_keys(message)) for key, message in keys]


@dataclass
class CommandDraft:
    """A config under construction, with everything that is noted about the command line."""

    line: Any  # as parsed; has `has`, `spelling` and values by name
    env: Mapping[str, str]
    fields: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    ignored: dict[str, str] = field(default_factory=dict)  # name or variable -> why it has no effect
    problems: list[Problem] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # required name, message

    def ignore(self, because: str, *names: str) -> None:
        """Note that names have no effect, those of them that are on the command line."""
        for name in filter(self.line.has, names):
            self.ignored.setdefault(self.line.spelling(name), because)

    def refuse(self, name: str, message: str) -> None:
        problem = Problem(self.line.spelling(name), message)
        if problem not in self.problems:
            self.problems.append(problem)

    def at_least(self, name: str, least: int) -> int:
        """Return the number that a name has; note a problem if it is below `least`."""
        value = int(self.line[name])
        if value < least:
            self.refuse(name, f"given {value}, must be at least {least}")
        return max(value, least)

    def config(self, names: KeyNames) -> tuple[Config, dict[str, str]]:
        """Return the config of the fields that have an effect, and by key why the others have none.

        Raises a ConfigError with all problems, in the names of the command line.
        """
        dropped: dict[str, str] = {}
        config, problems = validate(Document(nested(self.fields)))
        wrong = {problem.key for problem in problems}
        while True:
            left = {key: value for key, value in self.fields.items() if key not in dropped and key not in wrong}
            config, _ = validate(Document(nested(left)))
            idle = conflicts.no_effect(config, left)
            if not idle:
                break
            dropped |= dict(idle)
        pairs = [*((problem.key, problem.message) for problem in problems), *conflicts.conflicts(config)]
        self.problems += [Problem(*pair) for pair in names.pairs(pairs)]
        if self.problems:
            raise ConfigError(self.problems)
        return config, dropped

    def why_dropped(self, keys: Sequence[str], dropped: Mapping[str, str]) -> str | None:
        """Return why what sets these keys has no effect; None if one of them has an effect."""
        keys = [key for key in keys if key in self.fields]
        return dropped[keys[0]] if keys and all(key in dropped for key in keys) else None

    def outcome(self, config: Config, names: KeyNames) -> dict[str, Any]:
        """Return the fields of a translation that all frameworks fill in alike."""
        return {
            "config": config,
            "yaml": to_yaml(config),
            "unsupported": names.pairs(unsupported(config)),
            "missing": [*names.pairs(conflicts.missing(config)), *self.missing],
            "line": self.line,
            "names": names,
        }


@dataclass(frozen=True)
class Translation:
    """A translated command line. config: without options that have no effect. yaml: the shortest that loads as it."""

    config: Config
    yaml: str
    no_effect: list[tuple[str, str]]  # name or variable, why
    unsupported: list[tuple[str, str]]  # name, feature
    missing: list[tuple[str, str]]  # required name, message
    line: Any = field(repr=False)
    names: KeyNames = field(repr=False)

    def rename_keys(self, text: str) -> str:
        """Rewrite a message about the config with the names of the command line."""
        return self.names.rename_keys(text)

    def show_no_effect(self) -> None:
        for name, because in self.no_effect:
            print(f"no effect here: {name} because {because}", file=sys.stderr)

    def check_prerequisites(self, more_missing: Iterable[tuple[str, str]] = ()) -> None:
        """Raise one error that lists everything that keeps the run from starting."""
        missing, text = [*self.missing, *more_missing], ""
        if missing:
            text = "this run cannot start:\n" + _listed(missing)
        if self.unsupported:
            text += "not part of this version:\n" + _listed(self.unsupported)
            text += "--print_config prints the config nevertheless"
        if text:
            raise (UserError if missing else UnsupportedError)(text.rstrip())


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f"  {name}: {text}\n" for name, text in pairs)
