"""`hotseat options`: the config tree as a list.

A key has two lines or more: its values, default and tasks, then its meaning and its conditions. These are wrapped
to the terminal's width; keys, values and meanings are never cut, so that the list can be searched.
"""

from __future__ import annotations

import json
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any

from hotseat.config.annotations import ALL, NameIn, tables_of
from hotseat.config.load import fields_of
from hotseat.config.schema import Config, conditions_of, tasks_of
from hotseat.config.unsupported import UNSUPPORTED
from hotseat.errors import UserError

INDENT = " " * 4


def render(section: str, width: int) -> str:
    """Render the keys at or below a section as text, with meanings wrapped to `width` columns."""
    lines = []
    for option in options(section):
        default = "" if option["default"] is None else f" = {_as_yaml(option['default'])}"
        tasks = f" ({', '.join(option['tasks'])})" if option["tasks"] != list(ALL.names) else ""
        lines.append(f"{option['key']}: {option['takes']}{default}{tasks}")
        meaning = option["meaning"]
        if option["if"]:
            meaning += f" Only if {', and '.join(option['if'])}."
        if option["unsupported"]:
            meaning += f" Not part of this version: {option['unsupported']}."
        lines += textwrap.wrap(
            meaning,
            max(width, 20),
            initial_indent=INDENT,
            subsequent_indent=INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def render_json(section: str) -> str:
    """Render the keys at or below a section as JSON, an object per key."""
    return json.dumps(options(section), indent=2)


def options(section: str) -> list[dict[str, Any]]:
    """List the keys at or below a section, each with its values, default, tasks, meaning and conditions."""
    fields = list(fields_of(Config))
    rows = [(key, info) for key, info in fields if not section or key == section or key.startswith(section + ".")]
    if not rows:
        sections = ", ".join(dict.fromkeys(key.split(".")[0] for key, _ in fields))
        raise UserError(f"no option {section!r}; the sections are {sections}")
    return [
        {
            "key": key,
            "takes": _words(info.annotation, info.metadata),
            "default": list(info.default) if isinstance(info.default, tuple) else info.default,
            "meaning": _meaning(info),
            "tasks": list(tasks_of(key)),
            "if": list(dict.fromkeys(condition.words_at(at) for at, condition in conditions_of(key))),
            "unsupported": UNSUPPORTED.get(key),
        }
        for key, info in rows
    ]


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _meaning(info: Any) -> str:
    """Describe a field, and each of the names that it takes."""
    if typing.get_origin(info.annotation) is dict:
        return str(info.description)
    names = (f"{name}: {entry.summary}" for table in tables_of(info) for name, entry in table.items())
    return " ".join([info.description, *names])


def _words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values of a field in words."""
    for mark in metadata:
        if isinstance(mark, NameIn):
            return " | ".join(mark.table)
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(member) for member in members)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_words(member) for member in members if member is not type(None)))
    if origin is typing.Annotated:
        return _words(members[0], members[1:])
    if origin is list or origin is tuple:
        return "list"
    if origin is dict or (isinstance(annotation, type) and hasattr(annotation, "model_fields")):
        return "mapping"
    return {int: "whole number", float: "number", bool: "true | false", str: "text"}.get(annotation, "value")
