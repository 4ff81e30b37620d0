"""Conversion of frozen dataclasses to plain JSON values and back, driven by their annotations."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_schemas: dict[type, tuple[tuple[str, Any], ...]] = {}


def _schema(cls: type) -> tuple[tuple[str, Any], ...]:
    if cls not in _schemas:
        hints = get_type_hints(cls)
        _schemas[cls] = tuple((field.name, hints[field.name]) for field in fields(cls) if field.init)
    return _schemas[cls]


def encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return {name: encode(getattr(value, name)) for name, _ in _schema(type(value))}


def decode(hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if hint is Any or origin is Literal or value is None:
        return value
    if origin is Union or origin is types.UnionType:
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        return decode(choices[0], value) if len(choices) == 1 else value
    if origin is tuple:
        inner = get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(decode(inner[0], item) for item in value)
        return tuple(decode(each, item) for each, item in zip(inner, value, strict=True))
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(**{name: decode(each, value[name]) for name, each in _schema(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return value
