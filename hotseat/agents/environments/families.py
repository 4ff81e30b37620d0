"""The families of environments, and whether an interpreter has their library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"

# The families, by what is imported, and what `make agent-envs` calls the virtual environment with each.
FAMILIES = {
    **dict.fromkeys(("gymnasium", "openenv", "reasoning_gym", "textarena"), "environments"),
    "verifiers": "verifiers",
}


@dataclass(frozen=True)
class EnvironmentSettings:
    """Settings of what runs in processes of its own: an environment of a family, or the function `play` of a file.

    python: the interpreter; None is ours. arguments: of the environment, as JSON. num_processes: per rollout host.
    has_our_rights: the process has our environment variables, folder and rights, as if the file ran in our own.
    """

    family: str | None = None
    name: str | None = None
    arguments: str = "{}"
    file: str | None = None
    python: str | None = None
    num_processes: int = 1
    has_our_rights: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        """Return what the process is to run, in JSON's types."""
        if self.family is None:
            return {"file": os.path.abspath(os.path.expanduser(str(self.file))), "helpers": self.has_our_rights}
        tasks = f"{self.family.title().replace('_', '')}Tasks"  # the class in the family's file
        file = str(_FOLDER / f"{self.family}.py")
        return {"file": file, "tasks": tasks, "name": _absolute(self.name), "arguments": json.loads(self.arguments)}

    def __str__(self) -> str:
        if self.family is None:
            return str(self.file)
        return self.family if self.name is None else f"{self.family} {self.name}"


def interpreter(python: str | None) -> str:
    """Return the path of an interpreter. A virtual environment's is a link, which must not be resolved."""
    if python is None:
        return sys.executable
    return os.path.abspath(shutil.which(os.path.expanduser(python)) or os.path.expanduser(python))


def library_problem(family: str, python: str | None) -> str | None:
    """Return why environments of a family cannot run under an interpreter, and what to do; None if they can."""
    program = interpreter(python)
    if shutil.which(program) is None:
        return f"there is no interpreter {python}: `make agent-envs` makes those of the families of environments"
    done = subprocess.run([program, "-c", _FIND, family], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    where = "is not installed" if python is None else f"is not installed for {python}"
    return (
        f"{family}: the package {family} {where}: pip install 'hotseat[{family.replace('_', '-')}]', or"
        f" `make agent-envs` and agent.python: .agent-envs/{FAMILIES[family]}/bin/python"
    )


def _absolute(name: str | None) -> str | None:
    """Return the name of an environment with an absolute path, if it begins with a Python file."""
    if name is None:
        return None
    file, dot_py, rest = name.partition(".py")
    if not dot_py or (rest and not rest.startswith(":")):
        return name
    return os.path.abspath(os.path.expanduser(file + dot_py)) + rest
