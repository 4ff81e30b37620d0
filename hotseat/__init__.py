"""Hotseat: RL post-training in which models and rollout engines take turns on the same devices.

    import hotseat

    run = hotseat.run("rl.yaml", "train.num_episodes=2")
    run.path, run.evaluation, run.metrics()

The names in `__all__` are public, and docs/python.md describes them. Every other module and name is private and may
change without notice. Each name is imported at its first use, so `import hotseat` loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it for True; importing `typing` for it would take longer than the rest
if TYPE_CHECKING:
    from hotseat import demo
    from hotseat.agents import Agent, AgentError, Environment, SampleFunction, SingleTurn, Step, Transcript
    from hotseat.algorithms.advantages import Advantages
    from hotseat.algorithms.policy_loss import PolicyLoss
    from hotseat.api import run, start
    from hotseat.config import Config
    from hotseat.errors import ConfigError, HotseatError, RunError, UserError
    from hotseat.rewards import Sandbox, SandboxSettings
    from hotseat.script.callbacks import Callback, EarlyStopping, StopAt
    from hotseat.script.live_run import LiveRun
    from hotseat.script.run_files import Run
    from hotseat.trl.translate import from_trl
    from hotseat.types import (
        Completion,
        Episode,
        GroupChange,
        Prompt,
        PromptGroup,
        SampleKey,
        Sampling,
        ScoredEpisode,
        Segment,
        TokenLayout,
    )

__all__ = [
    "Advantages",
    "Agent",
    "AgentError",
    "Callback",
    "Completion",
    "Config",
    "ConfigError",
    "EarlyStopping",
    "Environment",
    "Episode",
    "GroupChange",
    "HotseatError",
    "LiveRun",
    "PolicyLoss",
    "Prompt",
    "PromptGroup",
    "Run",
    "RunError",
    "SampleFunction",
    "SampleKey",
    "Sampling",
    "Sandbox",
    "SandboxSettings",
    "ScoredEpisode",
    "Segment",
    "SingleTurn",
    "Step",
    "StopAt",
    "TokenLayout",
    "Transcript",
    "UserError",
    "__version__",
    "demo",
    "from_trl",
    "run",
    "start",
]

__version__ = "0.1.0"

_HOMES = {
    "hotseat.agents": ("Agent", "AgentError", "Environment", "SampleFunction", "SingleTurn", "Step", "Transcript"),
    "hotseat.algorithms.advantages": ("Advantages",),
    "hotseat.algorithms.policy_loss": ("PolicyLoss",),
    "hotseat.api": ("run", "start"),
    "hotseat.script.callbacks": ("Callback", "EarlyStopping", "StopAt"),
    "hotseat.script.live_run": ("LiveRun",),
    "hotseat.script.run_files": ("Run",),
    "hotseat.config": ("Config",),
    "hotseat.errors": ("ConfigError", "HotseatError", "RunError", "UserError"),
    "hotseat.rewards": ("Sandbox", "SandboxSettings"),
    "hotseat.trl.translate": ("from_trl",),
    "hotseat.types": (
        *("Completion", "Episode", "GroupChange", "Prompt", "PromptGroup"),
        *("SampleKey", "Sampling", "ScoredEpisode", "Segment", "TokenLayout"),
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or else a type checker takes every misspelt name for a public one

    def __getattr__(name: str) -> object:
        """Import a public name at its first use."""
        if name == "demo":
            return import_module("hotseat.demo")
        if name not in _HOME_OF:
            raise AttributeError(f"module 'hotseat' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
