"""The config under construction that functions of `derive.py` fill from a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotseat.errors import Problem
from hotseat.openrlhf.argv import CommandLine


@dataclass
class ConfigDraft:
    """A config under construction, with everything that is noted about the command line."""

    line: CommandLine
    task: str
    env: Mapping[str, str]
    fields: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    ignored: dict[str, str] = field(default_factory=dict)  # flag or variable -> why it has no effect
    problems: list[Problem] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)  # required flag, message
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # environment variables

    def ignore(self, name: str, because: str) -> None:
        """Note that a flag has no effect, if it is on the command line."""
        if self.line.has(name):
            self.ignored.setdefault(self.line.spelling(name), because)

    def refuse(self, name: str, message: str) -> None:
        problem = Problem(self.line.spelling(name), message)
        if problem not in self.problems:
            self.problems.append(problem)

    def named(self, name: str) -> str:
        return self.line.spelling(name)

    def at_least(self, name: str, least: int) -> int:
        """Return a flag's number; note a problem if it is below `least`."""
        value = int(self.line[name])
        if value < least:
            self.refuse(name, f"given {value}, must be at least {least}")
        return max(value, least)

    def number_from(self, variable: str) -> int | None:
        """Read a count from an environment variable; note a problem if it is none. (OpenRLHF fails on it later.)"""
        text = self.env.get(variable, "").strip()
        if not text:
            return None
        if not text.isascii() or not text.isdecimal() or int(text) < 1:
            self.problems.append(Problem(variable, f"given {text!r}, must be a whole number of at least 1"))
            return None
        return int(text)
