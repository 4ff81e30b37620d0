"""Types of fields whose values are the names in a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hotseat.registry.backends import BACKENDS
from hotseat.registry.engines import ENGINES


@dataclass(frozen=True, eq=False)
class NameIn:
    """Marks a field whose values are the names in a table, as they are when a config is read."""

    table: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.table:
            raise PydanticCustomError("literal_error", "not a name in the table")
        return value


EngineName = Annotated[str, NameIn(ENGINES)]
BackendName = Annotated[str, NameIn(BACKENDS)]


def names_of(field: Any) -> list[str]:
    """List the names that a field with such a type takes; empty for other types."""
    return [name for mark in field.metadata if isinstance(mark, NameIn) for name in mark.table]
