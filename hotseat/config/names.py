"""Types of fields whose values are the names in a table."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hotseat.registry.estimators import ESTIMATORS
from hotseat.registry.policy_losses import POLICY_LOSSES
from hotseat.registry.preference_losses import PREFERENCE_LOSSES


@dataclass(frozen=True, eq=False)
class NameIn:
    """Marks a field whose values are the names in a table, as they are when a config is read."""

    table: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.table:
            raise PydanticCustomError("literal_error", "not a name in the table")
        return value


EstimatorName = Annotated[str, NameIn(ESTIMATORS)]
PolicyLossName = Annotated[str, NameIn(POLICY_LOSSES)]
PreferenceLossName = Annotated[str, NameIn(PREFERENCE_LOSSES)]


def tables_of(field: Any) -> list[Mapping[str, Any]]:
    """List the tables whose names a field takes."""

    return list(_tables_in((field.annotation, *field.metadata)))


def _tables_in(parts: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for part in parts:
        if isinstance(part, NameIn):
            yield part.table
        else:
            yield from _tables_in(typing.get_args(part))


def names_of(field: Any) -> list[str]:
    """List the names that a field takes from tables; empty where it takes none."""
    return [name for table in tables_of(field) for name in table]
