"""The directory that `hotseat openrlhf-path` prints: on PYTHONPATH, its package `openrlhf` has OpenRLHF's commands.

`openrlhf.cli` has the modules of `hotseat.cli`, so `python -m openrlhf.cli.train_sft` is `hotseat.cli.train_sft`. A
process in which another OpenRLHF can be imported is refused: which of the two runs would depend on the order of paths.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
REFUSED = 2


def refuse_another_openrlhf() -> None:
    """Raise ImportError if another OpenRLHF can be imported; where `python -m` imports us, print that and exit."""
    place = find_another_openrlhf()
    if place is None:
        return
    message = (
        f"PYTHONPATH has {DIRECTORY}, which runs OpenRLHF's commands on Hotseat, but OpenRLHF itself can be imported"
        f" too, from {place}: uninstall it or use an environment without it, or take {DIRECTORY} out of PYTHONPATH to"
        " run OpenRLHF; `python -m hotseat.cli.COMMAND` runs Hotseat beside it"
    )
    if sys.argv[:1] == ["-m"]:  # what Python has there until it has found the module to run
        print(message, file=sys.stderr)
        sys.exit(REFUSED)
    raise ImportError(message, name="openrlhf")


def find_another_openrlhf() -> str | None:
    """Return the file or folder from which an OpenRLHF other than ours can be imported, or None if there is none."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec("openrlhf", [entry for entry in sys.path if not _is_ours(entry)])
        else:  # such as that of a package installed in editable mode
            spec = finder.find_spec("openrlhf", None)
        # A folder without __init__.py, such as the one that a user keeps scripts in, is not the package.
        if isinstance(spec, ModuleSpec) and spec.origin is not None:
            return spec.origin
    return None


def _is_ours(entry: str) -> bool:
    return Path(entry).resolve() == DIRECTORY
