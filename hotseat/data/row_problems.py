"""Problems of rows: values that cannot be used, collected into one error, and rows that limits drop or cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar

from hotseat.errors import DataError

T = TypeVar("T")

_SHOWN = 5  # problems in the message
_ROWS_SHOWN = 3  # rows named for each problem
_SHOWN_CHARACTERS = 200  # of a row that is dropped or cut


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


def from_rows(rows: Sequence[Any], make: Callable[..., T], *values: Sequence[Any]) -> list[T]:
    """Make something of each row and the values that belong to it. Raises one error with all problems of the rows."""
    problems, made = Problems(), []
    for row, *others in zip(rows, *values, strict=True):
        try:
            made.append(make(row, *others))
        except BadValue as error:
            problems.add(row.where, str(error))
    problems.raise_if_any()
    return made


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


# --- rows that limits on their tokens drop or cut, with the first of them as an example -------------------------------


@dataclass(frozen=True)
class LostRow:
    """A row that is dropped or cut: its values in the file, its text after the template, and its number of tokens."""

    where: str
    values: Mapping[str, Any]
    text: str
    num_tokens: int
    first_answer_token: int | None = None  # from 0; None: the row has no separate answer

    def __str__(self) -> str:
        answer = "" if self.first_answer_token is None else f", the answer from token {self.first_answer_token + 1} on"
        return (
            f"  {self.where} before: {_short(json.dumps(dict(self.values), ensure_ascii=False, default=str))}\n"
            f"  after the template, {self.num_tokens} tokens{answer}: {_short(repr(self.text))}"
        )


@dataclass
class RowReport:
    """Counts of rows that were kept, dropped and cut, with the first of those that a limit drops or cuts."""

    num_rows: int
    num_kept: int = 0
    num_no_answer: int = 0  # dropped: no token of an answer is left to learn
    num_identical: int = 0  # dropped: both answers of a pair are the same within the limit
    num_dropped: int = 0  # by the limit
    num_cut: int = 0
    longest: int = 0  # tokens
    first: LostRow | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # column that reward functions cannot get -> why

    @property
    def num_lost(self) -> int:
        return self.num_dropped + self.num_cut

    @property
    def example(self) -> str:
        """The first lost row on lines of its own, for a message; empty if there is none."""
        return "" if self.first is None else f"\n{self.first}"

    def add(self, make_row: Callable[[], LostRow], *, is_dropped: bool) -> None:
        """Count a lost row. make_row: describes it; called only for the first one, which messages show."""
        self.num_dropped += is_dropped
        self.num_cut += not is_dropped
        if self.first is None:
            self.first = make_row()


def check_lost(
    report: RowReport, *, source: str, limit: str, fix: str, max_fraction: float, warn_above: float
) -> list[str]:
    """Refuse data if a limit drops or cuts more than `max_fraction` of it; return a warning above `warn_above`.

    source: the key that names the data. limit: the key of the limit, with its value. fix: what to set instead.
    """
    share = report.num_lost / report.num_rows if report.num_rows else 0.0
    if share <= min(max_fraction, warn_above):
        return []
    parts = [f"{report.num_dropped:,} dropped"] if report.num_dropped else []
    parts += [f"{report.num_cut:,} cut"] if report.num_cut else []
    what = f"{report.num_lost:,} of {report.num_rows:,} rows ({share:.0%}) do not fit {limit}: {', '.join(parts)}"
    cure = f"{fix} (the longest row has {report.longest:,} tokens)"
    if share <= max_fraction:
        return [f"warning: {source}: {what}; {cure}. The first of them:{report.example}"]
    raise DataError(
        f"{source}: {what}; data.max_lost_fraction allows {max_fraction:.0%}. The first of them:{report.example}\n"
        f"{cure}, shorten the rows, or set data.max_lost_fraction to 1 if that is as it should be"
    )


def _short(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"
