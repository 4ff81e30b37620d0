"""`hotseat options`: the config tree as a list."""

from __future__ import annotations

import types
import typing
from typing import Any

from rich.console import Console
from rich.table import Table

from hotseat.config.load import fields_of
from hotseat.config.schema import Config
from hotseat.errors import UserError


def render(console: Console, section: str) -> int:
    """Print every key at or below a section, its type, default and meaning."""
    rows = [
        (key, info) for key, info in fields_of(Config) if not section or key == section or key.startswith(section + ".")
    ]
    if not rows:
        sections = ", ".join(dict.fromkeys(key.split(".")[0] for key, _ in fields_of(Config)))
        raise UserError(f"no option {section!r}; the sections are {sections}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("takes")
    table.add_column("default")
    table.add_column("meaning")
    for key, info in rows:
        table.add_row(key, describe_type(info), "" if info.default is None else str(info.default), info.description)
    console.print(table)
    return 0


def describe_type(info: Any) -> str:
    """What a field takes, in words."""
    return _words(info.annotation)


def _words(annotation: Any) -> str:
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(member) for member in members)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_words(member) for member in members if member is not type(None)))
    if origin is typing.Annotated:
        return _words(members[0])
    if origin is list or origin is tuple:
        return "list"
    if origin is dict or (isinstance(annotation, type) and hasattr(annotation, "model_fields")):
        return "mapping"
    return {int: "whole number", float: "number", bool: "true | false", str: "text"}.get(annotation, "value")
