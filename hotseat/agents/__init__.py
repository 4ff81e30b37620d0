"""From a prompt to an episode.

    Agent         what any of them is; `SingleTurn` asks the engine once
    MultiTurn     an agent that plays an `Environment`: reset, then action and `Step` in turns
    load_agent    the agent in a user's file: an `Environment`, an `Agent`, or an agent file for OpenRLHF, unchanged
    AgentHost     runs many episodes at a time in its process, each for itself

Tokens in, tokens out: an episode has the ids that the engine sampled, with its log-probs, as they came. What an
environment adds is tokenised by itself and put behind them; no text is tokenised twice.
"""

from hotseat.agents.agent import Agent, AgentError, Sample, SingleTurn
from hotseat.agents.host import AgentHost
from hotseat.agents.loading import load_agent
from hotseat.agents.multi_turn import Environment, MultiTurn, Step
from hotseat.agents.transcript import Transcript

__all__ = [
    "Agent",
    "AgentError",
    "AgentHost",
    "Environment",
    "MultiTurn",
    "Sample",
    "SingleTurn",
    "Step",
    "Transcript",
    "load_agent",
]
