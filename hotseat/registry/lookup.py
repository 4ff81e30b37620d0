"""Tables of entries, and look-ups in them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from hotseat.errors import UserError


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


class Table(dict[str, N]):
    """Entries by their names, in their order. what: an entry is called in messages."""

    def __init__(self, what: str, *entries: N):
        super().__init__((entry.name, entry) for entry in entries)
        self._what = what

    def entry(self, name: str) -> N:
        """Return the entry of a name. Raises with the nearest valid one."""
        if name in self:
            return self[name]
        close = difflib.get_close_matches(name, self, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"no {self._what} {name!r}: choose one of {', '.join(self)}{hint}")


def names_that(table: Mapping[str, Any], fact: str) -> list[str]:
    """List the names of the entries of which a fact is true."""
    return [name for name, entry in table.items() if getattr(entry, fact)]


def names_with(table: Mapping[str, Any], option: str) -> list[str]:
    """List the names of the entries that have an option."""
    return [name for name, entry in table.items() if option in entry.options]
