"""Loads the user's agent file once before a run starts, so that a broken one is refused before a model loads.

It happens in a process of its own, beside the driver's imports: the file needs torch as the driver does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotseat.checks.stage import error_of
from hotseat.config import Config
from hotseat.errors import Problem
from hotseat.openmp import wait_policy
from hotseat.processes import ChildProcess, WorkerDied, WorkerTimeout
from hotseat.user_functions import located

_TRIAL = Path(__file__).parents[1] / "agents" / "loading_trial.py"
_LIMIT_S = 120.0  # after which the run starts without the answer


class AgentTrial:
    """Trial of an agent's file in a process that `end` ends, with all that the file has started."""

    def __init__(self, path: str, extra_path: list[str]):
        file, name = located(path)
        task = {
            "file": str(file),
            "name": name,
            "path": [*map(str, sys.path), *extra_path],
            "limit_s": int(2 * _LIMIT_S),  # should this process be killed
        }
        self._path = path
        self._began_s = time.monotonic()
        self._process = ChildProcess(_TRIAL, task, env={**os.environ, **wait_policy()})

    def notes(self) -> list[str]:
        """Wait for the answer, and return notes for the user. Raises `UserError` for a broken file."""
        try:
            answer = self._answer()
        finally:
            self.end()
        if answer is None:
            return [f"agent.path: {self._path} was not tried: it did not load within {_LIMIT_S:g} s"]
        problem = answer["problem"]
        if problem is None:
            return [f"agent.path: {answer['note']}"] if answer["note"] else []
        if answer["absent"] and os.environ.get("RAY_ADDRESS"):
            return [f"warning: agent.path: {problem}, on this machine: the cluster must have the package"]
        raise error_of([Problem("agent.path", problem)])

    def _answer(self) -> dict[str, Any] | None:
        """Return the answer of the process; None if it takes too long."""
        try:
            return self._process.receive(self._began_s + _LIMIT_S - time.monotonic())
        except WorkerTimeout:
            return None
        except WorkerDied as died:
            problem = f"{self._path} ends its process when it is loaded (exit code {died.code})"
            return {"problem": problem, "absent": False, "note": None}

    def end(self) -> None:
        self._process.end()


@contextmanager
def agent_trial(config: Config) -> Iterator[AgentTrial | None]:
    """Try the agent's file of a config inside the context; None if there is none, or another interpreter runs it."""
    path = config.agent.path
    if not config.has_rollouts or path is None or config.agent.python is not None:
        yield None
        return
    # Ray's workers, in which the agent will run, can import from the folder that the command is given in.
    trial = AgentTrial(path, [] if config.cluster.is_in_process else [os.getcwd()])
    try:
        yield trial
    finally:
        trial.end()
