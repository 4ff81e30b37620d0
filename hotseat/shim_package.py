"""A directory for PYTHONPATH with a package of ours that has another framework's name.

A process in which that framework itself can be imported is refused: which of the two runs would depend on the order of
paths.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

REFUSED = 2


@dataclass(frozen=True)
class ShimPackage:
    """One such directory, and how messages speak of it.

    package: the name that is imported. framework: the name that people write. what: of the directory, as in "which
    runs OpenRLHF's commands on Hotseat". command: a module of Hotseat that does the same beside the framework itself;
    empty where `python -m` runs nothing in the package.
    """

    package: str
    framework: str
    directory: Path
    what: str
    command: str = ""

    def refuse_another(self) -> None:
        """Raise ImportError if the framework itself can be imported; where `python -m` imports us, print and exit."""
        place = self.find_another()
        if place is None:
            return
        beside = f"; `python -m {self.command}` runs Hotseat beside it" if self.command else ""
        message = (
            f"PYTHONPATH has {self.directory}, {self.what}, but {self.framework} itself can be imported too, from"
            f" {place}: uninstall it or use an environment without it, or take {self.directory} out of PYTHONPATH to"
            f" run {self.framework}{beside}"
        )
        if self.command and sys.argv[:1] == ["-m"]:  # what Python has there until it has found the module to run
            print(message, file=sys.stderr)
            sys.exit(REFUSED)
        raise ImportError(message, name=self.package)

    def find_another(self) -> str | None:
        """Return the file from which a package of this name that is not ours can be imported; None: there is none."""
        for finder in sys.meta_path:
            if finder is PathFinder:
                elsewhere = [entry for entry in sys.path if Path(entry).resolve() != self.directory]
                spec = PathFinder.find_spec(self.package, elsewhere)
            else:  # such as that of a package installed in editable mode
                spec = finder.find_spec(self.package, None)
            # A folder without __init__.py, such as one in which a user keeps scripts, is not the package.
            if isinstance(spec, ModuleSpec) and spec.origin is not None:
                return spec.origin
        return None
