"""Device memory of simulators, as earlier runs measured it: plans count it where `env.memory_gib` is not set.

It is measured when simulators leave a device, which takes a run, and is kept in the user's cache directory by what
decides about it: the simulator, its arguments, and how many there are in how many processes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from hotseat.caches import cache_folder
from hotseat.config import Config

_FILE = "simulators.json"
_SMALLEST_GIB = 0.01  # less than this is a reading error


def kept_gib(config: Config) -> float | None:
    """Return the measured memory of one process of the role env on its device; None: nobody has measured it."""
    gib = _read().get(_key(config))
    return gib if isinstance(gib, float) else None


def keep_gib(config: Config, gib: float) -> bool:
    """Keep a measurement if it is the first or the largest. Return whether it changes what plans count."""
    known = kept_gib(config)
    if gib < _SMALLEST_GIB or (known is not None and gib <= known * 1.02):
        return False
    folder = cache_folder(os.environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{_FILE}.{os.getpid()}"
        new.write_text(json.dumps({**_read(), _key(config): gib}, indent=1) + "\n")
        new.rename(folder / _FILE)
    except OSError:  # a user without a directory to write to sets env.memory_gib
        return False
    return True


def _read() -> dict[str, object]:
    try:
        kept = json.loads((cache_folder(os.environ) / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _key(config: Config) -> str:
    env = config.env
    per_device = [env.num_envs, env.num_processes, config.rollout.pipeline_stage_num]
    # Files of one name in two directories are two simulators.
    path = str(env.path)
    path = str(Path(path).expanduser().absolute()) if path.endswith(".py") else path
    return json.dumps([path, env.tasks, env.kwargs, *per_device], sort_keys=True, default=str)
