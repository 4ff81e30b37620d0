"""Has the agent of Ray's raylet load no modules: they report to the dashboard, which our clusters do not have.

Imported by the template of agents. Ray waits for its agent, and loading them takes most of the agent's start.
"""

from __future__ import annotations

from typing import Any

from ray.dashboard import utils


def _no_modules(*_: Any, **__: Any) -> list[type]:
    return []


utils.get_all_modules = _no_modules
