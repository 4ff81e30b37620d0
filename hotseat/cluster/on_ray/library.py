"""Ray, imported only when a Ray cluster is used."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

# Ray prints this about every worker that we end, or report ourselves.
_NOISE = "A worker died or was killed while executing a task by an unexpected system error"


# Variables of a cluster of our own. The first name is Ray's, for the platforms where it is the default: everything on
# loopback.
RAY_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

# What the raylet sets for its agents: they end when a pipe to it is closed. They read it while they are loaded.
AGENT_ENV = {"RAY_enable_pipe_based_agent_to_parent_health_check": "1"}


@functools.cache  # it is asked for with every answer
def import_ray() -> Any:
    """Import Ray, after setting it not to print what we report ourselves."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _NOISE)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


def refresh_settings() -> None:
    """Have Ray read its variables and its token anew: it remembers those of the time when it was loaded."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
