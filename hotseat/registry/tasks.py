"""Tasks: an entry for each, with the facts by which other code decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotseat.registry.lookup import Table


@dataclass(frozen=True)
class TaskEntry:
    """Facts about a task.

    rows: kind of data that a row holds. columns: options of `data` that name the row's columns. flow:
    "module:function" that makes the phases of a step, as `rl_phases` does. data: "module:function" that reads the data
    of supervised training and makes its objective, as `sft_data` does.
    """

    name: str  # of `task`
    summary: str  # for the docs
    rows: Literal["prompts", "examples", "pairs"]
    columns: tuple[str, ...]
    flow: str
    data: str = ""
    has_scalar_head: bool = False  # of the model that it trains
    compares_answers: bool = False  # by their log-probs, with those of a reference if `algorithm.dpo.loss` has one

    @property
    def has_rollouts(self) -> bool:
        """Return whether the policy learns from samples of its own; else it learns from rows by an objective."""
        return self.rows == "prompts"

    @property
    def sequences_per_row(self) -> int:
        return 2 if self.rows == "pairs" else 1


DEFAULT_TASK = "rl"

_PAIRS = ("prompt_key", "chosen_key", "rejected_key")

TASKS = Table[TaskEntry](
    "task",
    TaskEntry(
        "rl",
        "A policy, by reinforcement learning.",
        "prompts",
        ("input_key", "label_key"),
        "hotseat.placement.flow:rl_phases",
    ),
    TaskEntry(
        "sft",
        "A model, on examples of answers.",
        "examples",
        ("input_key", "output_key"),
        "hotseat.placement.flow:sft_phases",
        "hotseat.loop.inputs:sft_data",
    ),
    TaskEntry(
        "rm",
        "A reward model, on pairs of answers.",
        "pairs",
        _PAIRS,
        "hotseat.placement.flow:rm_phases",
        "hotseat.loop.inputs:reward_model_data",
        has_scalar_head=True,
    ),
    TaskEntry(
        "dpo",
        "A policy, on preferences between two answers.",
        "pairs",
        _PAIRS,
        "hotseat.placement.flow:dpo_phases",
        "hotseat.loop.inputs:preference_data",
        compares_answers=True,
    ),
)

task_entry = TASKS.entry
