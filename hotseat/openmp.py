"""How the OpenMP threads of our processes wait for each other: asleep, so that others can use the cores.

By default a waiting thread spins. On cores that are shared with another process it then takes time from the thread
that it waits for. `OMP_WAIT_POLICY=PASSIVE` ends that in both runtimes: in GCC's, which torch brings on x86 and ARM, it
makes GOMP_SPINCOUNT 0, in LLVM's and Intel's, which vLLM's CPU build can load, KMP_BLOCKTIME 0. Either of the two, if a
user sets it, stands before it. A runtime reads the variable when it is loaded, so it is set before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

WAIT_POLICY = "OMP_WAIT_POLICY"


def wait_passively(environment: MutableMapping[str, str] | None = None) -> None:
    """Set the policy in this process's environment, or in another, unless it is set there."""
    (os.environ if environment is None else environment).setdefault(WAIT_POLICY, "PASSIVE")


def wait_policy() -> dict[str, str]:
    """Return the variable for a process to be started: the user's own value, or PASSIVE."""
    return {WAIT_POLICY: os.environ.get(WAIT_POLICY, "PASSIVE")}
