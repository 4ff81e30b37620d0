"""The list of conflicts. A function that finds one stands in the file of its section and is added by `@conflict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hotseat.config.annotations import ALL, Tasks
from hotseat.config.schema import Config

Problems = Iterator[tuple[str, str]]  # key, message
Check = Callable[[Config], Problems]

CONFLICTS: list[tuple[Tasks, Check]] = []


def conflict(tasks: Tasks = ALL) -> Callable[[Check], Check]:
    """Return a decorator that adds a function to the checks of configs of these tasks."""

    def add(check: Check) -> Check:
        CONFLICTS.append((tasks, check))
        return check

    return add
