"""Look-ups in the tables."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from hotseat.errors import UserError

T = TypeVar("T")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


def table(*entries: N) -> dict[str, N]:
    """Return entries by their names, in this order."""
    return {entry.name: entry for entry in entries}


def entry_of(table: Mapping[str, T], name: str, what: str) -> T:
    """Return the entry of a name. Raises with the nearest valid one. what: an entry is called in the message."""
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"no {what} {name!r}: choose one of {', '.join(table)}{hint}")


def names_that(table: Mapping[str, Any], fact: str) -> list[str]:
    """List the names of the entries of which a fact is true."""
    return [name for name, entry in table.items() if getattr(entry, fact)]


def names_with(table: Mapping[str, Any], option: str) -> list[str]:
    """List the names of the entries that have an option."""
    return [name for name, entry in table.items() if option in entry.options]
