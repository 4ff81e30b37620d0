"""Ray, imported only when a Ray cluster is used."""

from __future__ import annotations

import os
from typing import Any

# Ray prints this about every worker that we end, or report ourselves.
_NOISE = "A worker died or was killed while executing a task by an unexpected system error"


def import_ray() -> Any:
    """Import Ray, after setting it not to print what we report ourselves."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _NOISE)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray
