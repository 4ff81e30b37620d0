"""OpenMP's wait policy for our processes: waiting threads sleep, so that others can use the cores.

By default a waiting thread spins. On cores that are shared with another process it then takes time from the very
thread that it waits for. `OMP_WAIT_POLICY=PASSIVE` stops the spinning in both runtimes: it sets GOMP_SPINCOUNT to 0 in
GCC's, which torch brings on x86 and ARM, and KMP_BLOCKTIME to 0 in LLVM's and Intel's, which vLLM's CPU build can load.
Where a user sets one of these two variables, it takes precedence. A runtime reads the variable when it is loaded, so
the policy is set before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

WAIT_POLICY = "OMP_WAIT_POLICY"


def wait_passively(environment: MutableMapping[str, str] | None = None) -> None:
    """Set the policy in this process's environment, or in the one passed, unless it is set there already."""
    (os.environ if environment is None else environment).setdefault(WAIT_POLICY, "PASSIVE")


def wait_policy() -> dict[str, str]:
    """Return the environment variable for a process to be started: the user's own value, or PASSIVE."""
    return {WAIT_POLICY: os.environ.get(WAIT_POLICY, "PASSIVE")}


def thread_env(num_threads: int) -> dict[str, str]:
    """Return the environment variables for a process to be started with so many threads of its numerical libraries."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {**dict.fromkeys(names, str(num_threads)), **wait_policy()}
