"""Everything wrong with some rows, in one error."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hotseat.errors import DataError

_SHOWN = 5


class Problems:
    """Collects what is wrong, so that one attempt shows it all."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._num = 0

    def add(self, where: str, message: str) -> None:
        self._num += 1
        if self._num <= _SHOWN:
            self._first.append(f"{where}: {message}")

    def raise_if_any(self) -> None:
        if not self._num:
            return
        count = "1 problem" if self._num == 1 else f"{self._num} problems"
        more = f"\n  and {self._num - _SHOWN} more" if self._num > _SHOWN else ""
        raise DataError(f"{count} in the data:\n" + "\n".join(f"  {line}" for line in self._first) + more)


class BadValue(Exception):
    """A value of a row that cannot be used; the message starts with its key."""


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """The value under a key, which has to be there and not null."""
    if key not in values:
        near = get_close_matches(key, values, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BadValue(f"{key}: missing; {hint}the row has: {', '.join(map(str, values)) or 'nothing'}")
    if values[key] is None:
        raise BadValue(f"{key}: null")
    return values[key]


def text_of(values: Mapping[str, Any], key: str) -> str:
    """The string under a key, which has to have at least one character."""
    value = value_of(values, key)
    if not isinstance(value, str):
        hint = "; set data.apply_chat_template to render messages" if isinstance(value, list) else ""
        raise BadValue(f"{key}: {kind_of(value)}, not a string{hint}")
    if not value:
        raise BadValue(f"{key}: empty")
    return value


def kind_of(value: Any) -> str:
    """A word for a value's type, for people who wrote JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
