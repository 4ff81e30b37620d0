"""Collection of the problems of rows into one error."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from hotseat.errors import DataError

_SHOWN = 5  # problems in the message
_ROWS_SHOWN = 3  # rows named for each problem


class Problems:
    """Collects problems, so that one error shows them all: each once, with the rows that have it."""

    def __init__(self) -> None:
        self._rows: dict[str, list[str]] = {}  # message -> rows that it applies to

    def add(self, where: str, message: str) -> None:
        self._rows.setdefault(message, []).append(where)

    def raise_if_any(self) -> None:
        if not self._rows:
            return
        lines = []
        for message, rows in list(self._rows.items())[:_SHOWN]:
            others = len(rows) - _ROWS_SHOWN
            lines.append(f"  {', '.join(rows[:_ROWS_SHOWN])}{f' and {others} more' if others > 0 else ''}: {message}")
        num_more = len(self._rows) - len(lines)
        if num_more:
            lines.append(f"  and {num_more} more")
        count = "1 problem" if len(self._rows) == 1 else f"{len(self._rows)} problems"
        raise DataError(f"{count} in the data:\n" + "\n".join(lines))


class BadValue(Exception):
    """A value of a row that cannot be used; the message starts with its key."""


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """Return the value under a key; a missing key or a null is a BadValue."""
    if key not in values:
        near = get_close_matches(key, values, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BadValue(f"{key}: missing; {hint}the row has: {', '.join(map(str, values)) or 'nothing'}")
    if values[key] is None:
        raise BadValue(f"{key}: null")
    return values[key]


def text_of(values: Mapping[str, Any], key: str) -> str:
    """Return the string under a key; anything else, or an empty string, is a BadValue."""
    value = value_of(values, key)
    if not isinstance(value, str):
        hint = "; set data.apply_chat_template to render messages" if isinstance(value, list) else ""
        raise BadValue(f"{key}: {kind_of(value)}, not a string{hint}")
    if not value:
        raise BadValue(f"{key}: empty")
    return value


def kind_of(value: Any) -> str:
    """Return the name of a value's type in JSON's terms."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
