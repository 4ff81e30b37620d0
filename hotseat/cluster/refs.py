"""References to values that stay in the process that made them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
Value_co = TypeVar("Value_co", covariant=True)


class Ref(ABC, Generic[Value_co]):
    """Stands for a value that stays where it was made. Passed to a call of any group, it arrives as the value."""

    @abstractmethod
    def get(self, *, timeout_s: float = 600.0) -> Value_co:
        """Fetch the value to this process."""

    def as_argument(self) -> Value_co:
        """Return this reference itself, typed as the value that it arrives as when it is passed to a call."""
        return cast(Value_co, self)


def as_arguments(refs: Iterable[Ref[T]]) -> list[T]:
    """Return references, typed as the values that they arrive as when they are passed to a call."""
    return [ref.as_argument() for ref in refs]


def resolve(arguments: Any, timeout_s: float, depth: int = 2) -> Any:
    """Put values in the place of the `Ref`s among a call's arguments, and in lists, tuples and dicts among them."""
    if isinstance(arguments, Ref):
        return arguments.get(timeout_s=timeout_s)
    if depth and type(arguments) in (list, tuple):
        return type(arguments)([resolve(value, timeout_s, depth - 1) for value in arguments])
    if depth and type(arguments) is dict:
        return {key: resolve(value, timeout_s, depth - 1) for key, value in arguments.items()}
    return arguments
