"""Columns of rows for reward functions that are called by names: which values they can get, and as what."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from hotseat.data.row_problems import kind_of
from hotseat.data.rows import Row


class NotPassed(Exception):
    """A value that reward functions cannot get; the message says what it is."""


def columns_of(rows: Sequence[Row], image_key: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the columns that can be passed, in the order in which rows have them, and why others cannot be.

    A column is left out if any row has a value in it that cannot be passed: the reason names the first of them.
    image_key: the column of images, which is neither.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row.values) if name != image_key]
    left_out: dict[str, str] = {}
    for name in names:
        for row in rows:
            try:
                passed(row.values.get(name))
            except NotPassed as error:
                left_out[name] = f"{row.where} has {error}"
                break
    return [name for name in names if name not in left_out], left_out


def passed(value: Any) -> Any:
    """Return a value as reward functions get it: of Python's own types, and in lists and dicts of them."""
    if value is None or isinstance(value, str | int | float | Decimal):
        return value
    if isinstance(value, list | tuple):
        return [passed(each) for each in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise NotPassed("an object with a key that is no text")
        return {key: passed(each) for key, each in value.items()}
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        return _python_value(value)
    return _moment(value)


def _python_value(value: np.ndarray | np.generic) -> Any:
    """Return what numpy has as numbers, texts, dates and lists of them."""
    if value.dtype.kind in "mM":
        value = value.astype(f"{value.dtype.kind}8[us]")  # what Python has; of others numpy would give whole numbers
    plain = value.tolist()
    if isinstance(plain, np.ndarray | np.generic):
        raise NotPassed(f"a {value.dtype} of numpy")
    return passed(plain)


def _moment(value: Any) -> date | time | timedelta | None:
    """Return a date, time or duration of Python's own types, of which pandas has others with nanoseconds."""
    if isinstance(value, timedelta | datetime) and value != value:
        return None  # NaT of pandas
    if isinstance(value, timedelta):
        return timedelta(value.days, value.seconds, value.microseconds)
    for kind in (datetime, date, time):
        if isinstance(value, kind):
            return kind.fromisoformat(value.isoformat())
    raise NotPassed(kind_of(value))
