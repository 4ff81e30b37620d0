"""Small environments of other libraries, and the interpreters that have these libraries."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from hotseat.agents.environments.families import FAMILIES, library_problem

ROOT = Path(__file__).parents[2]

GYM = """
import gymnasium
from gymnasium.spaces import Text

class Letters(gymnasium.Env):
    observation_space = Text(20)
    action_space = Text(max_length=3, min_length=1, charset="abcde")

    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        self.num_steps = 0
        self.wanted = "abcde"[seed % 5]
        return f"say {self.wanted}", {}

    def step(self, action):
        self.num_steps += 1
        return "again", action.count(self.wanted) + self.bonus, self.num_steps == 2, False, {}

gymnasium.register("Letters-v0", entry_point=Letters)
"""

OPENENV = """
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Heard(Observation):
    echo: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.num_steps = 0
        self.wanted = "a"

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.num_steps = 0
        self.wanted = "abcde"[(seed or 0) % 5]
        return Heard(echo=f"say {self.wanted}", done=False)

    def step(self, action, timeout_s=None, **kwargs):
        self.num_steps += 1
        reward = float(action.message.count(self.wanted))
        return Heard(echo=action.message + "?", reward=reward, done=self.num_steps == 2)

    @property
    def state(self):
        return State(step_count=self.num_steps)

app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=64)
"""

VERIFIERS = """
import verifiers as vf
from datasets import Dataset

def lookup(letter: str) -> str:
    "Look a letter up."
    return {"a": "ace", "b": "bad"}.get(letter, "none")

async def has_letter(completion, answer) -> float:
    return float(answer in completion[-1]["content"])

def load_environment(kind="single", num_tasks=8):
    rows = [{"question": f"say {'abcde'[at % 5]}", "answer": "abcde"[at % 5]} for at in range(num_tasks)]
    settings = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[has_letter])}
    if kind == "tool":
        return vf.ToolEnv(tools=[lookup], max_turns=3, **settings)
    return vf.SingleTurnEnv(**settings)
"""


@functools.cache
def python_of(family: str) -> str | None:
    """The interpreter for a family of environments, None for our own. Skips the test if none has its library."""
    for python in (None, str(ROOT / ".agent-envs" / FAMILIES[family] / "bin" / "python")):
        if library_problem(family, python) is None:
            return python
    pytest.skip(f"no interpreter has {family}: `make agent-envs` makes one")


@functools.cache
def python_with(package: str) -> str:
    """The interpreter for programs that use a package. Skips the test if none has it."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    for python in (sys.executable, str(ROOT / ".agent-envs" / "libraries" / "bin" / "python")):
        if Path(python).exists() and subprocess.run([python, "-c", find, package]).returncode == 0:
            return python
    pytest.skip(f"no interpreter has {package}: `make agent-envs` makes one")
