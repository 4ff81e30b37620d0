"""Annotations of the options of the schema: names in tables as values, tasks, and changes when a run resumes.

The conditions under which it has an effect, which stand there too, are in `conditions.py`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from hotseat.registry.backends import BACKENDS
from hotseat.registry.correction_kinds import CORRECTIONS
from hotseat.registry.divergences import DIVERGENCES
from hotseat.registry.engines import ENGINES
from hotseat.registry.estimators import ESTIMATORS
from hotseat.registry.policy_losses import POLICY_LOSSES
from hotseat.registry.preference_losses import PREFERENCE_LOSSES
from hotseat.registry.roles import ROLES
from hotseat.registry.runtimes import RUNTIMES
from hotseat.registry.tasks import TASKS, TaskEntry


@dataclass(frozen=True)
class InTasks:
    """The tasks in which an option, or a section without its exceptions, has an effect."""

    holds: Callable[[TaskEntry], bool]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, entry in TASKS.items() if self.holds(entry))


ALL = InTasks(lambda task: True)
RL = InTasks(lambda task: task.has_rollouts)
SFT = InTasks(lambda task: task.rows == "examples")
PAIRS = InTasks(lambda task: task.rows == "pairs")
RM = InTasks(lambda task: task.has_scalar_head)
DPO = InTasks(lambda task: task.compares_answers)
RL_OR_SFT = InTasks(lambda task: task.rows != "pairs")
RL_OR_DPO = InTasks(lambda task: task.has_rollouts or task.compares_answers)


class MayChange(Enum):
    """The subject of an option, or of a section, that may have another value when a run resumes.

    The first four change what is learned from the next step on; the others change only placement, speed or output.
    """

    LEARNING_RATE = "learning rate and schedule"
    KL = "KL coefficient"
    STEPS = "number of steps"
    PASSES = "number of steps in sft, rm and dpo"  # in rl, passes over a rollout are part of the algorithm
    EVALUATION = "evaluation"
    LOGGING = "logging"
    CHECKPOINTS = "checkpoint policy"
    PLACEMENT = "placement"
    SIMULATORS = "simulators"
    ENGINE = "engine"
    ADDRESSES = "addresses"  # servers and interpreters move; that they score alike is up to the user
    MICRO_BATCHES = "micro-batches"
    RECOMPUTATION = "recomputation"
    LIMITS = "limits and warnings"


class Acts(Enum):
    """When an option acts, or a section without its exceptions: samples stay as they are if it does so afterwards.

    An option without it acts while sampling. Of several around an option, the innermost counts.
    """

    WHILE_SAMPLING = "while sampling"
    AFTER_SAMPLING = "after sampling"


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
CorrectionName = Annotated[str, NameIn(CORRECTIONS)]
DivergenceName = Annotated[str, NameIn(DIVERGENCES)]
EngineName = Annotated[str, NameIn(ENGINES)]
BackendName = Annotated[str, NameIn(BACKENDS)]
RoleName = Annotated[str, NameIn(ROLES)]
RuntimeName = Annotated[str, NameIn(RUNTIMES)]
TaskName = Annotated[str, NameIn(TASKS)]


def tables_of(field: Any) -> list[Mapping[str, Any]]:
    """List the tables whose names a field takes."""
    return [each.table for each in _leaves((field.annotation, *field.metadata)) if isinstance(each, NameIn)]


def words_of(field: Any) -> list[str]:
    """List the words that a field takes, or what is in its values: names in tables, and literals."""
    words: list[str] = []
    for each in _leaves((field.annotation, *field.metadata)):
        if isinstance(each, NameIn):
            words.extend(each.table)
        elif typing.get_origin(each) is typing.Literal:
            words.extend(map(str, typing.get_args(each)))
    return words


def _leaves(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield literals, and whatever else in these annotations contains no other."""
    for part in parts:
        members = typing.get_args(part)
        if not members or typing.get_origin(part) is typing.Literal:
            yield part
        else:
            yield from _leaves(members)
