"""The directory that `hotseat verl-path` prints: on PYTHONPATH, its package `verl` has verl's command `main_ppo`.

A process in which another verl can be imported is refused: which of the two runs would depend on the order of paths.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
REFUSED = 2


def refuse_another_verl() -> None:
    """Raise ImportError if another verl can be imported; where `python -m` imports us, print that and exit."""
    place = find_another_verl()
    if place is None:
        return
    message = (
        f"PYTHONPATH has {DIRECTORY}, which runs verl's command on Hotseat, but verl itself can be imported too, from"
        f" {place}: uninstall it or use an environment without it, or take {DIRECTORY} out of PYTHONPATH to run verl;"
        " `python -m hotseat.cli.main_ppo` runs Hotseat beside it"
    )
    if sys.argv[:1] == ["-m"]:  # what Python has there until it has found the module to run
        print(message, file=sys.stderr)
        sys.exit(REFUSED)
    raise ImportError(message, name="verl")


def find_another_verl() -> str | None:
    """Return the file from which a verl other than ours can be imported, or None if there is none."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec("verl", [entry for entry in sys.path if not _is_ours(entry)])
        else:  # such as that of a package installed in editable mode
            spec = finder.find_spec("verl", None)
        # A folder without __init__.py, such as one with reward functions, is not the package.
        if isinstance(spec, ModuleSpec) and spec.origin is not None:
            return spec.origin
    return None


def _is_ours(entry: str) -> bool:
    return Path(entry).resolve() == DIRECTORY
