"""Agent files written for OpenRLHF, unchanged, without OpenRLHF.

OpenRLHF's versions had four forms, which are all in use:

    step(state, action, label, **kwargs) -> reward, next_state, done, extra_info      a function, with module globals
    step(observation, action, label, **kwargs) -> {rewards, next_observation, done, ...}          the same, in a dict
    class AgentInstance: reset(states), step(states) -> {rewards, environment_feedback, done, ...}
    class AgentExecutor(MultiTurnAgentExecutor | AgentExecutorBase): execute(prompt, label, sampling_params, ...)

While a file loads, `openrlhf.utils.agent` is a stand-in (`stand_in.py`), whether OpenRLHF is installed or not. The
helpers in `hotseat.openrlhf.helpers` stand in for OpenRLHF's where it is not installed, also for later imports.
`agent_turns.py` plays the first three forms, turn by turn; `executor.py` and `episodes.py` run the last.
`agents/agent_file.py` finds `FORM` by its name in `hotseat.extensions`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hotseat.agents.agent import Agent
from hotseat.agents.agent_file import AgentFile
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.agents.multi_turn import MultiTurn
from hotseat.openrlhf.agents.agent_turns import FunctionTurns, InstanceTurns
from hotseat.openrlhf.agents.executor import ExecutorAgent
from hotseat.openrlhf.agents.stand_in import stand_in

__all__ = ["FORM"]


class OpenrlhfForm:
    """Makes agents of files that were written for OpenRLHF."""

    def stand_in(self) -> AbstractContextManager[None]:
        """Return a context in which what such files import can be imported."""
        return stand_in()

    def make(
        self,
        file: AgentFile,
        name: str,
        tokenizer: Any,
        *,
        run_seed: int,
        preparer: ImagePreparer | None,
        **limits: Any,
    ) -> Agent:
        """Make the agent that is called `name` in the file."""
        value = getattr(file.module, name)
        if name == "AgentExecutor":
            return ExecutorAgent(value, tokenizer, preparer=preparer, **limits)
        if name == "AgentInstance":
            return MultiTurn.of_turns(
                lambda: InstanceTurns(value), tokenizer, run_seed=run_seed, preparer=preparer, **limits
            )
        load = file.loader_for_episodes()
        return MultiTurn.of_turns(
            lambda: FunctionTurns(load), tokenizer, run_seed=run_seed, preparer=preparer, **limits
        )


FORM = OpenrlhfForm()
