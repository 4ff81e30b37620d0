"""Inputs of the checks of a stage, and the one error that their problems become."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hotseat.config import Config
from hotseat.errors import Problem, UnsupportedError, UserError
from hotseat.placement.plan_types import Plan


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """A config to check.

    optional: keys that a run must set, but this command need not. show: called with a line on what is tried now.
    notes: for the user, to which checks may add.
    """

    config: Config
    optional: Collection[str] = ()
    show: Callable[[str], object] = str  # which does nothing
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PlanContext(CheckContext):
    """A config with its plan, for the devices of this machine or those that the config names."""

    plan: Plan


@dataclass(frozen=True, kw_only=True)
class TokenizerContext(CheckContext):
    """A config with the actor's tokenizer."""

    tokenizer: Any


@dataclass(frozen=True, kw_only=True)
class DataContext(CheckContext):
    """A config with the prompts to learn from, and those to evaluate on."""

    prompts: Sequence[Any]  # of hotseat.types.Prompt, which imports torch
    eval_prompts: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class TrainingContext(CheckContext):
    """A config with the options of the backends that train, and the number of steps."""

    options: Sequence[Any]  # of hotseat.train.backend.TrainOptions, which imports torch
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class RanksContext(CheckContext):
    """A config with the number of ranks that a launcher started."""

    num_launched: int


@dataclass(frozen=True, kw_only=True)
class DeviceContext(CheckContext):
    """A config for devices that are known."""

    on_gpu: bool


C = TypeVar("C", bound=CheckContext)
Check = Callable[[C], Iterable[Problem]]
Stage = Sequence[Check[C]]


@dataclass(frozen=True)
class Unsupported(Problem):
    """A feature that is asked for and that this version does not have."""


def problem_of(key: str, text: str | None) -> Iterator[Problem]:
    """Yield the problem of a key; none without a text."""
    if text is not None:
        yield Problem(key, text)


def run_checks(context: C, *stages: Stage[C]) -> None:
    """Run stages in order. Raises one error with all problems of the first stage that has any.

    A check may also call what raises `UserError` itself; if that is the only problem, the error passes as it is.
    """
    for stage in stages:
        problems: list[Problem] = []
        errors: list[UserError] = []
        for check in stage:
            try:
                problems += check(context)
            except UserError as error:
                errors.append(error)
        if len(errors) == 1 and not problems:
            raise errors[0]
        problems += [Problem("", str(error)) for error in errors]
        if problems:
            raise error_of(problems)


def error_of(problems: Sequence[Problem]) -> UserError:
    """Return the error that lists these problems. One without a key speaks for itself."""
    if len(problems) == 1 and not problems[0].key:
        return UserError(problems[0].message)
    unsupported = [problem for problem in problems if isinstance(problem, Unsupported)]
    others = [problem for problem in problems if not isinstance(problem, Unsupported)]
    lines = [f"  {problem}" for problem in others]
    lines = ["this run cannot start:", *lines] if others else []
    if unsupported:
        lines += ["not part of this version:", *(f"  {problem}" for problem in unsupported)]
    return (UserError if others else UnsupportedError)("\n".join(lines))
