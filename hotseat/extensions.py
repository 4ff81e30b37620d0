"""Names of what compatibility with other frameworks adds to the core, which imports none of their folders.

A name is "module:attribute"; `load` imports it when it is first needed. Worker processes of rewards load this file by
its path, without the package, so it needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple


class AgentFormEntry(NamedTuple):
    """A form of agent files that another framework has.

    form: name of the object that loads such files, such as `OpenrlhfForm`. classes, functions: a file that defines one
    of them has the form. description: of what such a file defines, for messages.
    """

    form: str
    classes: tuple[str, ...]
    functions: tuple[str, ...]
    description: str


class RewardFormEntry(NamedTuple):
    """A form of reward functions that another framework has.

    file: of this package, whose `adapted` makes of such a function one that is called by names. parameter: which tells
    the form. columns: of the data that such a function gets, and whether it needs them.
    """

    file: str
    parameter: str
    columns: Mapping[str, bool]


AGENT_FORMS = (
    AgentFormEntry(
        "hotseat.openrlhf.agents:FORM",
        ("AgentExecutor", "AgentInstance"),
        ("step",),
        "for OpenRLHF, class AgentExecutor, class AgentInstance, or step(state, action, label, **kwargs)",
    ),
)
# Adds to a step's metrics those of OpenRLHF's names (`log.openrlhf_names`).
METRIC_NAMES = "hotseat.openrlhf.metric_aliases:with_openrlhf_names"
# Files of this package whose `install` makes importable what reward files of other frameworks import.
REWARD_HELPERS = ("openrlhf/helpers.py",)
REWARD_FORMS = (
    RewardFormEntry(
        "verl/reward_form.py", "solution_str", {"data_source": True, "reward_model": True, "extra_info": False}
    ),
)
# Names that `reward.function` can be, with files of this package that have a function of that name.
REWARD_FUNCTIONS = {"verl_score": "verl/scores.py"}


def describe_agent_forms() -> str:
    """List what a file can define to be an agent, for messages."""
    ours = ("a subclass of hotseat.Environment or of hotseat.Agent", "play(prompt, client)")
    return "; ".join((*ours, *(entry.description for entry in AGENT_FORMS)))


def load(name: str) -> Any:
    """Import what is called "module:attribute"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
