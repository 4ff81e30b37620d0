"""Search for the cheapest combination of settings that reaches a goal, complete over the given choices.

Combinations are tried in the order of their cost. One that misses the goal does so in some steps; of the values that
are still open, only those that can change such a step lead on, so the search branches over the step that the fewest of
them can change. It misses no combination that reaches the goal, provided that a value changes only the steps in which
its roles work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]  # values by dotted keys of the config
Roles = frozenset[str]


@dataclass(frozen=True)
class Value:
    """One value of a choice."""

    cost: float  # how inconvenient it is for users
    settings: Settings
    roles: Roles  # in whose steps it may help


Choice = Sequence[Value]  # alternatives: a combination has at most one of them


def cheapest(choices: Sequence[Choice], missed: Callable[[Settings], Sequence[Roles]]) -> Settings | None:
    """Return the settings of least cost with which no step is missed; None if there are none.

    missed: the roles at work in each step that does not reach the goal with these settings.
    """
    # A combination is a sorted tuple of (choice, value); equal costs are tried in the order of the choices.
    waiting: list[tuple[float, tuple[tuple[int, int], ...]]] = [(0.0, ())]
    seen: set[tuple[tuple[int, int], ...]] = {()}
    while waiting:
        cost, combination = heapq.heappop(waiting)
        settings = {key: item for choice, value in combination for key, item in choices[choice][value].settings.items()}
        steps = missed(settings)
        if not steps:
            return settings
        taken = {choice for choice, _ in combination}
        still_open = [
            (choice, value) for choice, each in enumerate(choices) if choice not in taken for value in range(len(each))
        ]
        for choice, value in min(
            ([(c, v) for c, v in still_open if choices[c][v].roles & roles] for roles in steps), key=len
        ):
            further = tuple(sorted((*combination, (choice, value))))
            if further not in seen:
                seen.add(further)
                heapq.heappush(waiting, (cost + choices[choice][value].cost, further))
    return None
