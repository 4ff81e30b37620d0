"""Keys of channels and routes as text: the same in all processes for equal keys of a type, and different for others.

Neither `repr` nor a pickle is that: the first may have an address in it, the second depends on which of its parts are
one object, and on the order of sets.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
from typing import Any

from hotseat.errors import UserError

# Of each, the constructor's own `repr` says all.
_WITH_TEXT = (
    uuid.UUID,
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
)


def key_text(key: Any) -> str:
    """Return the text of a key; raise `UserError` for a key that has none."""
    for kind in (str, bool, int, float, bytes):
        if isinstance(key, kind):
            return kind.__repr__(key)  # also of subclasses, whose objects are equal to plain ones
    if key is None:
        return "None"
    if _is_numpys_scalar(key):
        return key_text(key.item())
    if isinstance(key, tuple):
        return f"({', '.join(map(key_text, key))})"
    if isinstance(key, list):
        return f"[{', '.join(map(key_text, key))}]"
    if isinstance(key, set | frozenset):
        return f"set({', '.join(sorted(map(key_text, key)))})"
    if isinstance(key, dict):
        return f"{{{', '.join(sorted(f'{key_text(name)}: {key_text(value)}' for name, value in key.items()))}}}"
    if isinstance(key, enum.Enum):
        return f"{_name_of(type(key))}.{key.name}"
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        fields = [field.name for field in dataclasses.fields(key) if field.compare]
        return f"{_name_of(type(key))}({', '.join(f'{name}={key_text(getattr(key, name))}' for name in fields)})"
    if isinstance(key, _WITH_TEXT):
        return f"{_name_of(type(key))} {key!r}"
    raise UserError(
        f"the key {key!r} is a {_name_of(type(key))}, which has no form that is the same in all processes: use text,"
        " numbers, bytes, an Enum, a UUID, a path, a date, or tuples, lists, sets, dicts and dataclasses of those"
    )


def _is_numpys_scalar(key: Any) -> bool:
    numpy = sys.modules.get("numpy")  # who has a scalar has loaded it
    # Some, such as long doubles, are no number of Python's.
    return numpy is not None and isinstance(key, numpy.generic) and not isinstance(key.item(), numpy.generic)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
