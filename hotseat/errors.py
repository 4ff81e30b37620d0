"""The errors that Hotseat raises on purpose.

    HotseatError
    ├── UserError            something the user wrote cannot work; raised before any model loads
    │   ├── ConfigError      the config file, its overrides or the command line (lists every problem found)
    │   ├── PlacementError   roles, devices, flow or memory do not fit together
    │   │   └── TooFewDevicesError   the placement needs more devices than the inventory has
    │   ├── BatchError       batch sizes that do not divide each other
    │   ├── DataError        a data set that cannot be read with the settings of the config
    │   └── UnsupportedError    a documented option whose feature is not part of this version
    └── RunError             something failed while running
        ├── DeadlineError    a bounded wait ran out; names the process and the operation waited for
        ├── WorkerError      a process of a group failed; carries its rank and traceback
        ├── ClusterError     Ray itself died, so no process can be reached any more
        ├── RewardError      too many rewards failed
        ├── SandboxError     the sandbox did not run the generated code
        ├── WeightError      an engine does not serve the weights that were pushed
        ├── NonFiniteError   too many updates in a row were not finite
        ├── DeviceMemoryError   a micro-batch did not fit into the memory of its device
        │   └── BudgetError  the same, where the run can be resumed with a smaller token budget
        ├── StoreError       a storage such as S3, or the way to it, failed
        └── CheckpointError  a checkpoint cannot be written, or is damaged
            └── TakenOverError  another process writes the checkpoints of this run to the same storage now

A message says what was given, what would fit, and what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


class HotseatError(Exception):
    """Base class of every error that Hotseat raises on purpose.

    comes_again: a run that is resumed would meet it again; False: something died or hung; None: its causes and its text
    tell (`hotseat.deaths`).
    """

    comes_again: bool | None = None


class UserError(HotseatError):
    """Something the user wrote cannot work."""

    comes_again = True


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: its key, file and line, and a message with what would fit."""

    key: str
    message: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


class ConfigError(UserError):
    """A config has problems, which the message lists."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the config:\n" + "\n".join(f"  {problem}" for problem in problems))


class PlacementError(UserError):
    """Roles, devices, flow or memory do not fit together."""


class TooFewDevicesError(PlacementError):
    """The placement needs more devices than the inventory has."""


class BatchError(UserError):
    """Batch sizes do not divide each other."""


class DataError(UserError):
    """A data set cannot be read with the settings of the config."""


class UnsupportedError(UserError):
    """A documented option is set whose feature is not part of this version."""


class RunError(HotseatError):
    """Something failed while running."""

    is_death: bool = False  # it reports the death of a process


class DeadlineError(RunError):
    """A bounded wait ran out."""

    comes_again = False

    awaited: tuple[str, ...] = ()  # processes that did not answer, such as `rollout rank 0`


class WorkerError(RunError):
    """A process of a group failed."""

    group: str = ""
    rank: int = 0
    method: str = ""
    remote_traceback: str = ""


class ClusterError(RunError):
    """Ray itself died: no process of the run can be reached or replaced."""

    comes_again = False


class RewardError(RunError):
    """Too many rewards failed."""

    comes_again = True


class SandboxError(RunError):
    """The sandbox did not work; this says nothing about the code that it was to run."""

    comes_again = True


class WeightError(RunError):
    """An engine does not serve the weights that were pushed."""

    comes_again = True


class NonFiniteError(RunError):
    """Too many updates in a row were not finite."""

    comes_again = True


class DeviceMemoryError(RunError):
    """A micro-batch did not fit into the memory of its device.

    index: the micro-batch that ran out of memory. is_undone: the rank is in the state it had before the failed call.
    """

    comes_again = True

    def __init__(self, message: str, index: int = 0, is_undone: bool = False):
        super().__init__(message, index, is_undone)
        self.message, self.index, self.is_undone = message, index, is_undone

    def __str__(self) -> str:
        return self.message


class BudgetError(DeviceMemoryError):
    """A micro-batch did not fit, and the run can be resumed with a smaller token budget.

    use: the config section of the budget, train or rollout. tokens: the smaller budget of one device.
    """

    comes_again = False

    def __init__(self, message: str, use: str, tokens: int):
        super().__init__(message)
        self.args = message, use, tokens  # what pickle passes to the constructor in another process
        self.use, self.tokens = use, tokens


class StoreError(RunError):
    """A storage such as S3, or the way to it, failed."""

    comes_again = False


class CheckpointError(RunError):
    """A checkpoint cannot be written, or is damaged."""

    comes_again = True


class TakenOverError(CheckpointError):
    """Raised where another process writes the checkpoints of this run to the same storage now."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__
