"""What stands beside the type of an option in the schema: its tasks, and whether it may change when a run resumes.

The conditions under which it has an effect, which stand there too, are in `conditions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hotseat.registry.tasks import TASKS, TaskEntry


@dataclass(frozen=True)
class Tasks:
    """The tasks in which an option, or a section without its exceptions, has an effect."""

    holds: Callable[[TaskEntry], bool]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, entry in TASKS.items() if self.holds(entry))


ALL = Tasks(lambda task: True)
RL = Tasks(lambda task: task.has_rollouts)
SFT = Tasks(lambda task: task.rows == "examples")
PAIRS = Tasks(lambda task: task.rows == "pairs")
RM = Tasks(lambda task: task.has_scalar_head)
DPO = Tasks(lambda task: task.compares_answers)
RL_OR_SFT = Tasks(lambda task: task.rows != "pairs")
RL_OR_DPO = Tasks(lambda task: task.has_rollouts or task.compares_answers)


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
