"""Checks of a config beyond the types and ranges of its values.

`no_effect` finds options that were set but can change nothing, by what the schema says of each. `conflicts` finds
values that contradict each other: a function for each, in the file of its section. `missing` finds required options
that are unset; a config may be planned, explained and printed before it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable

from hotseat.config.conflicts import (  # noqa: F401
    agent_conflicts,
    algorithm_conflicts,
    data_conflicts,
    model_conflicts,
    placement_conflicts,
    reward_conflicts,
    training_conflicts,
)
from hotseat.config.conflicts.conflict_list import CONFLICTS
from hotseat.config.conflicts.missing_options import missing
from hotseat.config.schema import Config, conditions_of, tasks_of

__all__ = ["conflicts", "missing", "no_effect"]


def no_effect(config: Config, set_keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return (key, reason) of every option in `set_keys` that can change nothing, in their order."""
    return [(key, why) for key in set_keys if (why := _why_idle(config, key)) is not None]


def _why_idle(config: Config, key: str) -> str | None:
    tasks = tasks_of(key)
    if config.task not in tasks:
        return f"task is {config.task}; this is for {' or '.join(tasks)}"
    problems = (condition.problem(config, section) for section, condition in conditions_of(key))
    return next((problem for problem in problems if problem is not None), None)


def conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of values that contradict each other."""
    checks = [check for tasks, check in CONFLICTS if config.task in tasks.names]
    return [problem for check in checks for problem in check(config)]
