"""Agents, which turn a prompt into an episode.

    Agent         the protocol of all agents; `SingleTurn` asks the engine once
    MultiTurn     an agent that plays an `Environment`: reset, then an action and a `Step` in each turn
    load_agent    loads the agent of a user's file: an `Environment`, an `Agent`, an agent file for OpenRLHF, or a
                  program that reaches the policy through the gateway (`black_box.py`)
    AgentHost     runs many episodes at a time in its process, independently of each other

Tokens in, tokens out: an episode has the token ids and log-probs exactly as the engine returned them. Text that an
environment adds is tokenised separately and appended; no text is tokenised twice.
"""

from hotseat.agents.agent import Agent, AgentError, SampleFunction, SingleTurn
from hotseat.agents.agent_file import load_agent
from hotseat.agents.engine_calls import OpenRequests
from hotseat.agents.episode_jobs import Deadlines
from hotseat.agents.gateway.program_session import ProgramSettings
from hotseat.agents.host import AgentHost
from hotseat.agents.multi_turn import Environment, MultiTurn, Step
from hotseat.agents.transcript import Transcript

__all__ = [
    "Agent", "AgentError", "AgentHost", "Deadlines", "Environment", "MultiTurn", "OpenRequests", "ProgramSettings",
    "SampleFunction", "SingleTurn", "Step", "Transcript", "load_agent",
]  # fmt: skip
