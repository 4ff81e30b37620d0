"""A user-defined class in the processes of its component: a step between rollout and update.

    class Lengths:
        def __init__(self, longest): ...                      # components.NAME.kwargs
        def run(self, groups): ...                            # a GroupChange or None for each PromptGroup
        def offload(self): ...                                # optional, both or none: give device memory up, and
        def onload(self): ...                                 # take it again
        def close(self): ...                                  # optional

Each process gets whole groups, in a fixed order; RANK and WORLD_SIZE are in its environment.
"""

from __future__ import annotations

import inspect
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hotseat.errors import RunError
from hotseat.loop.devices.held_memory import DeviceWorker, release_cache_here
from hotseat.loop.workers.experience import Share, groups_of
from hotseat.types import GroupChange, Moved, PromptGroup
from hotseat.user_functions import described, load_component

_OWN_METRICS = ("groups", "dropped")  # recorded for every component


@dataclass(frozen=True)
class ComponentSettings:
    """A custom component. path: `FILE.py:CLASS` or `package.module:CLASS`."""

    name: str
    path: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class ComponentWorker(DeviceWorker):
    """One process of a component."""

    def __init__(self, settings: ComponentSettings):
        self._settings = settings
        self._class = load_component(settings.path)
        self._component = self._carry_out("its constructor", lambda: self._class(**settings.kwargs))

    def change(self, shares: Sequence[Share]) -> list[GroupChange | None]:
        """Return the component's decision about each group of these shares, in order."""
        groups = groups_of(shares)
        changes = self._carry_out("run", lambda: self._component.run(groups)) if groups else []
        if not isinstance(changes, Sequence) or len(changes) != len(groups):
            count = f"{len(changes)} results" if isinstance(changes, Sequence) else type(changes).__name__
            raise RunError(f"{self._name}: run returned {count} for {len(groups)} groups: return a list, one for each")
        return [
            None if change is None else self._checked(group, change)
            for group, change in zip(groups, changes, strict=True)
        ]

    def _carry_out(self, what: str, call: Callable[[], Any]) -> Any:
        """Call the user's code; an exception of it becomes an error that names the component."""
        try:
            return call()
        except Exception as error:
            file = Path(inspect.getfile(self._class))
            raise RunError(f"{self._name}: {what} raised {described(error, file)}") from error

    @property
    def _name(self) -> str:
        return f"components.{self._settings.name} ({self._settings.path})"

    def _checked(self, group: PromptGroup, change: Any) -> GroupChange:
        where = f"{self._name}, prompt {group.prompt.index}"
        if not isinstance(change, GroupChange):
            raise RunError(f"{where}: run returned {type(change).__name__}: return hotseat.GroupChange(...) or None")
        if change.drop is not None and not (isinstance(change.drop, str) and change.drop):
            raise RunError(f"{where}: drop is {change.drop!r}: give the reason in words, or None to keep the group")
        rewards = None if change.rewards is None else self._checked_rewards(group, change.rewards, where)
        metrics = change.metrics
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            raise RunError(f"{where}: metrics are {metrics!r}: return a mapping from names to numbers")
        wrong = {name: value for name, value in metrics.items() if not _is_finite(value)}
        if wrong:
            raise RunError(f"{where}: metrics {wrong}: they must be finite numbers")
        taken = [name for name in _OWN_METRICS if name in metrics]
        if taken:
            raise RunError(f"{where}: {taken[0]} is a metric of every component: choose another name")
        return replace(change, rewards=rewards, metrics={name: float(value) for name, value in metrics.items()})

    def _checked_rewards(self, group: PromptGroup, values: Any, where: str) -> tuple[float, ...]:
        try:
            rewards = list(values)
        except TypeError:
            raise RunError(f"{where}: rewards are {values!r}: return a list, one for each sample") from None
        if len(rewards) != len(group.samples):
            raise RunError(f"{where}: {len(rewards)} rewards for {len(group.samples)} samples")
        if not all(_is_finite(reward) for reward in rewards):
            raise RunError(f"{where}: rewards {rewards}: they must be finite numbers")
        if any(sample.turn_rewards for sample in group.samples):
            raise RunError(
                f"{where}: its samples have rewards of single turns, which the rewards of a component cannot"
                " replace: leave rewards out, or use an estimator that learns from whole episodes"
            )
        return tuple(float(reward) for reward in rewards)

    # --- devices ------------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[Any], keep_weights: bool = True) -> Moved:
        """Have the component give up its device memory."""
        return self._move("offload")

    def onload(self, parts: Sequence[Any]) -> Moved:
        """Have the component take its device memory again."""
        return self._move("onload")

    def _move(self, name: str) -> Moved:
        method = getattr(self._component, name, None)
        started_s, before = time.monotonic(), _allocated_bytes()
        if method is not None:
            self._carry_out(name, method)
        release_cache_here()
        num_bytes = abs(_allocated_bytes() - before)
        return Moved(num_bytes, num_bytes, (time.monotonic() - started_s) * 1e3)

    def close(self) -> None:
        close = getattr(self._component, "close", None)
        if callable(close):
            close()


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
